"""Page-locked host memory, which the device copies from at full speed and reads in place."""

from __future__ import annotations

import contextlib
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt

_LEAST_NBYTES = 256 << 20  # of what is mapped and locked in two steps
_STEP_NBYTES = 256 << 20  # that a thread takes from the system at once
_MOST_THREADS = 16
_PORTABLE, _MAPPED = 1, 2  # cudaHostRegisterFlags


def pinned_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    """(nbytes,) uint8, begun at a page."""
    if nbytes >= _LEAST_NBYTES:
        return np.frombuffer(_LockedMap.of(nbytes), np.uint8, nbytes)
    # Not from CuPy's pool, which rounds up to a power of two and never gives back.
    memory = cp.cuda.PinnedMemoryPointer(cp.cuda.PinnedMemory(max(nbytes, 1)), 0)
    return np.frombuffer(memory, np.uint8, nbytes)


class _LockedMap(mmap.mmap):
    """Anonymous memory, taken by many threads at once: one alone, as in CUDA's own call, takes
    twice as long to find and clear the pages. Locked until nobody holds it.
    """

    address = 0

    @classmethod
    def of(cls, nbytes: int) -> _LockedMap:
        made = cls(-1, nbytes)
        made.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(made, np.uint8)

        def touch(begin: int) -> None:
            whole[begin : begin + _STEP_NBYTES : mmap.PAGESIZE] = 0

        with ThreadPoolExecutor(_MOST_THREADS) as threads:
            list(threads.map(touch, range(0, nbytes, _STEP_NBYTES)))
        cp.cuda.runtime.hostRegister(whole.ctypes.data, nbytes, _PORTABLE | _MAPPED)
        made.address = whole.ctypes.data
        return made

    def __del__(self) -> None:
        # When the process ends, the driver may have gone before.
        with contextlib.suppress(cp.cuda.runtime.CUDARuntimeError):
            if self.address:
                cp.cuda.runtime.hostUnregister(self.address)


def device_view(pinned: npt.NDArray[np.uint8]) -> Any:
    """The same bytes as the device reads them, over the link."""
    address, device = pinned.ctypes.data, cp.cuda.Device().id
    memory = cp.cuda.UnownedMemory(address, pinned.nbytes, pinned, device)
    return cp.ndarray(pinned.shape, np.uint8, cp.cuda.MemoryPointer(memory, 0))
