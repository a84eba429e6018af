"""Launches that begin while the kernel ahead of them still runs: "programmatic dependent launch".

Such a kernel calls `wait_for_others` (common.cuh) before it touches what others write or read, so
only its start, and what it reads of weights, overlaps with them. CuPy has no call for it, so this
is the driver's own: CUDA Driver API, cuLaunchKernelEx.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import cupy as cp
import numpy as np

_LEAST_CAPABILITY = 90
_LEAST_DRIVER = 12030  # records such launches as what they are
_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

_USUAL_SHARED_NBYTES = 48 << 10  # of a block, without being asked for

_overlapping = False
num_early = 0  # launches made so by this process


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_nbytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Kernel:
    """A compiled kernel of one device.

    raw: CuPy's
    waits: whether it calls `wait_for_others`
    """

    def __init__(self, raw: Any, *, waits: bool) -> None:
        self._raw = raw
        self._waits = waits
        self._most_shared_nbytes = _USUAL_SHARED_NBYTES

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Any],
        *,
        shared_mem: int = 0,
    ) -> None:
        """Launch on the current stream. shared_mem: bytes of a block's dynamic shared memory"""
        if shared_mem > self._most_shared_nbytes:
            self._raw.max_dynamic_shared_size_bytes = self._most_shared_nbytes = shared_mem
        if self._waits and _overlapping:
            _launch(self._raw.kernel.ptr, grid, block, arguments, shared_mem)
        else:
            self._raw(grid, block, arguments, shared_mem=shared_mem)


@contextlib.contextmanager
def overlapping_launches() -> Iterator[None]:
    """Inside, kernels that wait for others by themselves are launched early, where possible."""
    global _overlapping
    _overlapping = can_overlap(cp.cuda.Device().id)
    try:
        yield
    finally:
        _overlapping = False


@functools.cache
def can_overlap(device: int) -> bool:
    """Whether the device and its driver launch kernels early."""
    capability = int(cp.cuda.Device(device).compute_capability)
    driver = cp.cuda.runtime.driverGetVersion()
    return capability >= _LEAST_CAPABILITY and bool(driver >= _LEAST_DRIVER)


def _launch(
    function: int,
    grid: Sequence[int],
    block: Sequence[int],
    arguments: Sequence[Any],
    shared_nbytes: int,
) -> None:
    global num_early
    values = [
        np.uint64(argument.data.ptr) if isinstance(argument, cp.ndarray) else argument
        for argument in arguments
    ]
    holders = [np.array([value]) for value in values]
    pointers = (ctypes.c_void_p * len(holders))(*(holder.ctypes.data for holder in holders))
    attribute = _Attribute(id=_SERIALIZATION, value=1)
    config = _Config(
        grid=_three(grid),
        block=_three(block),
        shared_nbytes=shared_nbytes,
        stream=cp.cuda.get_current_stream().ptr,
        attributes=ctypes.pointer(attribute),
        num_attributes=1,
    )
    status = _driver().cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(function), pointers, None
    )
    if status:
        raise cp.cuda.driver.CUDADriverError(status)
    num_early += 1


def _three(sizes: Sequence[int]) -> Any:
    return (ctypes.c_uint * 3)(*sizes, *[1] * (3 - len(sizes)))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
