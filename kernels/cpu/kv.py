"""Where keys and values lie, by type of cache: slots to store into, pages to read, pages to close.

The type of a pool's arrays decides which body of an overloaded function is compiled. Halves are
uint16. A page is a panel of 32 positions for keys, (key_length, 32), and (32, stride) for values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from kernels.cpu.barrier import wait_for_all
from kernels.cpu.jit import I32_MATRIX, I32_VECTOR, I64, I64_VECTOR, inlined, kernel
from kernels.cpu.memory import advance, get, load_value, pointer, put, store_value
from kernels.cpu.pages import KvArrays

PAGE = 32  # tokens of a KV page
MOST = np.float32(127.0)  # magnitude of an integer

_HALF_ARRAY = types.Array(types.uint16, 4, "C")
NEW_PAGES = types.Array(types.uint16, 3, "C")


def _arrays(element: Any) -> Any:
    array = types.Array(element, 5, "C")
    return types.NamedTuple([array, array, _HALF_ARRAY, _HALF_ARRAY], KvArrays)


KV_INT8 = _arrays(types.int8)
KV_TYPES = (_arrays(types.float32), _arrays(types.uint16), KV_INT8)


class Kv(NamedTuple):
    """One layer's cache, as a sweep sees it.

    arrays, new_pages, page_of: see `KvArrays` and `SweepPlan`
    positions, rows, page_table: of the batch
    """

    arrays: Any
    new_pages: Any
    page_of: Any
    positions: Any
    rows: Any
    page_table: Any
    layer: Any


@inlined
def pool_head(kv: Any, token: int, number: int, kv_head: int) -> Any:
    """Flat index of page `number` of a token's row, in layers, pages and heads."""
    keys = kv.arrays.keys
    page = np.int64(kv.page_table[kv.rows[token], number])
    return (kv.layer * keys.shape[1] + page) * keys.shape[2] + kv_head


@inlined
def key_page(kv: Any, token: int, number: int, kv_head: int) -> Any:
    """The keys of a page in the pool."""
    return pointer(kv.arrays.keys, pool_head(kv, token, number, kv_head) * _keys_len(kv))


@inlined
def value_page(kv: Any, token: int, number: int, kv_head: int) -> Any:
    """The values of a page in the pool."""
    return pointer(kv.arrays.values, pool_head(kv, token, number, kv_head) * _values_len(kv))


@inlined
def _keys_len(kv: Any) -> Any:
    return kv.arrays.keys.shape[3] * PAGE


@inlined
def _values_len(kv: Any) -> Any:
    return kv.arrays.values.shape[4] * PAGE


@inlined
def half_page(kv: Any, token: int, kv_head: int) -> Any:
    """The page of a token's own position in float16, keys before values."""
    heads, length = kv.arrays.keys.shape[2], _keys_len(kv) + _values_len(kv)
    new = np.int64(kv.page_of[token])
    if new >= 0:
        return pointer(kv.new_pages, (new * heads + kv_head) * length)
    row = kv.layer * kv.arrays.open_pages.shape[1] + np.int64(kv.rows[token])
    return pointer(kv.arrays.open_pages, (row * heads + kv_head) * length)


# ---- by type of cache: the bodies follow --------------------------------------------------------


def own_key_page(keys: Any, kv: Any, token: int, kv_head: int) -> Any:
    """Where the keys of a token's own page are stored."""
    raise NotImplementedError


def own_value_page(keys: Any, kv: Any, token: int, kv_head: int) -> Any:
    """Where the values of a token's own page are stored."""
    raise NotImplementedError


def read_keys(keys: Any, kv: Any, token: Any, number: Any, kv_head: Any, scratch: Any) -> Any:
    """A page's keys as float32: in their place, or converted into scratch."""
    raise NotImplementedError


def read_values(keys: Any, kv: Any, token: Any, number: Any, kv_head: Any, scratch: Any) -> Any:
    """A page's values as float32: in their place, or converted into scratch."""
    raise NotImplementedError


