"""Is the model still the one that a job was submitted with?

What takes milliseconds is known at submit: the header's hash and the sizes. The runner adds hashes
of the tensors when the job first starts, since they may take seconds on a slow disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

from engine.gguf_file import GgufFile
from engine.revision import NUMERICS_REVISION
from jobs.records import Fingerprint

SAMPLE_NBYTES = 64 << 10
_BLOCK_NBYTES = 8 << 20

OnProgress = Callable[[int], None]
_TITLES = {
    "model_nbytes": "model sizes in bytes",
    "header_sha256": "SHA-256 of the model's header",
    "samples_sha256": "SHA-256 of samples of the model's tensors",
    "full_sha256": "SHA-256 of the whole model",
    "numerics_revision": "numerics revision of this program",
}


def read_fingerprint(file: GgufFile) -> Fingerprint:
    """What is known without reading a tensor. Raises OSError: the model cannot be read."""
    sizes = tuple(path.stat().st_size for path in file.paths)
    ends = list(sizes)
    for tensor in file.tensors.values():
        ends[tensor.file_idx] = min(ends[tensor.file_idx], tensor.offset)
    headers = ((path, 0, end) for path, end in zip(file.paths, ends, strict=True))
    return Fingerprint(
        model_nbytes=sizes,
        header_sha256=_hash(headers, lambda _: None),
        numerics_revision=NUMERICS_REVISION,
    )


def read_full_fingerprint(
    model: str | Path, *, verify: bool, on_progress: OnProgress = lambda _: None
) -> Fingerprint:
    """All of it.

    verify: hash all bytes of the model too
    on_progress: called with the bytes read so far; may raise to stop it

    Raises GgufError, OSError: the model cannot be read.
    """
    file = GgufFile.open(model)
    whole = ((path, 0, path.stat().st_size) for path in file.paths)
    return replace(
        read_fingerprint(file),
        samples_sha256=_hash(_samples(file), on_progress),
        full_sha256=_hash(whole, on_progress) if verify else None,
    )


def fingerprint_differences(then: Fingerprint, now: Fingerprint) -> list[str]:
    """One line for each value known of both that differs, with both."""
    found = []
    for name in (field.name for field in fields(Fingerprint)):
        before, after = getattr(then, name), getattr(now, name)
        if None not in (before, after) and before != after:
            found.append(f"{_TITLES[name]}: was {_shown(before)}, is {_shown(after)}")
    return found


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " + ".join(map(str, value))
    return str(value)[:16]


# ---- hashes ------------------------------------------------------------------------------

Extent = tuple[Path, int, int]  # file, offset, bytes


def _samples(file: GgufFile) -> Iterator[Extent]:
    for tensor in file.tensors.values():
        nbytes = min(tensor.nbytes, SAMPLE_NBYTES)
        yield file.paths[tensor.file_idx], tensor.offset, nbytes


def _hash(extents: Iterator[Extent], on_progress: OnProgress) -> str:
    """Of the bytes of all extents, one after the other."""
    digest, num_read = hashlib.sha256(), 0
    for path, offset, nbytes in extents:
        with path.open("rb") as source:
            source.seek(offset)
            left = nbytes
            while block := source.read(min(left, _BLOCK_NBYTES)):
                digest.update(block)
                left -= len(block)
                num_read += len(block)
                on_progress(num_read)
    return digest.hexdigest()
