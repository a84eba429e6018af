"""Bytes of model files into buffers, by the fastest reader that a machine allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nvme.alignment import align_outward
from nvme.base import Reader, ReadError, ReadRequest, ReadStats
from nvme.memory import page_aligned

READER_NAMES = ("mmap", "direct")

__all__ = [
    "READER_NAMES",
    "ReadError",
    "ReadRequest",
    "ReadStats",
    "Reader",
    "align_outward",
    "open_reader",
    "page_aligned",
]


def open_reader(
    name: str, paths: Sequence[str | Path], *, cache_dir: str | Path | None = None
) -> Reader:
    """Open a reader of `READER_NAMES` on files; its module is imported only now.

    cache_dir: folder that keeps what was found out about disks; with it, the direct reader takes
        the transfer size that suits the disk (a second of reading, once per disk)
    Raises ReadError where a file cannot be opened, ValueError for another name.
    """
    if name == "mmap":
        from nvme.mmap import MmapReader

        return MmapReader(paths)
    if name == "direct":
        from nvme.direct import DEFAULT_TRANSFER, DirectReader

        if cache_dir is None:
            return DirectReader(paths, DEFAULT_TRANSFER)
        from nvme.probe import choose_transfer

        return DirectReader(paths, choose_transfer(paths, cache_dir))
    raise ValueError(f"no reader named {name!r}; there are: {', '.join(READER_NAMES)}")
