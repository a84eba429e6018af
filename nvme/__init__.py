"""Bytes of model files into buffers, by the fastest reader that a machine allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nvme.base import Reader, ReadError, ReadRequest

READER_NAMES = ("mmap",)

__all__ = ["READER_NAMES", "ReadError", "ReadRequest", "Reader", "open_reader"]


def open_reader(name: str, paths: Sequence[str | Path]) -> Reader:
    """Open a reader of `READER_NAMES` on files; its module is imported only now.

    Raises ReadError where a file cannot be opened, ValueError for another name.
    """
    if name == "mmap":
        from nvme.mmap import MmapReader

        return MmapReader(paths)
    raise ValueError(f"no reader named {name!r}; there are: {', '.join(READER_NAMES)}")
