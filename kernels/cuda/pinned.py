"""Page-locked host memory, which the device copies from at full speed and reads in place."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt


def pinned_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    """(nbytes,) uint8, begun at a page."""
    # Not from CuPy's pool, which rounds up to a power of two and never gives back.
    memory = cp.cuda.PinnedMemoryPointer(cp.cuda.PinnedMemory(max(nbytes, 1)), 0)
    return np.frombuffer(memory, np.uint8, nbytes)


def device_view(pinned: npt.NDArray[np.uint8]) -> Any:
    """The same bytes as the device reads them, over the link."""
    address, device = pinned.ctypes.data, cp.cuda.Device().id
    memory = cp.cuda.UnownedMemory(address, pinned.nbytes, pinned, device)
    return cp.ndarray(pinned.shape, np.uint8, cp.cuda.MemoryPointer(memory, 0))
