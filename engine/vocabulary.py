"""The tokens of a model file: texts, kinds, and which of them begin a text or end a turn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from engine.gguf_file import Metadata
from engine.requests import TokenizerError

PREFIX = "tokenizer.ggml."
EOG_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Texts that end a turn or a document in the models that use them, whatever the metadata names.
EOG_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",  # noqa: RUF001
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
        "_<EOT>",
        "<turn|>",
        "[e~[",
    }
)
SPM_DEFAULTS = {"bos_token_id": "<s>", "eos_token_id": "</s>"}  # where the file names none
MARK = re.compile(r"[<\[].+[>\]]", re.DOTALL)
# These are also ordinary text (HTML, say), so they count only where the file calls them control.
EOG_TEXTS_IF_CONTROL = frozenset({"</s>", "<EOT>", "[EOT]", "<eos>", "[EOS]"})


class TokenKind(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class HasMetadata(Protocol):
    """A GgufFile, as far as text is concerned."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """texts: as the file spells them; raw: the same as stored; kinds: one per token.

    scores: merge priorities of an SPM vocabulary, else empty
    """

    texts: Sequence[str]
    raw: Sequence[bytes]
    kinds: Sequence[TokenKind]
    scores: Sequence[float]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    eog_ids: frozenset[int]

    def __len__(self) -> int:
        return len(self.texts)

    def ids_of(self, *kinds: TokenKind) -> list[int]:
        return [token_id for token_id, kind in enumerate(self.kinds) if kind in kinds]


def read_vocabulary(file: HasMetadata) -> Vocabulary:
    """Read the tokens of a file.

    A known end of turn, and a mark that the metadata names as BOS or as an end, is a control token
    whatever its type says.
    Raises TokenizerError: tokens missing, or arrays and ids that do not fit them.
    """
    metadata = file.metadata
    raw = _raw_strings(metadata, PREFIX + "tokens")
    texts = [text.decode(errors="replace") for text in raw]
    kinds = _read_kinds(metadata, len(texts))
    ids = {key: _token_id(metadata, key, len(texts)) for key in ("bos_token_id", *EOG_KEYS)}
    if metadata.get(PREFIX + "model") == "llama":
        for key, text in SPM_DEFAULTS.items():
            ids[key] = _find_control(texts, kinds, text) if ids[key] is None else ids[key]
    named_ends = {token_id for key in EOG_KEYS if (token_id := ids[key]) is not None}
    ends_by_text = set(_eog_by_text(texts, kinds))
    marks = {i for i in (ids["bos_token_id"], *named_ends) if i is not None}
    for token_id in ends_by_text | {i for i in marks if MARK.fullmatch(texts[i])}:
        kinds[token_id] = TokenKind.CONTROL
    return Vocabulary(
        texts=texts,
        raw=raw,
        kinds=kinds,
        scores=_read_numbers(metadata, "scores", len(texts)),
        bos_id=ids["bos_token_id"],
        eos_id=ids["eos_token_id"],
        unknown_id=_token_id(metadata, "unknown_token_id", len(texts)),
        eog_ids=frozenset(ends_by_text | named_ends),
    )


def read_flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    """A boolean of the tokenizer's metadata, such as "add_bos_token"."""
    value = metadata.get(PREFIX + key, default)
    if not isinstance(value, bool):
        raise TokenizerError(f"{PREFIX}{key} is {value!r}, expected true or false")
    return value


def read_merges(file: HasMetadata) -> list[tuple[str, str]]:
    """Pairs in order of priority. Raises TokenizerError where there are none."""
    key = PREFIX + "merges"
    merges = [text.decode(errors="replace") for text in _raw_strings(file.metadata, key)]
    pairs = []
    for merge in merges:
        space = merge.find(" ", 1)
        if space < 0:
            raise TokenizerError(f"{key}: {merge!r} is not two tokens with a space between them")
        pairs.append((merge[:space], merge[space + 1 :]))
    return pairs


def _raw_strings(metadata: Mapping[str, Any], key: str) -> list[bytes]:
    if key not in metadata:
        raise TokenizerError(f"the model file has no {key}; convert the model again, with its text")
    if isinstance(metadata, Metadata):
        return metadata.get_bytes_array(key)
    return [text.encode() for text in metadata[key]]


def _read_numbers(metadata: Mapping[str, Any], name: str, num_tokens: int) -> list[Any]:
    values = metadata.get(PREFIX + name)
    if values is None:
        return []
    if len(values) != num_tokens:
        raise TokenizerError(f"{PREFIX}{name} has {len(values)} items for {num_tokens} tokens")
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _read_kinds(metadata: Mapping[str, Any], num_tokens: int) -> list[TokenKind]:
    known = {int(kind): kind for kind in TokenKind}
    kinds = _read_numbers(metadata, "token_type", num_tokens) or [TokenKind.NORMAL] * num_tokens
    return [known.get(kind, TokenKind.UNUSED) for kind in kinds]


def _token_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    token_id = metadata.get(PREFIX + name)
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < num_tokens:
        raise TokenizerError(f"{PREFIX}{name} is {token_id!r}, but there are {num_tokens} tokens")
    return token_id


def _find_control(texts: Sequence[str], kinds: Sequence[TokenKind], text: str) -> int | None:
    found = texts.index(text) if text in texts else None
    return found if found is not None and kinds[found] == TokenKind.CONTROL else None


def _eog_by_text(texts: Iterable[str], kinds: Sequence[TokenKind]) -> Iterable[int]:
    for token_id, text in enumerate(texts):
        if text in EOG_TEXTS or (
            text in EOG_TEXTS_IF_CONTROL and kinds[token_id] == TokenKind.CONTROL
        ):
            yield token_id
