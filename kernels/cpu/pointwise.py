"""Operations on one token at a time: embedding norms, activations, rotary embedding, KV store.

Each kernel takes a range of tokens [begin, end); a token's bits depend on that token alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kernels.cpu.jit import (
    F32,
    F32_INPUT_MATRIX,
    F32_INPUT_VECTOR,
    F32_MATRIX,
    F32_VECTOR,
    I32_MATRIX,
    I32_VECTOR,
    I64,
    inlined,
    kernel,
    kernel_for_kv,
)
from kernels.cpu.kv import (
    KV_TYPES,
    NEW_PAGES,
    PAGE,
    layer_kv,
    own_key_page,
    own_value_page,
    position_of,
)
from kernels.cpu.memory import (
    advance,
    bits_to_float,
    get,
    pointer,
    prefetch_to_write,
    put,
    store_value,
)
from kernels.cpu.vector import LANES, sum_of_squares

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST, _MOST = np.float32(-87.0), np.float32(88.0)


@inlined
def exp(x: Any) -> Any:
    """e**x within 2 ulp; 0 below -87, e**88 above 88, NaN for NaN. Polynomial of Cephes expf."""
    y = _MOST if x > _MOST else x
    n = np.floor(y * _LOG2_E + np.float32(0.5))
    r = (y - n * _LN2_HIGH) - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = bits_to_float((np.int32(n) + np.int32(127)) << np.int32(23))
    value = (p * r * r + r + np.float32(1.0)) * power
    return np.float32(0.0) if y < _LEAST else value


@inlined
def _rms_scale(x: Any, length: int, eps: Any) -> Any:
    """1 / sqrt(mean(x²) + eps)."""
    whole = length // LANES
    total = np.float64(sum_of_squares(x, whole))
    for i in range(whole * LANES, length):
        total += np.float64(get(x, i)) * np.float64(get(x, i))
    return np.float32(1.0 / np.sqrt(total / length + np.float64(eps)))


@inlined
def _norm_row(x: Any, weight: Any, length: int, eps: Any, out: Any) -> None:
    scale = _rms_scale(x, length, eps)
    for i in range(length):
        put(out, i, get(x, i) * scale * get(weight, i))


@kernel(types.void(I64, I64, F32_INPUT_MATRIX, F32_INPUT_VECTOR, F32, F32_MATRIX))
def rms_norm(begin: int, end: int, x: Any, weight: Any, eps: Any, out: Any) -> None:
    """out[t] = x[t] / sqrt(mean(x[t]²) + eps) * weight."""
    length = x.shape[1]
    for t in range(begin, end):
        row = t * length
        _norm_row(pointer(x, row), pointer(weight, 0), length, eps, pointer(out, row))


@kernel(types.void(I64, I64, F32_INPUT_MATRIX, I32_VECTOR, F32_INPUT_VECTOR, F32, F32_MATRIX))
def rms_norm_rows(begin: int, end: int, x: Any, rows: Any, weight: Any, eps: Any, out: Any) -> None:
    """out[i] = the norm of x[rows[i]]."""
    length = x.shape[1]
    for i in range(begin, end):
        source = pointer(x, np.int64(rows[i]) * length)
        _norm_row(source, pointer(weight, 0), length, eps, pointer(out, i * length))


@kernel(types.void(I64, I64, F32_INPUT_MATRIX, F32_MATRIX))
def swiglu(begin: int, end: int, gate_up: Any, out: Any) -> None:
    """out = silu(gate) * up; gate_up: (num_tokens, 2·ffn)."""
    ffn = out.shape[1]
    for t in range(begin, end):
        gate = pointer(gate_up, t * 2 * ffn)
        up = advance(gate, ffn)
        target = pointer(out, t * ffn)
        for i in range(ffn):
            g = get(gate, i)
            put(target, i, g / (np.float32(1.0) + exp(-g)) * get(up, i))


@inlined
def _rotate(x: Any, cos: Any, sin: Any, pairs: int, halves: bool) -> None:
    """Rotate `pairs` pairs of x in place: (i, i + pairs) or (2i, 2i + 1)."""
    if halves:
        other = advance(x, pairs)
        for i in range(pairs):
            a, b, c, s = get(x, i), get(other, i), get(cos, i), get(sin, i)
            put(x, i, a * c - b * s)
            put(other, i, a * s + b * c)
    else:
        for i in range(pairs):
            a, b, c, s = get(x, 2 * i), get(x, 2 * i + 1), get(cos, i), get(sin, i)
            put(x, 2 * i, a * c - b * s)
            put(x, 2 * i + 1, a * s + b * c)


@inlined
def _prefetch_slots(page: Any, slot: int, length: int) -> None:
    """Ask for the lines that one token's keys will be written to: one for each dimension."""
    for d in range(length):
        prefetch_to_write(page, d * PAGE + slot)


