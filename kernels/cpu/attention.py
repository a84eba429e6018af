"""Causal attention over paged keys and values, as partials over blocks of 256 positions.

For a query with n positions before and at its own, and each block of them,

    m_b = max(s), p = exp((s - m_b) * scale), l_b = sum(p), o_b = sum(p · v)

are merged in order into (m, l, o), and the result is o / l. Scores are chains over the key's
length, o_b chains over the block's positions, l_b a tree over lanes; none of them contains a
position after the query's own, so the bits depend on the query and its row alone: not on the
queries that share a page's conversion with it, nor on how a prompt was cut into chunks.

A task is a few consecutive tokens of one segment and one KV head. Scratch per worker, in floats:
queries (rows, key_length), scores (rows, 256), o and o_b (rows, value_stride), m, l, m_b and l_b
(rows), one page of keys and one of values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from kernels.cpu.barrier import leave_in_turn, wait_for_all
from kernels.cpu.jit import (
    F32_INPUT_MATRIX,
    F32_MATRIX,
    F32_VECTOR,
    I32_MATRIX,
    I32_VECTOR,
    I64,
    I64_VECTOR,
    inlined,
    kernel,
)
from kernels.cpu.memory import advance, bytes_of, get, load_value, pointer, put
from kernels.cpu.pointwise import KV_ARRAYS, PAGE, exp
from kernels.cpu.vector import (
    LANES,
    MAX_ROWS,
    PANEL,
    panel_continue,
    panel_store,
    vector_max,
    vector_sum,
)

BLOCK = 256  # positions of a partial
TASK_ROWS = 32  # most query rows (tokens x heads of a group) of a task of several tokens


def task_tokens(group: int) -> int:
    """Most tokens of one task, for `group` query heads per KV head."""
    return max(1, TASK_ROWS // group)


def scratch_len(group: int, key_length: int, value_stride: int) -> int:
    """Floats of scratch that a worker needs."""
    rows = group * task_tokens(group)
    return rows * (key_length + BLOCK + 2 * value_stride + 4) + PAGE * (key_length + value_stride)


class _Row(NamedTuple):
    """One row's pages of a layer and KV head."""

    keys: Any
    values: Any
    layer: Any
    pages: Any
    kv_head: Any


@inlined
def _head(c: Any, number: int) -> Any:
    """Flat index of page `number` of the row, in layers, pages and heads."""
    page = c.layer * c.keys.shape[1] + np.int64(c.pages[number])
    return page * c.keys.shape[2] + c.kv_head


@inlined
def _key_page(c: Any, number: int) -> Any:
    return pointer(c.keys, _head(c, number) * c.keys.shape[3] * PAGE)


@inlined
def _value_page(c: Any, number: int) -> Any:
    return pointer(c.values, _head(c, number) * c.values.shape[4] * PAGE)


def _floats(page: Any, count: int, scratch: Any) -> Any:
    """A page as float32: itself, or its halves converted into scratch. (Body chosen by type.)"""
    raise NotImplementedError


def _floats_of_type(page: Any, count: int, scratch: Any) -> Any:
    def same(page: Any, count: int, scratch: Any) -> Any:
        return page

    def convert(page: Any, count: int, scratch: Any) -> Any:
        for i in range(count):
            put(scratch, i, load_value(page, i))
        return scratch

    return same if page.dtype == types.float32 else convert


overload(_floats)(_floats_of_type)


@inlined
def _scores(
    queries: Any, rows: int, length: int, keys: Any, scores: Any, ahead: Any, itemsize: int
) -> None:
    """scores[row, 0:32] = queries[row] · keys; keys: one page (key_length, 32)."""
    for row in range(0, rows, MAX_ROWS):
        panel_store(
            min(MAX_ROWS, rows - row),
            advance(queries, row * length),
            keys,
            advance(scores, row * BLOCK),
            length,
            length,
            PANEL,
            BLOCK,
            ahead,
            PAGE * itemsize,
        )


@inlined
def _weigh(
    scores: Any,
    rows: int,
    values: Any,
    stride: int,
    count: int,
    sums: Any,
    ahead: Any,
    itemsize: int,
) -> None:
    """sums[row] += scores[row, 0:count] · values[0:count]; values: one page (32, stride)."""
    for row in range(0, rows, MAX_ROWS):
        for column in range(0, stride, PANEL):
            panel_continue(
                min(MAX_ROWS, rows - row),
                advance(scores, row * BLOCK),
                advance(values, column),
                advance(sums, row * stride + column),
                count,
                BLOCK,
                stride,
                stride,
                advance(ahead, column * itemsize),
                stride * itemsize,
            )


