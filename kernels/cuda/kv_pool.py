"""The CUDA backend's pool of KV pages: on the device, and in host memory beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cupy as cp
import numpy as np

from kernels.cuda.host_pages import HostPages, Part
from kernels.cuda.matrix import DeviceArray
from kernels.cuda.modules import blocks_for
from kernels.ops import PAGE_TOKENS, STAGED_LAYERS, KernelError, KvShape, KvType

MAX_HEAD = 256
_KEY_STEP, _VALUE_STEP = 32, 8  # sizes of a head are padded to, or must be, multiples of these
_DTYPES: dict[KvType, Any] = {"f32": np.float32, "f16": np.float16, "int8": np.int8}
_HALF_NBYTES = 2


@dataclass(frozen=True, slots=True)
class CudaKvPool:
    """keys: (num_layers, num_pages, num_kv_heads, 32, key_length rounded up to 32)
    values: (num_layers, num_pages, num_kv_heads, value_length, 32)

    For KV of 8 bits alone, in float16, see pages.cuh:
    scales: (num_layers, num_pages, num_kv_heads, key_length rounded up to 32, then 32)
    open_pages: (num_layers, num_rows, half_page_len)
    """

    num_pages: int
    kv_type: KvType
    page_nbytes: int
    keys: DeviceArray
    values: DeviceArray
    scales: DeviceArray
    open_pages: DeviceArray
    host: HostPages | None

    @property
    def num_host_pages(self) -> int:
        return 0 if self.host is None else self.host.num_pages


def page_nbytes(shape: KvShape, kv_type: KvType) -> int:
    """Of a page over all layers."""
    nbytes = _page_len(shape) * int(np.dtype(_DTYPES[kv_type]).itemsize)
    nbytes += shape.num_kv_heads * _scales_len(shape, kv_type) * _HALF_NBYTES
    return shape.num_layers * nbytes


def row_nbytes(shape: KvShape, kv_type: KvType) -> int:
    """Of a row's open page over all layers."""
    return shape.num_layers * _page_len(shape) * _HALF_NBYTES if kv_type == "int8" else 0


def make_pool(
    shape: KvShape,
    num_pages: int,
    kv_type: KvType,
    num_rows: int,
    num_host_pages: int,
    *,
    copies: Any,
) -> CudaKvPool:
    """See `Ops.kv_pool`. copies: the stream that pages in host memory come on"""
    check_heads(shape)
    num_layers, num_kv_heads, dtype = shape.num_layers, shape.num_kv_heads, _DTYPES[kv_type]
    inner = (
        ((num_kv_heads, PAGE_TOKENS, _key_stride(shape)), dtype),
        ((num_kv_heads, shape.value_length, PAGE_TOKENS), dtype),
        ((num_kv_heads, _scales_len(shape, kv_type)), np.float16),
    )
    # Staged pages lie behind the pool's own, so that a kernel finds both from one address.
    num_places = num_layers * num_pages + STAGED_LAYERS * num_host_pages
    places = [cp.zeros((num_places, *page), dtype) for page, dtype in inner]
    keys, values, scales = (_by_layer(part, num_layers, num_pages) for part in places)
    host = None
    if num_host_pages:
        behind = [part[num_layers * num_pages :] for part in places if part.size]
        staged = [_by_layer(part, STAGED_LAYERS, num_host_pages) for part in behind]
        parts = [Part.of(part, num_layers) for part in staged]
        host = HostPages(parts, first_page=num_pages, kv_type=kv_type, copies=copies)
    num_open = num_rows if kv_type == "int8" else 0
    return CudaKvPool(
        num_pages=num_pages,
        kv_type=kv_type,
        page_nbytes=page_nbytes(shape, kv_type),
        keys=keys,
        values=values,
        scales=scales,
        open_pages=cp.zeros((num_layers, num_open, _page_len(shape)), np.float16),
        host=host,
    )


def copy_page(pool: CudaKvPool, source: int, target: int) -> None:
    """One page over all layers, wherever both lie."""
    if pool.host is not None:
        pool.host.settle()
    for of_target, of_source in zip(_page_of(pool, target), _page_of(pool, source), strict=True):
        of_target[...] = of_source


def check_heads(shape: KvShape) -> None:
    for name, length in (("key", shape.key_length), ("value", shape.value_length)):
        if not 0 < length <= MAX_HEAD or length % _VALUE_STEP:
            raise KernelError(
                f"heads have {name} length {length}; the GPU kernels take multiples of "
                f"{_VALUE_STEP} up to {MAX_HEAD}; run the model on the CPU"
            )


def _key_stride(shape: KvShape) -> int:
    """Key length as stored."""
    return _round_up(shape.key_length, _KEY_STEP)


def _page_len(shape: KvShape) -> int:
    """Keys and values of a page, of one layer."""
    return shape.num_kv_heads * PAGE_TOKENS * (_key_stride(shape) + shape.value_length)


def _scales_len(shape: KvShape, kv_type: KvType) -> int:
    """Scales of a page, of one layer and KV head."""
    return _key_stride(shape) + PAGE_TOKENS if kv_type == "int8" else 0


def _by_layer(places: DeviceArray, num_layers: int, num_pages: int) -> DeviceArray:
    return places[: num_layers * num_pages].reshape(num_layers, num_pages, *places.shape[1:])


def _page_of(pool: CudaKvPool, page: int) -> list[DeviceArray]:
    """Keys, values and scales, where there are any, of a page over all layers."""
    if pool.host is not None and page >= pool.num_pages:
        return [part.in_host[:, page - pool.num_pages] for part in pool.host.parts]
    return [part[:, page] for part in (pool.keys, pool.values, pool.scales) if part.size]


def _round_up(value: int, step: int) -> int:
    return blocks_for(value, step) * step
