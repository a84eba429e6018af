"""Small arrays on their way to the device, beside the weights."""

from __future__ import annotations

from collections.abc import Sequence

import cupy as cp
import numpy as np

from kernels.cuda.matrix import DeviceArray
from kernels.cuda.modules import blocks_for, get_kernel
from kernels.cuda.pinned import device_view, pinned_bytes

_ALIGNMENT = 16
_WORD = 4
_THREADS = 256
_LEAST_NBYTES = 64 << 10


class Uploads:
    """Arrays of one purpose, brought together; each call writes over what the one before brought.

    A kernel fetches them out of pinned memory: the engine that copies weights serves in order, and
    a copy would wait for those that are on their way. Equal sizes come to equal places.
    """

    def __init__(self) -> None:
        self.serial = 0  # of the latest call
        self.places_serial = 0  # rises when places move
        self._fetched = cp.cuda.Event(disable_timing=True)
        self._make_room(_LEAST_NBYTES)

    def bring(self, arrays: Sequence[np.ndarray]) -> list[DeviceArray]:
        """The arrays on the device, in order for the current stream."""
        ends = np.cumsum([_padded(array.nbytes) for array in arrays]).tolist()
        self._fetched.synchronize()  # the host must not write what is still being fetched
        if ends[-1] > len(self._pinned):
            self._make_room(2 * ends[-1])
        self.serial += 1
        begins = [0, *ends[:-1]]
        for array, begin in zip(arrays, begins, strict=True):
            data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
            self._pinned[begin : begin + array.nbytes] = data
        num_words = ends[-1] // _WORD
        get_kernel("pointwise.cu", "copy_words")(
            (blocks_for(num_words, _THREADS),),
            (_THREADS,),
            (np.int32(num_words), self._source, self._there),
        )
        self._fetched.record()
        return [
            _typed(self._there[begin : begin + array.nbytes], array)
            for array, begin in zip(arrays, begins, strict=True)
        ]

    def _make_room(self, nbytes: int) -> None:
        self._pinned = pinned_bytes(nbytes)
        self._source = device_view(self._pinned)
        self._there = cp.empty(nbytes, np.uint8)
        self.places_serial += 1


def _typed(there: DeviceArray, array: np.ndarray) -> DeviceArray:
    """Records stay bytes: CuPy has no arrays of them."""
    return there if array.dtype.fields else there.view(array.dtype).reshape(array.shape)


def _padded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
