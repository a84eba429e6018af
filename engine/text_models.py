"""The two kinds of vocabulary that text can be cut with: SentencePiece, and byte-level BPE."""

from __future__ import annotations

from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as spm_format
from tokenizers import Tokenizer
from tokenizers.models import BPE

from engine.pretokenizers import PreTokenizerSpec, build_pre_tokenizer
from engine.requests import TokenizerError
from engine.vocabulary import PREFIX, TokenKind, Vocabulary

SPACE_MARK = "▁"
NUM_BYTES = 256
# Bytes that no UTF-8 text holds; a vocabulary need not have them.
BYTES_OUTSIDE_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))


# ---- SentencePiece -------------------------------------------------------------------------


class SpmModel:
    """A SentencePiece BPE model made from the file's pieces and scores.

    space_prefix: text at the start, or after a special token, gets a space in front
    """

    def __init__(self, vocabulary: Vocabulary, *, space_prefix: bool) -> None:
        self._vocabulary = vocabulary
        self._space_prefix = space_prefix
        proto = _spm_proto(vocabulary)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(
                model_proto=proto.SerializeToString()
            )
        except RuntimeError as error:
            raise TokenizerError(f"sentencepiece refuses the vocabulary: {error}") from error

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        if self._space_prefix and after_special:
            text = " " + text
        ids: list[int] = self._processor.encode(text)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        if self._vocabulary.kinds[token_id] == TokenKind.BYTE:
            return bytes((_byte_value(self._vocabulary.texts[token_id]),))
        return self._vocabulary.raw[token_id].replace(SPACE_MARK.encode(), b" ")


def _spm_proto(vocabulary: Vocabulary) -> Any:
    """The vocabulary as SentencePiece stores one; text is taken as it is, spaces included."""
    if not vocabulary.scores:
        raise TokenizerError(f"{PREFIX}scores is missing; an SPM vocabulary cannot merge without")
    unknown = vocabulary.ids_of(TokenKind.UNKNOWN)
    if not unknown:
        raise TokenizerError(f"{PREFIX}token_type marks no token as unknown; convert the file anew")
    num_bytes = len({_byte_value(vocabulary.texts[i]) for i in vocabulary.ids_of(TokenKind.BYTE)})
    proto = spm_format.ModelProto()
    proto.trainer_spec.model_type = spm_format.TrainerSpec.BPE
    proto.trainer_spec.byte_fallback = num_bytes == NUM_BYTES
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    seen: set[str] = set()
    for token_id, text in enumerate(vocabulary.texts):
        kind = vocabulary.kinds[token_id]
        if not text or text in seen:
            text, kind = f"\ue000{token_id}", TokenKind.CONTROL
        elif kind == TokenKind.USER_DEFINED or (
            kind == TokenKind.UNKNOWN and token_id != unknown[0]
        ):
            kind = TokenKind.CONTROL
        seen.add(text)
        proto.pieces.add(piece=text, score=vocabulary.scores[token_id], type=int(kind))
    return proto


def _byte_value(text: str) -> int:
    """65 for "<0x41>"."""
    try:
        return int(text.removeprefix("<0x").removesuffix(">"), 16) % NUM_BYTES
    except ValueError as error:
        raise TokenizerError(f"byte token {text!r} is not of the form '<0x41>'") from error


# ---- byte-level BPE ------------------------------------------------------------------------


class BpeModel:
    """A byte-level BPE of tokens and merges; control tokens are no words of it."""

    def __init__(
        self, vocabulary: Vocabulary, merges: list[tuple[str, str]], spec: PreTokenizerSpec
    ) -> None:
        self._vocabulary = vocabulary
        hidden = set(vocabulary.ids_of(TokenKind.CONTROL, TokenKind.UNKNOWN))
        last_to_first = reversed(list(enumerate(vocabulary.texts)))
        ids = {text: token_id for token_id, text in last_to_first if token_id not in hidden}
        usable = [(a, b) for a, b in merges if a in ids and b in ids and a + b in ids]
        self.num_unusable_merges = len(merges) - len(usable)
        self.missing_bytes = sorted(
            byte
            for byte, char in enumerate(BYTE_CHARS)
            if char not in ids and byte not in BYTES_OUTSIDE_UTF8
        )
        model = BPE(vocab=ids, merges=usable, ignore_merges=spec.ignore_merges)
        self._tokenizer = Tokenizer(model)
        self._tokenizer.pre_tokenizer = build_pre_tokenizer(spec)

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        text = self._vocabulary.texts[token_id]
        try:
            return bytes(BYTE_OF_CHAR[char] for char in text)
        except KeyError:
            return self._vocabulary.raw[token_id]


def _byte_chars() -> tuple[str, ...]:
    """GPT-2's printable character for each byte: itself, or U+0100 and up in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return tuple(
        chr(byte) if byte in printable else chr(0x100 + others.index(byte))
        for byte in range(NUM_BYTES)
    )


BYTE_CHARS = _byte_chars()
BYTE_OF_CHAR = {char: byte for byte, char in enumerate(BYTE_CHARS)}
