"""Buffers, named by what they guarantee."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt


def page_aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory that begins at a page and is in huge pages where the system has them.

    Memory is taken as pages are first touched; it goes back when the array and its views are gone.
    Returns (nbytes,) uint8.
    """
    pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin in each direct read
    return np.frombuffer(pages, np.uint8, count=nbytes)