def _own_key_page(keys: Any, kv: Any, token: int, kv_head: int) -> Any:
    def in_pool(keys: Any, kv: Any, token: int, kv_head: int) -> Any:
        return key_page(kv, token, np.int64(kv.positions[token]) // PAGE, kv_head)

    def in_halves(keys: Any, kv: Any, token: int, kv_head: int) -> Any:
        return half_page(kv, token, kv_head)

    return in_halves if keys.dtype == types.int8 else in_pool


def _own_value_page(keys: Any, kv: Any, token: int, kv_head: int) -> Any:
    def in_pool(keys: Any, kv: Any, token: int, kv_head: int) -> Any:
        return value_page(kv, token, np.int64(kv.positions[token]) // PAGE, kv_head)

    def in_halves(keys: Any, kv: Any, token: int, kv_head: int) -> Any:
        return advance(half_page(kv, token, kv_head), _keys_len(kv))

    return in_halves if keys.dtype == types.int8 else in_pool


overload(own_key_page)(_own_key_page)
overload(own_value_page)(_own_value_page)


@inlined
def _convert(halves: Any, count: int, scratch: Any) -> Any:
    for i in range(count):
        put(scratch, i, load_value(halves, i))
    return scratch


@inlined
def _scale(kv: Any, head: int, number: int) -> Any:
    """Pointer to scale `number` of a page and head."""
    scales = kv.arrays.scales
    return pointer(scales, head * scales.shape[3] + number)


@inlined
def _multiply(integers: Any, scales: Any, lines: int, width: int, scratch: Any) -> Any:
    """Integers (lines, width) times the scale of each line."""
    for line in range(lines):
        scale = load_value(scales, line)
        source, target = advance(integers, line * width), advance(scratch, line * width)
        for i in range(width):
            put(target, i, np.float32(get(source, i)) * scale)
    return scratch


@inlined
def _is_own(kv: Any, token: int, number: int) -> Any:
    return np.int64(kv.positions[token]) // PAGE == number


def _read_keys(keys: Any, kv: Any, token: Any, number: Any, kv_head: Any, scratch: Any) -> Any:
    def floats(keys: Any, kv: Any, token: Any, number: Any, kv_head: Any, scratch: Any) -> Any:
        return key_page(kv, token, number, kv_head)

    def halves(keys: Any, kv: Any, token: Any, number: Any, kv_head: Any, scratch: Any) -> Any:
        return _convert(key_page(kv, token, number, kv_head), _keys_len(kv), scratch)

    def integers(keys: Any, kv: Any, token: Any, number: Any, kv_head: Any, scratch: Any) -> Any:
        if _is_own(kv, token, number):
            return _convert(half_page(kv, token, kv_head), _keys_len(kv), scratch)
        page = key_page(kv, token, number, kv_head)
        scales = _scale(kv, pool_head(kv, token, number, kv_head), 0)
        return _multiply(page, scales, kv.arrays.keys.shape[3], PAGE, scratch)

    return {types.float32: floats, types.uint16: halves, types.int8: integers}[keys.dtype]


def _read_values(keys: Any, kv: Any, token: Any, number: Any, kv_head: Any, scratch: Any) -> Any:
    def floats(keys: Any, kv: Any, token: Any, number: Any, kv_head: Any, scratch: Any) -> Any:
        return value_page(kv, token, number, kv_head)

    def halves(keys: Any, kv: Any, token: Any, number: Any, kv_head: Any, scratch: Any) -> Any:
        return _convert(value_page(kv, token, number, kv_head), _values_len(kv), scratch)

    def integers(keys: Any, kv: Any, token: Any, number: Any, kv_head: Any, scratch: Any) -> Any:
        if _is_own(kv, token, number):
            page = advance(half_page(kv, token, kv_head), _keys_len(kv))
            return _convert(page, _values_len(kv), scratch)
        head = pool_head(kv, token, number, kv_head)
        scales = _scale(kv, head, kv.arrays.keys.shape[3])
        page = value_page(kv, token, number, kv_head)
        return _multiply(page, scales, PAGE, kv.arrays.values.shape[4], scratch)

    return {types.float32: floats, types.uint16: halves, types.int8: integers}[keys.dtype]


overload(read_keys)(_read_keys)
overload(read_values)(_read_values)


# ---- closing pages of 8 bits --------------------------------------------------------------------


@inlined
def _quantise_line(halves: Any, width: int, scale: Any, integers: Any) -> None:
    """Integers of one line, and the least half that takes the largest magnitude to 127 at most.

    What is not finite makes the scale NaN, so that it shows wherever the page is read.
    """
    most, check = np.float32(0.0), np.float32(0.0)
    for i in range(width):
        value = load_value(halves, i)
        check += value * np.float32(0.0)
        most = max(most, abs(value))
    store_value(scale, 0, most / MOST + check)
    if load_value(scale, 0) * MOST < most:
        put(scale, 0, get(scale, 0) + np.uint16(1))
    step = load_value(scale, 0)
    for i in range(width):
        quotient = load_value(halves, i) / step if step > 0 else np.float32(0.0)
        put(integers, i, np.int8(np.rint(quotient)))


@kernel(
    types.boolean(
        I64_VECTOR,
        I64,
        I64,
        I32_VECTOR,
        KV_INT8,
        NEW_PAGES,
        I32_VECTOR,
        I64,
        I64,
        I32_VECTOR,
        I32_VECTOR,
        I32_MATRIX,
    )
)
def close_pages(
    barrier: Any,
    worker: int,
    num_workers: int,
    closing: Any,
    arrays: Any,
    new_pages: Any,
    page_of: Any,
    layer: int,
    value_length: int,
    positions: Any,
    rows: Any,
    page_table: Any,
) -> Any:
    """Put the pages that the tokens `closing` end into the pool, as integers.

    Waits for all workers, until every token is stored; False when the barrier is broken.
    """
    if not wait_for_all(barrier, num_workers):
        return False
    kv = Kv(arrays, new_pages, page_of, positions, rows, page_table, layer)
    length, stride, heads = arrays.keys.shape[3], arrays.values.shape[4], arrays.keys.shape[2]
    total = len(closing) * heads
    for task in range(total * worker // num_workers, total * (worker + 1) // num_workers):
        token, kv_head = np.int64(closing[task // heads]), task % heads
        number = np.int64(positions[token]) // PAGE
        halves = half_page(kv, token, kv_head)
        scales = _scale(kv, pool_head(kv, token, number, kv_head), 0)
        keys = key_page(kv, token, number, kv_head)
        for d in range(length):
            key, scale = advance(halves, d * PAGE), advance(scales, d)
            _quantise_line(key, PAGE, scale, advance(keys, d * PAGE))
        halves, scales = advance(halves, length * PAGE), advance(scales, length)
        values = value_page(kv, token, number, kv_head)
        for t in range(PAGE):
            value, scale = advance(halves, t * stride), advance(scales, t)
            _quantise_line(value, value_length, scale, advance(values, t * stride))
    return True
