"""Zeroed memory: large buffers in huge pages where the system has them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

HUGE_PAGE = 2 << 20
_ALIGNMENT = 64  # bytes of a cache line and of a wide register


_libc = ctypes.CDLL(None, use_errno=True)
_MADV_DONTNEED = 4


def give_back(array: npt.NDArray[Any]) -> None:
    """Return the whole pages of memory inside a contiguous view of an anonymous mapping.

    They read as zeros afterwards. Views shorter than a page are left as they are.
    """
    first = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A zeroed array, aligned to 64 bytes; pages are taken when first written."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if nbytes < HUGE_PAGE:
        raw = np.zeros(nbytes + _ALIGNMENT, np.uint8)
        skip = -raw.ctypes.data % _ALIGNMENT
        return raw[skip : skip + nbytes].view(dtype).reshape(shape)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # a kernel without huge pages refuses: slower, not wrong
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)
