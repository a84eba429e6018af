"""Small arrays on their way to the device, beside the weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import cupy as cp
import numpy as np

from kernels.cuda.matrix import DeviceArray
from kernels.cuda.modules import blocks_for, get_kernel
from kernels.cuda.pinned import device_view, pinned_bytes

_ALIGNMENT = 16
_WORD = 4
_THREADS = 256
_LEAST_NBYTES = 64 << 10
_MOST_LAYOUTS = 256  # that are remembered

_Layout: TypeAlias = tuple[tuple[tuple[int, ...], "np.dtype[Any]"], ...]


@dataclass(frozen=True, slots=True)
class _Places:
    """Arrays one behind the other, as the host and as the device see them."""

    num_words: int
    host: list[np.ndarray]
    device: list[DeviceArray]


class Uploads:
    """Arrays of one purpose, brought together; each call writes over what the one before brought.

    A kernel fetches them out of pinned memory: the engine that copies weights serves in order, and
    a copy would wait for those that are on their way. Equal sizes come to equal places.
    """

    def __init__(self) -> None:
        self.serial = 0  # of the latest call
        self.places_serial = 0  # rises when places move
        self._fetched = cp.cuda.Event(disable_timing=True)
        self._places: dict[_Layout, _Places] = {}
        self._make_room(_LEAST_NBYTES)

    def bring(self, arrays: Sequence[np.ndarray]) -> list[DeviceArray]:
        """The arrays on the device, in order for the current stream."""
        layout = tuple((array.shape, array.dtype) for array in arrays)
        self._fetched.synchronize()  # the host must not write what is still being fetched
        places = self._places.get(layout) or self._place(layout)
        self.serial += 1
        for target, array in zip(places.host, arrays, strict=True):
            target[...] = array
        get_kernel("pointwise.cu", "copy_words")(
            (blocks_for(places.num_words, _THREADS),),
            (_THREADS,),
            (np.int32(places.num_words), self._source, self._there),
        )
        self._fetched.record()
        return places.device

    def _place(self, layout: _Layout) -> _Places:
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in layout]
        ends = list(itertools.accumulate(_padded(size) for size in sizes))
        if ends[-1] > len(self._pinned):
            self._make_room(2 * ends[-1])
        if len(self._places) >= _MOST_LAYOUTS:
            self._places.clear()
        host, device = [], []
        for begin, size, (shape, dtype) in zip([0, *ends[:-1]], sizes, layout, strict=True):
            there = self._there[begin : begin + size]
            host.append(self._pinned[begin : begin + size].view(dtype).reshape(shape))
            # Records stay bytes: CuPy has no arrays of them.
            device.append(there if dtype.fields else there.view(dtype).reshape(shape))
        self._places[layout] = _Places(ends[-1] // _WORD, host, device)
        return self._places[layout]

    def _make_room(self, nbytes: int) -> None:
        self._pinned = pinned_bytes(nbytes)
        self._source = device_view(self._pinned)
        self._there = cp.empty(nbytes, np.uint8)
        self._places.clear()
        self.places_serial += 1


def _padded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
