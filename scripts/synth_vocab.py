"""A vocabulary of any size for models without a language: bytes, letters, and made-up words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
SPACE = "▁"
_CONSONANTS = "bcdfghjklmnpqrstvwxz"
_VOWELS = "aeiou"


@dataclass(frozen=True, slots=True)
class Vocab:
    """Pieces of a SentencePiece BPE model, with scores and token types."""

    texts: list[str]
    scores: list[float]
    kinds: list[int]


def make_vocab(size: int) -> Vocab:
    """Each piece longer than a letter can be merged from two that come before it.

    Raises ValueError where the size is below what special tokens, bytes and letters take.
    """
    specials = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    fixed = specials + [(f"<0x{value:02X}>", BYTE) for value in range(256)]
    letters = [SPACE, *(chr(code) for code in range(0x21, 0x7F))]
    smallest = len(fixed) + len(letters)
    if size < smallest:
        raise ValueError(f"a vocabulary of {size} is too small; {smallest} is the least")
    words = itertools.islice(_words(), size - smallest)
    normal = [*letters, *words]
    if len(fixed) + len(normal) < size:
        raise ValueError(
            f"a vocabulary of {size} is too large; {len(fixed) + len(normal)} is the most"
        )
    return Vocab(
        texts=[text for text, _ in fixed] + normal,
        scores=[0.0] * len(fixed) + [-float(rank) for rank in range(len(normal))],
        kinds=[kind for _, kind in fixed] + [NORMAL] * len(normal),
    )


def _words() -> Iterator[str]:
    """Syllables, then words of two and of three, each with a space before it and without."""
    syllables = [first + second for first in _CONSONANTS for second in _VOWELS]
    for num_syllables in (1, 2, 3):
        for parts in itertools.product(syllables, repeat=num_syllables):
            word = "".join(parts)
            yield SPACE + word
            yield word
