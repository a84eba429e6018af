"""What KV pages of the CPU backend look like, and what they take; known without Numba."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.ops import PAGE_TOKENS, KvShape, KvType

DEFAULT_KV_TYPE: KvType = "f32"
VALUE_STEP = 32  # values of a head are padded to a multiple of this, a panel's width
DTYPES: dict[KvType, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.uint16),
    "int8": np.dtype(np.int8),
}
_HALF_NBYTES = 2


class KvArrays(NamedTuple):
    """The arrays of a pool. Halves are held as uint16; stride: value_length rounded up to 32.

    keys: (num_layers, num_pages, num_kv_heads, key_length, 32)
    values: (num_layers, num_pages, num_kv_heads, 32, stride)
    scales: (num_layers, num_pages, num_kv_heads, key_length + 32), of keys, then of values
    open_pages: (num_layers, num_rows, num_kv_heads, 32 * (key_length + stride)), keys as above,
        then values
    The last two are of KV of 8 bits, and empty otherwise.
    """

    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    scales: npt.NDArray[np.uint16]
    open_pages: npt.NDArray[np.uint16]


def value_stride(shape: KvShape) -> int:
    """Value length as stored."""
    return -(-shape.value_length // VALUE_STEP) * VALUE_STEP


def page_len(shape: KvShape) -> int:
    """Keys and values of a page, of one layer and KV head."""
    return PAGE_TOKENS * (shape.key_length + value_stride(shape))


def scales_len(shape: KvShape, kv_type: KvType) -> int:
    """Scales of a page, of one layer and KV head."""
    return shape.key_length + PAGE_TOKENS if kv_type == "int8" else 0


def page_nbytes(shape: KvShape, kv_type: KvType) -> int:
    """Bytes of one page over all layers."""
    head_nbytes = page_len(shape) * DTYPES[kv_type].itemsize
    head_nbytes += scales_len(shape, kv_type) * _HALF_NBYTES
    return shape.num_layers * shape.num_kv_heads * head_nbytes


def row_nbytes(shape: KvShape, kv_type: KvType) -> int:
    """Bytes of a row's open page over all layers, where it is none of the pool's."""
    if kv_type != "int8":
        return 0
    return shape.num_layers * shape.num_kv_heads * page_len(shape) * _HALF_NBYTES
