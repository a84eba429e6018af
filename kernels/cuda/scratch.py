"""Work buffers of operations, which live on between calls."""

from __future__ import annotations

import math
from typing import Any

import cupy as cp

from kernels.cuda.matrix import DeviceArray


class Scratch:
    """Buffers by name; each grows to the largest that was asked for."""

    def __init__(self) -> None:
        self.num_moves = 0  # how often a buffer came to lie elsewhere
        self._buffers: dict[str, DeviceArray] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        """A part of a buffer; what nobody wrote holds anything."""
        count = math.prod(shape)
        if name not in self._buffers or len(self._buffers[name]) < count:
            self._buffers.pop(name, None)
            free_unused()
            self.num_moves += 1
            self._buffers[name] = cp.zeros(count, dtype)
        return self._buffers[name][:count].reshape(shape)

    def clear(self) -> None:
        self._buffers.clear()


def free_unused() -> None:
    """Give back to the device what checks and outgrown buffers took."""
    cp.get_default_memory_pool().free_all_blocks()
