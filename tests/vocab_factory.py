"""Vocabularies for tests: the golden ones as files, and small ones as metadata."""

from __future__ import annotations

import lzma
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.gguf_file import GgufFile
from engine.text_models import BYTE_CHARS
from tests.gguf_factory import tiny_vocab
from tests.golden import GOLDEN
from tests.smollm2 import smollm2_path

VOCABULARIES = ("llama-spm", "llama-bpe", "smollm2")
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


@dataclass(frozen=True)
class MetadataOnly:
    """What a tokenizer needs of a model file."""

    metadata: Mapping[str, Any] = field(default_factory=dict)


def open_vocabulary(name: str, folder: Path) -> GgufFile:
    """One of VOCABULARIES, unpacked into a folder where it is packed."""
    if name == "smollm2":
        return GgufFile.open(smollm2_path())
    packed = GOLDEN / "tokenizers" / f"ggml-vocab-{name}.gguf.xz"
    path = folder / packed.stem
    if not path.exists():
        with lzma.open(packed) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
    return GgufFile.open(path)


def bpe_file(
    specials: Sequence[tuple[str, int]] = (), *, merges: Sequence[str] | None = (), **keys: Any
) -> MetadataOnly:
    """The bytes as ids 0 to 255, then the results of merges, then special tokens with their types.

    keys: of the tokenizer's metadata without their prefix; None leaves one out
    """
    words = [merge.replace(" ", "") for merge in merges or ()]
    texts = [*BYTE_CHARS, *words, *(text for text, _ in specials)]
    types = [NORMAL] * (len(BYTE_CHARS) + len(words)) + [kind for _, kind in specials]
    given = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": texts,
        "token_type": types,
        "merges": None if merges is None else list(merges),
        **keys,
    }
    return _file(given)


def spm_file(specials: Sequence[tuple[str, int]] = (), **keys: Any) -> MetadataOnly:
    """The vocabulary of the tiny models, then special tokens with their types."""
    vocab = [*tiny_vocab(), *((text, 0.0, kind) for text, kind in specials)]
    texts, scores, types = zip(*vocab, strict=True)
    given = {
        "model": "llama",
        "tokens": list(texts),
        "scores": list(scores),
        "token_type": list(types),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **keys,
    }
    return _file(given)


def _file(given: Mapping[str, Any]) -> MetadataOnly:
    metadata = {
        key if key.startswith(("general.", "tokenizer.")) else f"tokenizer.ggml.{key}": value
        for key, value in given.items()
        if value is not None
    }
    return MetadataOnly(metadata)
