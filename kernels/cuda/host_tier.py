"""Weights in pinned host memory, copied ahead of their use into a ring on the device.

A copy stream runs beside the computing: a place in the ring is written again once the product that
read it is done, and a product begins once its weight has arrived; events order the two and nobody
waits on the host. What is copied ahead is what followed last time, so the copies run on across the
end of a sweep.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cupy as cp
import numpy as np

from kernels.cuda.matrix import CudaMatrix, DeviceArray, pack_parts
from kernels.quants import BlockTensor

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class _Held:
    """A weight's bytes in pinned memory: its parts lie at `offsets`."""

    pinned: Any
    nbytes: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A weight in the ring, or on its way there; `ready` passes when it has arrived."""

    weight: CudaMatrix
    begin: int
    end: int
    ready: Any


class HostTier:
    """The weights of one device that do not stay on it.

    ahead_nbytes: how much is copied ahead while the largest of them is in use
    nbytes: of them all; nbytes_copied: to the device so far
    """

    def __init__(self, ahead_nbytes: int) -> None:
        self.nbytes = 0
        self.nbytes_copied = 0
        self._ahead_nbytes = ahead_nbytes
        self._held: dict[CudaMatrix, _Held] = {}
        self._following: dict[CudaMatrix, CudaMatrix] = {}
        self._last: CudaMatrix | None = None
        self._stream = cp.cuda.Stream(non_blocking=True)
        self._ring: DeviceArray = cp.empty(0, np.uint8)
        self._pieces: deque[_Piece] = deque()  # in order of use; the first may be in use
        self._in_use = False
        self._done = cp.cuda.Event(disable_timing=True)  # of the last product launched

    def __contains__(self, weight: CudaMatrix) -> bool:
        return weight in self._held

    def hold(self, tensors: Sequence[BlockTensor]) -> CudaMatrix:
        """Keep tensors in pinned memory, which the device also reads in place."""
        sizes = [tensor.data.nbytes for tensor in tensors]
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        offsets = tuple(int(offset) for offset in np.cumsum([0, *padded[:-1]]))
        pinned = cp.cuda.alloc_pinned_memory(sum(padded))
        whole = _device_view(pinned, sum(padded))
        host = np.frombuffer(pinned, np.uint8, sum(padded))

        def place(index: int, data: np.ndarray) -> DeviceArray:
            begin = offsets[index]
            host[begin : begin + data.nbytes] = data.reshape(-1)
            return whole[begin : begin + data.nbytes].reshape(data.shape)

        weight = pack_parts(tensors, place)
        if self._held:
            self._following[next(reversed(self._held))] = weight
        self._held[weight] = _Held(pinned, sum(padded), offsets)
        self.nbytes += sum(padded)
        return weight

    def acquire(self, weight: CudaMatrix) -> CudaMatrix:
        """The weight in the ring, for the current stream, until `release`."""
        assert not self._in_use, "a weight is in use"
        while self._pieces and self._pieces[0].weight is not weight:
            self._pieces.popleft()
        if not self._pieces:
            self._make_room(self._held[weight].nbytes)
            self._copy(weight)
        self._in_use = True
        cp.cuda.get_current_stream().wait_event(self._pieces[0].ready)
        if self._last is not None:
            self._following[self._last] = weight
        self._last = weight
        self._copy_ahead()
        return self._in_ring(self._pieces[0])

    def release(self) -> None:
        """The product that used the acquired weight has been launched."""
        self._done.record()
        self._pieces.popleft()
        self._in_use = False
        self._copy_ahead()

    def close(self) -> None:
        self._stream.synchronize()
        self._pieces.clear()
        self._held.clear()
        self._ring = cp.empty(0, np.uint8)

    def _make_room(self, nbytes: int) -> None:
        if nbytes <= self._ring.size:
            return
        largest = max(held.nbytes for held in self._held.values())
        cp.cuda.get_current_stream().synchronize()
        self._stream.synchronize()
        self._ring = cp.empty(largest + self._ahead_nbytes, np.uint8)

    def _copy_ahead(self) -> None:
        while len(self._pieces) < len(self._held):
            before = self._pieces[-1].weight if self._pieces else self._last
            weight = None if before is None else self._following.get(before)
            if weight is None or not self._copy(weight):
                return

    def _copy(self, weight: CudaMatrix) -> bool:
        held = self._held[weight]
        begin = self._place(held.nbytes)
        if begin is None:
            return False
        end = begin + held.nbytes
        self._stream.wait_event(self._done)
        self._ring[begin:end].data.copy_from_host_async(held.pinned.ptr, end - begin, self._stream)
        self.nbytes_copied += held.nbytes
        ready = cp.cuda.Event(disable_timing=True)
        ready.record(self._stream)
        self._pieces.append(_Piece(weight, begin, end, ready))
        return True

    def _place(self, nbytes: int) -> int | None:
        """Where a contiguous piece may begin, or None while older ones are in the way."""
        if not self._pieces:
            return 0 if nbytes <= self._ring.size else None
        first, end = self._pieces[0].begin, self._pieces[-1].end
        if end <= first:  # free: [end, first)
            return end if end + nbytes <= first else None
        if end + nbytes <= self._ring.size:
            return end
        return 0 if nbytes <= first else None

    def _in_ring(self, piece: _Piece) -> CudaMatrix:
        weight, parts = piece.weight, []
        for part, offset in zip(weight.parts, self._held[weight].offsets, strict=True):
            begin = piece.begin + offset
            blocks = self._ring[begin : begin + part.blocks.nbytes].reshape(part.blocks.shape)
            parts.append(replace(part, blocks=blocks))
        return CudaMatrix(weight.num_outputs, weight.num_inputs, tuple(parts), None)


def _device_view(pinned: Any, nbytes: int) -> DeviceArray:
    memory = cp.cuda.UnownedMemory(pinned.ptr, nbytes, pinned, cp.cuda.Device().id)
    return cp.ndarray((nbytes,), np.uint8, cp.cuda.MemoryPointer(memory, 0))