@inlined
def _head(
    source: Any,
    norm: Any,
    eps: Any,
    cos: Any,
    sin: Any,
    pairs: int,
    halves: bool,
    length: int,
    target: Any,
) -> None:
    """One head of q or k: normalised where `norm` is not empty, then rotated."""
    if len(norm) > 0:
        _norm_row(source, pointer(norm, 0), length, eps, target)
    else:
        for i in range(length):
            put(target, i, get(source, i))
    _rotate(target, cos, sin, pairs, halves)


@kernel_for_kv(
    {
        kv_type: types.void(
            I64,
            I64,
            F32_INPUT_MATRIX,
            F32_INPUT_VECTOR,
            F32_INPUT_VECTOR,
            F32,
            F32_INPUT_MATRIX,
            F32_INPUT_MATRIX,
            types.boolean,
            I32_VECTOR,
            I32_VECTOR,
            I32_MATRIX,
            arrays,
            NEW_PAGES,
            I32_VECTOR,
            I64,
            I64,
            F32_MATRIX,
            F32_VECTOR,
        )
        for kv_type, arrays in KV_TYPES.items()
    }
)
def rope_store(
    begin: int,
    end: int,
    qkv: Any,
    q_norm: Any,
    k_norm: Any,
    eps: Any,
    cos: Any,
    sin: Any,
    halves: bool,
    positions: Any,
    rows: Any,
    page_table: Any,
    arrays: Any,
    new_pages: Any,
    page_of: Any,
    layer: int,
    value_length: int,
    q: Any,
    scratch: Any,
) -> None:
    """Normalise and rotate q into `q`; k and v go into their page's slot.

    q_norm, k_norm: (key_length,) or empty; scratch: (key_length,) at least, the worker's own
    arrays, new_pages, page_of: see `KvArrays` and `SweepPlan`
    """
    kv = layer_kv(arrays, new_pages, page_of, positions, rows, page_table, layer)
    num_kv_heads, length, stride = kv.num_heads, kv.key_length, kv.stride
    num_heads, pairs = q.shape[1] // length, cos.shape[1]
    for t in range(begin, end):
        position = position_of(kv, t)
        slot = position % PAGE
        for h in range(num_kv_heads):
            _prefetch_slots(own_key_page(kv.keys, kv, t, h), slot, length)
        c, s = pointer(cos, position * pairs), pointer(sin, position * pairs)
        source = pointer(qkv, t * qkv.shape[1])
        target = pointer(q, t * q.shape[1])
        for h in range(num_heads):
            at = h * length
            _head(
                advance(source, at), q_norm, eps, c, s, pairs, halves, length, advance(target, at)
            )
        for h in range(num_kv_heads):
            key = pointer(scratch, 0)
            at = (num_heads + h) * length
            _head(advance(source, at), k_norm, eps, c, s, pairs, halves, length, key)
            key_slot = advance(own_key_page(kv.keys, kv, t, h), slot)
            for d in range(length):
                store_value(key_slot, d * PAGE, get(key, d))
            value = advance(source, (num_heads + num_kv_heads) * length + h * value_length)
            value_slot = advance(own_value_page(kv.keys, kv, t, h), slot * stride)
            for d in range(value_length):
                store_value(value_slot, d, get(value, d))
