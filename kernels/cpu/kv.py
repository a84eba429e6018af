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
from kernels.cpu.jit import I32_MATRIX, I32_VECTOR, I64, I64_VECTOR, inlined, kernel_for_kv
from kernels.cpu.memory import advance, get, load_value, pointer, put, store_value
from kernels.cpu.pages import KvArrays
from kernels.ops import KvType

PAGE = 32  # tokens of a KV page
MOST = np.float32(127.0)  # magnitude of an integer

_HALF_ARRAY = types.Array(types.uint16, 4, "C")
NEW_PAGES = types.Array(types.uint16, 3, "C")


def _arrays(element: Any) -> Any:
    array = types.Array(element, 5, "C")
    return types.NamedTuple([array, array, _HALF_ARRAY, _HALF_ARRAY], KvArrays)


KV_TYPES: dict[KvType, Any] = {
    "f32": _arrays(types.float32),
    "f16": _arrays(types.uint16),
    "int8": _arrays(types.int8),
}


class Kv(NamedTuple):
    """One layer's cache as a sweep sees it, in pointers: see `KvArrays`, `SweepPlan` and `Batch`.

    max_pages: width of the page table
    """

    keys: Any
    values: Any
    scales: Any
    open_pages: Any
    new_pages: Any
    page_of: Any
    positions: Any
    rows: Any
    page_table: Any
    layer: Any
    num_pages: Any
    num_rows: Any
    max_pages: Any
    num_heads: Any
    key_length: Any
    stride: Any


@inlined
def layer_kv(
    arrays: Any,
    new_pages: Any,
    page_of: Any,
    positions: Any,
    rows: Any,
    page_table: Any,
    layer: int,
) -> Any:
    """The cache of one layer."""
    return Kv(
        pointer(arrays.keys, 0),
        pointer(arrays.values, 0),
        pointer(arrays.scales, 0),
        pointer(arrays.open_pages, 0),
        pointer(new_pages, 0),
        pointer(page_of, 0),
        pointer(positions, 0),
        pointer(rows, 0),
        pointer(page_table, 0),
        layer,
        arrays.keys.shape[1],
        arrays.open_pages.shape[1],
        page_table.shape[1],
        arrays.keys.shape[2],
        arrays.keys.shape[3],
        arrays.values.shape[4],
    )


@inlined
def position_of(kv: Any, token: int) -> Any:
    return np.int64(get(kv.positions, token))


@inlined
def pool_head(kv: Any, token: int, number: int, kv_head: int) -> Any:
    """Flat index of page `number` of a token's row, in layers, pages and heads."""
    row = np.int64(get(kv.rows, token))
    page = np.int64(get(kv.page_table, row * kv.max_pages + number))
    return (kv.layer * kv.num_pages + page) * kv.num_heads + kv_head


@inlined
def key_page(kv: Any, head: int) -> Any:
    """The keys of a page in the pool; head: see `pool_head`."""
    return advance(kv.keys, head * kv.key_length * PAGE)


@inlined
def value_page(kv: Any, head: int) -> Any:
    """The values of a page in the pool; head: see `pool_head`."""
    return advance(kv.values, head * kv.stride * PAGE)


@inlined
def half_page(kv: Any, token: int, kv_head: int) -> Any:
    """The page of a token's own position in float16, keys before values."""
    length = (kv.key_length + kv.stride) * PAGE
    new = np.int64(get(kv.page_of, token))
    if new >= 0:
        return advance(kv.new_pages, (new * kv.num_heads + kv_head) * length)
    row = kv.layer * kv.num_rows + np.int64(get(kv.rows, token))
    return advance(kv.open_pages, (row * kv.num_heads + kv_head) * length)


# ---- by type of cache: the bodies follow --------------------------------------------------------


def own_key_page(keys: Any, kv: Any, token: int, kv_head: int) -> Any:
    """Where the keys of a token's own page are stored."""
    raise NotImplementedError


def own_value_page(keys: Any, kv: Any, token: int, kv_head: int) -> Any:
    """Where the values of a token's own page are stored."""
    raise NotImplementedError


def read_keys(keys: Any, kv: Any, head: Any, own: Any, kv_head: Any, scratch: Any) -> Any:
    """A page's keys as float32: in their place, or converted into scratch.

    head: see `pool_head`
    own: a token whose own page it is, -1 where all of it lies before the tokens that read it
    """
    raise NotImplementedError


def read_values(keys: Any, kv: Any, head: Any, own: Any, kv_head: Any, scratch: Any) -> Any:
    """A page's values, in the same way."""
    raise NotImplementedError