@inlined
def _exponentiate(scores: Any, count: int, scale: Any) -> tuple[Any, Any]:
    """Turn `count` scores of a row into p in place; returns (m_b, l_b)."""
    vectors = (count + LANES - 1) // LANES
    for j in range(count, vectors * LANES):
        put(scores, j, np.float32(-np.inf))
    most = vector_max(scores, vectors)
    for j in range(vectors * LANES):
        put(scores, j, exp((get(scores, j) - most) * scale))
    return most, vector_sum(scores, vectors)


class _Scratch(NamedTuple):
    queries: Any
    scores: Any
    sums: Any  # o
    mosts: Any  # m
    totals: Any  # l
    block_sums: Any
    block_mosts: Any
    block_totals: Any
    key_page: Any
    value_page: Any


@inlined
def _carve(scratch: Any, rows: int, length: int, stride: int) -> Any:
    queries = pointer(scratch, 0)
    scores = advance(queries, rows * length)
    sums = advance(scores, rows * BLOCK)
    mosts = advance(sums, rows * stride)
    totals = advance(mosts, rows)
    block_sums = advance(totals, rows)
    block_mosts = advance(block_sums, rows * stride)
    block_totals = advance(block_mosts, rows)
    key_page = advance(block_totals, rows)
    value_page = advance(key_page, length * PAGE)
    return _Scratch(
        queries,
        scores,
        sums,
        mosts,
        totals,
        block_sums,
        block_mosts,
        block_totals,
        key_page,
        value_page,
    )


@inlined
def _merge(s: Any, row: int, stride: int, scale: Any) -> None:
    """Merge one row's partial of a block into its (m, l, o)."""
    old, new = get(s.mosts, row), get(s.block_mosts, row)
    top = new if new > old else old
    old_weight, new_weight = exp((old - top) * scale), exp((new - top) * scale)
    put(s.mosts, row, top)
    total = get(s.totals, row) * old_weight + get(s.block_totals, row) * new_weight
    put(s.totals, row, total)
    sums, block_sums = advance(s.sums, row * stride), advance(s.block_sums, row * stride)
    for j in range(stride):
        put(sums, j, get(sums, j) * old_weight + get(block_sums, j) * new_weight)


@inlined
def _start(s: Any, q: Any, at: int, tokens: int, group: int, length: int, stride: int) -> None:
    """Gather the queries of `tokens` tokens, one KV head's group of each; empty (m, l, o)."""
    for t in range(tokens):
        source = pointer(q, at + t * q.shape[1])
        for i in range(group * length):
            put(s.queries, t * group * length + i, get(source, i))
    for i in range(tokens * group * stride):
        put(s.sums, i, np.float32(0.0))
    for row in range(tokens * group):
        put(s.mosts, row, np.float32(-np.inf))
        put(s.totals, row, np.float32(0.0))


@inlined
def _weigh_page(
    s: Any,
    values: Any,
    start: int,
    at: int,
    first: int,
    tokens: int,
    group: int,
    stride: int,
    ahead: Any,
    itemsize: int,
) -> None:
    """Add the page from position `start` on to the block's sums; its scores begin at `at`.

    Only positions up to a query's own take part: tokens that see the whole page go together,
    those that end inside it one by one.
    """
    whole = min(max(start + PAGE - 1 - first, 0), tokens)
    for t in range(max(start - first, 0), whole):
        row, count = t * group, first + t + 1 - start
        scores, sums = advance(s.scores, row * BLOCK + at), advance(s.block_sums, row * stride)
        _weigh(scores, group, values, stride, count, sums, ahead, itemsize)
    row = whole * group
    scores, sums = advance(s.scores, row * BLOCK + at), advance(s.block_sums, row * stride)
    _weigh(scores, tokens * group - row, values, stride, PAGE, sums, ahead, itemsize)


