"""Text to token ids and back, as the model file's own vocabulary says."""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

from engine.pretokenizers import find_pre_tokenizer
from engine.requests import RowError, TokenizerError
from engine.special_tokens import SpecialTokens
from engine.text_models import BpeModel, SpmModel
from engine.vocabulary import (
    PREFIX,
    HasMetadata,
    TokenKind,
    Vocabulary,
    read_flag,
    read_merges,
    read_vocabulary,
)


class TextModel(Protocol):
    """The part that differs between kinds of vocabulary."""

    def encode(self, text: str, *, after_special: bool) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Tokenizer:
    """Encode text; decode tokens one by one.

    num_tokens: tokens with a text; ids from here on are padding of the embedding
    add_bos: whether the model wants its prompts to begin with BOS
    eog_ids: every id that ends a generation: the file's eos, eot and eom, and the known texts
    control_starts: the characters that texts of control tokens begin with
    lost_bytes: bytes that no token stands for: encoding drops them
    warnings: what was assumed or is odd about the file
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        model: TextModel,
        special: SpecialTokens,
        *,
        add_bos: bool,
        lost_bytes: bytes = b"",
        warnings: tuple[str, ...] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._model = model
        self._special = special
        self.num_tokens = len(vocabulary)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eog_ids = vocabulary.eog_ids
        self.add_bos = add_bos and vocabulary.bos_id is not None
        self.control_starts = special.control_starts
        self.lost_bytes = lost_bytes
        self.warnings = warnings
        self._bytes: dict[int, bytes] = {}

    @staticmethod
    def from_gguf(file: HasMetadata, *, pre_tokenizer: str | None = None) -> Tokenizer:
        """Build the tokenizer that a model file describes.

        file: a GgufFile; only its metadata is read
        pre_tokenizer: for byte-level BPE, use this name whatever the file says

        Raises TokenizerError: no vocabulary, an unknown kind of it or of pre-tokenizer, or damaged
            arrays.
        """
        kind = file.metadata.get(PREFIX + "model")
        if kind == "llama":
            return _build_spm(file)
        if kind == "gpt2":
            return _build_bpe(file, pre_tokenizer)
        raise TokenizerError(
            f"tokenizer model {kind!r} ({PREFIX}model) is not supported; supported are 'llama' "
            "(SentencePiece) and 'gpt2' (byte-level BPE)"
        )

    def encode(
        self,
        text: str,
        *,
        add_bos: bool | None = None,
        parse_special: bool = False,
        protected: Container[int] = (),
    ) -> list[int]:
        """Token ids of a text, white space and NUL included; nothing is normalised or stripped.

        add_bos: begin with BOS; None does as the model wants (its add_bos_token, else what its
            kind of vocabulary is used with). BOS comes once: none is added to ids that begin with
            it already, and several in front become one. Ids can begin with it only where
            `parse_special` found its text: a raw prompt that begins with the text of BOS gets BOS
            and then that text, as text.
        parse_special: read the texts of control tokens as those tokens; for templates, not users
        protected: positions in `text` where no control token may begin, though `parse_special`

        Raises RowError("invalid_utf8"): the text holds lone surrogates.
        """
        _check_unicode(text)
        ids: list[int] = []
        after_special = True
        pieces = self._special.split(text, parse_special=parse_special, protected=protected)
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._model.encode(piece, after_special=after_special)
            after_special = isinstance(piece, int)
        return self._begin(ids, self.add_bos if add_bos is None else add_bos)

    def token_bytes(self, token_id: int) -> bytes:
        """What a generated token adds to the text: b"" for control tokens and padding ids."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """A token as the vocabulary spells it, for people; "" for padding ids."""
        return self._vocabulary.texts[token_id] if 0 <= token_id < self.num_tokens else ""

    def find_control(self, text: str) -> list[int]:
        """Positions in `text` where the text of a control token begins."""
        return self._special.find_control(text)

    def _begin(self, ids: list[int], add_bos: bool) -> list[int]:
        if self.bos_id is None:
            return ids
        num_bos = next((i for i, token_id in enumerate(ids) if token_id != self.bos_id), len(ids))
        if num_bos == 0:
            return [self.bos_id, *ids] if add_bos else ids
        return ids[num_bos - 1 :]

    def _find_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.num_tokens:
            return b""
        kind = self._vocabulary.kinds[token_id]
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.UNUSED):
            return b""
        if kind == TokenKind.USER_DEFINED:
            return self._vocabulary.raw[token_id]
        return self._model.token_bytes(token_id)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            "invalid_utf8",
            f"character {error.start} of the text is a lone surrogate "
            f"(U+{ord(text[error.start]):04X}), which no UTF-8 text can hold",
        ) from error


def _build_spm(file: HasMetadata) -> Tokenizer:
    vocabulary = read_vocabulary(file)
    name = str(file.metadata.get("general.name", "")).lower()
    return Tokenizer(
        vocabulary,
        SpmModel(vocabulary, space_prefix=read_flag(file.metadata, "add_space_prefix", True)),
        SpecialTokens(vocabulary, strip_after="phi-3" in name or "phi3" in name),
        add_bos=read_flag(file.metadata, "add_bos_token", True),
    )


def _build_bpe(file: HasMetadata, forced: str | None) -> Tokenizer:
    named = file.metadata.get(PREFIX + "pre")
    spec = find_pre_tokenizer(forced or named or "default")
    vocabulary = read_vocabulary(file)
    model = BpeModel(vocabulary, read_merges(file), spec)
    add_bos = read_flag(file.metadata, "add_bos_token", spec.add_bos)
    warnings = _name_warnings(forced, named) + _bpe_warnings(model)
    if add_bos and vocabulary.bos_id is None:
        warnings.append(f"the model wants BOS, but the file names none ({PREFIX}bos_token_id)")
    return Tokenizer(
        vocabulary,
        model,
        SpecialTokens(vocabulary),
        add_bos=add_bos,
        lost_bytes=bytes(model.missing_bytes),
        warnings=tuple(warnings),
    )


def _name_warnings(forced: str | None, named: str | None) -> list[str]:
    if forced and forced != named:
        return [f"pre-tokenizer {forced!r} is forced; the model file names {named!r}"]
    if not named and not forced:
        return [
            f"the model file names no pre-tokenizer ({PREFIX}pre); 'default' is used, which may "
            "cut text otherwise than in training"
        ]
    return []


def _bpe_warnings(model: BpeModel) -> list[str]:
    warnings = []
    if model.num_unusable_merges:
        warnings.append(
            f"{model.num_unusable_merges} merges of tokens that are not in the vocabulary are left "
            "out"
        )
    if model.missing_bytes:
        listed = " ".join(f"{byte:02X}" for byte in model.missing_bytes[:16])
        warnings.append(
            f"{len(model.missing_bytes)} bytes have no token and are lost in encoding: {listed}"
        )
    return warnings