def _own_key_page(keys: Any, kv: Any, token: int, kv_head: int) -> Any:
    def in_pool(keys: Any, kv: Any, token: int, kv_head: int) -> Any:
        number = position_of(kv, token) // PAGE
        return key_page(kv, pool_head(kv, token, number, kv_head))

    def in_halves(keys: Any, kv: Any, token: int, kv_head: int) -> Any:
        return half_page(kv, token, kv_head)

    return in_halves if keys.dtype == types.int8 else in_pool


def _own_value_page(keys: Any, kv: Any, token: int, kv_head: int) -> Any:
    def in_pool(keys: Any, kv: Any, token: int, kv_head: int) -> Any:
        number = position_of(kv, token) // PAGE
        return value_page(kv, pool_head(kv, token, number, kv_head))

    def in_halves(keys: Any, kv: Any, token: int, kv_head: int) -> Any:
        return advance(half_page(kv, token, kv_head), kv.key_length * PAGE)

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
    return advance(kv.scales, head * (kv.key_length + PAGE) + number)


@inlined
def _multiply(integers: Any, scales: Any, lines: int, width: int, scratch: Any) -> Any:
    """Integers (lines, width) times the scale of each line."""
    for line in range(lines):
        scale = load_value(scales, line)
        source, target = advance(integers, line * width), advance(scratch, line * width)
        for i in range(width):
            put(target, i, np.float32(get(source, i)) * scale)
    return scratch


def _read_keys(keys: Any, kv: Any, head: Any, own: Any, kv_head: Any, scratch: Any) -> Any:
    def floats(keys: Any, kv: Any, head: Any, own: Any, kv_head: Any, scratch: Any) -> Any:
        return key_page(kv, head)

    def halves(keys: Any, kv: Any, head: Any, own: Any, kv_head: Any, scratch: Any) -> Any:
        return _convert(key_page(kv, head), kv.key_length * PAGE, scratch)

    def integers(keys: Any, kv: Any, head: Any, own: Any, kv_head: Any, scratch: Any) -> Any:
        if own >= 0:
            return _convert(half_page(kv, own, kv_head), kv.key_length * PAGE, scratch)
        return _multiply(key_page(kv, head), _scale(kv, head, 0), kv.key_length, PAGE, scratch)

    return {types.float32: floats, types.uint16: halves, types.int8: integers}[keys.dtype]


def _read_values(keys: Any, kv: Any, head: Any, own: Any, kv_head: Any, scratch: Any) -> Any:
    def floats(keys: Any, kv: Any, head: Any, own: Any, kv_head: Any, scratch: Any) -> Any:
        return value_page(kv, head)

    def halves(keys: Any, kv: Any, head: Any, own: Any, kv_head: Any, scratch: Any) -> Any:
        return _convert(value_page(kv, head), kv.stride * PAGE, scratch)

    def integers(keys: Any, kv: Any, head: Any, own: Any, kv_head: Any, scratch: Any) -> Any:
        if own >= 0:
            page = advance(half_page(kv, own, kv_head), kv.key_length * PAGE)
            return _convert(page, kv.stride * PAGE, scratch)
        scales = _scale(kv, head, kv.key_length)
        return _multiply(value_page(kv, head), scales, PAGE, kv.stride, scratch)

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


@kernel_for_kv(
    {
        "int8": types.boolean(
            I64_VECTOR,
            I64,
            I64,
            I32_VECTOR,
            KV_TYPES["int8"],
            NEW_PAGES,
            I32_VECTOR,
            I64,
            I64,
            I32_VECTOR,
            I32_VECTOR,
            I32_MATRIX,
        )
    }
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
    kv = layer_kv(arrays, new_pages, page_of, positions, rows, page_table, layer)
    total = len(closing) * kv.num_heads
    for task in range(total * worker // num_workers, total * (worker + 1) // num_workers):
        token, kv_head = np.int64(closing[task // kv.num_heads]), task % kv.num_heads
        head = pool_head(kv, token, position_of(kv, token) // PAGE, kv_head)
        halves, scales = half_page(kv, token, kv_head), _scale(kv, head, 0)
        for d in range(kv.key_length):
            key, integers = advance(halves, d * PAGE), advance(key_page(kv, head), d * PAGE)
            _quantise_line(key, PAGE, advance(scales, d), integers)
        halves, scales = advance(halves, kv.key_length * PAGE), advance(scales, kv.key_length)
        for t in range(PAGE):
            value = advance(halves, t * kv.stride)
            integers = advance(value_page(kv, head), t * kv.stride)
            _quantise_line(value, value_length, advance(scales, t), integers)
    return True
