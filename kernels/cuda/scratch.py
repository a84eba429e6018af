"""Work buffers of operations, which live on between calls."""

from __future__ import annotations

import itertools
import math
from typing import Any

import cupy as cp
import numpy as np

from kernels.cuda.matrix import DeviceArray

_ALIGNMENT = 512
_MOST_ARRAYS = 64  # of a buffer that are remembered


class Scratch:
    """Buffers of one device by name; each grows to the most that was asked for.

    Operations follow each other on one stream, so that those with the same name share the memory.
    """

    def __init__(self) -> None:
        self.num_moves = 0  # how often a buffer came to lie elsewhere
        self._buffers: dict[str, DeviceArray] = {}
        self._arrays: dict[str, dict[Any, list[DeviceArray]]] = {}  # made so far, by their sizes

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        """An array in a buffer; what nobody wrote holds anything."""
        return self.take_all(name, ((shape, dtype),))[0]

    def take_all(
        self, name: str, arrays: tuple[tuple[tuple[int, ...], Any], ...]
    ) -> list[DeviceArray]:
        """Arrays of shapes and types, one behind the other in a buffer."""
        made = self._arrays.setdefault(name, {})
        if arrays not in made:
            if len(made) >= _MOST_ARRAYS:
                made.clear()
            made[arrays] = self._make(name, arrays)
        return made[arrays]

    def _make(
        self, name: str, arrays: tuple[tuple[tuple[int, ...], Any], ...]
    ) -> list[DeviceArray]:
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays]
        ends = list(itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        if name not in self._buffers or len(self._buffers[name]) < ends[-1]:
            self._buffers.pop(name, None)
            self._arrays[name].clear()
            free_unused()
            self.num_moves += 1
            self._buffers[name] = cp.zeros(ends[-1], np.uint8)
        buffer = self._buffers[name]
        return [
            buffer[begin : begin + size].view(dtype).reshape(shape)
            for begin, size, (shape, dtype) in zip([0, *ends[:-1]], sizes, arrays, strict=True)
        ]

    def clear(self) -> None:
        self._buffers.clear()
        self._arrays.clear()


def free_unused() -> None:
    """Give back to the device what checks and outgrown buffers took."""
    cp.get_default_memory_pool().free_all_blocks()