@inlined
def _block(
    s: Any, c: Any, block: int, first: int, tokens: int, group: int, scale: Any, after: Any
) -> None:
    """Positions [block, block + 256) of each row: one partial, merged into (m, l, o).

    after: the page that is needed next
    """
    length, stride, itemsize = c.keys.shape[3], c.values.shape[4], c.keys.itemsize
    rows, begin = tokens * group, block // PAGE
    end = min(begin + BLOCK // PAGE, (first + tokens - 1) // PAGE + 1)
    for number in range(begin, end):
        ahead = _key_page(c, number + 1) if number + 1 < end else _value_page(c, begin)
        keys = _floats(_key_page(c, number), length * PAGE, s.key_page)
        scores = advance(s.scores, number * PAGE - block)
        _scores(s.queries, rows, length, keys, scores, bytes_of(ahead), itemsize)
    seen_from = max(block - first, 0) * group  # rows before see nothing of this block
    for row in range(seen_from, rows):
        count = min(BLOCK, first + row // group + 1 - block)
        most, total = _exponentiate(advance(s.scores, row * BLOCK), count, scale)
        put(s.block_mosts, row, most)
        put(s.block_totals, row, total)
    for i in range(seen_from * stride, rows * stride):
        put(s.block_sums, i, np.float32(0.0))
    for number in range(begin, end):
        ahead = _value_page(c, number + 1) if number + 1 < end else after
        values = _floats(_value_page(c, number), PAGE * stride, s.value_page)
        start = number * PAGE
        _weigh_page(
            s,
            values,
            start,
            start - block,
            first,
            tokens,
            group,
            stride,
            bytes_of(ahead),
            itemsize,
        )
    for row in range(seen_from, rows):
        _merge(s, row, stride, scale)


@inlined
def _finish(s: Any, tokens: int, group: int, stride: int, length: int, out: Any, at: int) -> None:
    """out = o / l, for one KV head's group of each token."""
    for t in range(tokens):
        for h in range(group):
            row = t * group + h
            target = pointer(out, at + t * out.shape[1] + h * length)
            total = get(s.totals, row)
            for d in range(length):
                put(target, d, get(s.sums, row * stride + d) / total)


@kernel(
    *[
        types.boolean(
            I64_VECTOR,
            I64,
            I64,
            I32_MATRIX,
            F32_INPUT_MATRIX,
            array,
            array,
            I64,
            I64,
            I64,
            I32_VECTOR,
            I32_VECTOR,
            I32_MATRIX,
            F32_MATRIX,
            F32_VECTOR,
        )
        for array in KV_ARRAYS
    ]
)
def attention(
    barrier: Any,
    worker: int,
    num_workers: int,
    tasks: Any,
    q: Any,
    keys: Any,
    values: Any,
    layer: int,
    num_heads: int,
    value_length: int,
    positions: Any,
    rows: Any,
    page_table: Any,
    out: Any,
    scratch: Any,
) -> Any:
    """Attention of this worker's tasks; waits for all before and after, False when broken.

    tasks: (num_tasks, 3): KV head, first token, token after the last; tokens of a task belong to
        one row and are consecutive
    keys: (num_layers, num_pages, num_kv_heads, key_length, 32), values: (..., 32, stride)
    """
    if not wait_for_all(barrier, num_workers):
        return False
    length, stride, group = keys.shape[3], values.shape[4], num_heads // keys.shape[2]
    scale = np.float32(1.0 / np.sqrt(np.float64(length)))
    for number in range(len(tasks)):
        kv_head, begin = np.int64(tasks[number, 0]), np.int64(tasks[number, 1])
        tokens, first = np.int64(tasks[number, 2]) - begin, np.int64(positions[begin])
        head = begin * num_heads + kv_head * group
        c = _Row(keys, values, layer, page_table[rows[begin]], kv_head)
        following = tasks[min(number + 1, len(tasks) - 1)]
        then = _Row(keys, values, layer, page_table[rows[following[1]]], np.int64(following[0]))
        s = _carve(scratch, tokens * group, length, stride)
        _start(s, q, head * length, tokens, group, length, stride)
        for block in range(0, first + tokens, BLOCK):
            is_last = block + BLOCK >= first + tokens
            after = _key_page(then, 0) if is_last else _key_page(c, (block + BLOCK) // PAGE)
            _block(s, c, block, first, tokens, group, scale, after)
        _finish(s, tokens, group, stride, value_length, out, head * value_length)
    return leave_in_turn(barrier, worker, num_workers)
