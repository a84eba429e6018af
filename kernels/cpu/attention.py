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

from kernels.cpu.barrier import wait_for_all
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
from kernels.cpu.memory import advance, get, load_value, pointer, put
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


def _page(pages: Any, offset: int, count: int, scratch: Any) -> Any:
    """A page as float32: itself, or halves converted into scratch. (Body chosen by type.)"""
    raise NotImplementedError


def _page_of_type(pages: Any, offset: int, count: int, scratch: Any) -> Any:
    def read(pages: Any, offset: int, count: int, scratch: Any) -> Any:
        return pointer(pages, offset)

    def convert(pages: Any, offset: int, count: int, scratch: Any) -> Any:
        source = pointer(pages, offset)
        for i in range(count):
            put(scratch, i, load_value(source, i))
        return scratch

    return read if pages.dtype == types.float32 else convert


overload(_page)(_page_of_type)


@inlined
def _scores(queries: Any, rows: int, length: int, keys: Any, scores: Any) -> None:
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
        )


@inlined
def _weigh(scores: Any, rows: int, values: Any, stride: int, count: int, sums: Any) -> None:
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
    s: Any, values: Any, start: int, number: int, first: int, tokens: int, group: int, stride: int
) -> None:
    """Add page `number` of a block, from position `start` on, to the block's sums.

    Only positions up to a query's own take part: tokens that see the whole page go together,
    those that end inside it one by one.
    """
    whole = min(max(start + PAGE - 1 - first, 0), tokens)
    for t in range(max(start - first, 0), whole):
        row = t * group
        scores = advance(s.scores, row * BLOCK + number * PAGE)
        sums = advance(s.block_sums, row * stride)
        _weigh(scores, group, values, stride, first + t + 1 - start, sums)
    row = whole * group
    scores = advance(s.scores, row * BLOCK + number * PAGE)
    sums = advance(s.block_sums, row * stride)
    _weigh(scores, tokens * group - row, values, stride, PAGE, sums)


@inlined
def _block(
    s: Any,
    keys: Any,
    values: Any,
    layer: int,
    pages: Any,
    kv_head: int,
    block: int,
    first: int,
    tokens: int,
    group: int,
    scale: Any,
) -> None:
    """Positions [block, block + 256) of each row: one partial, merged into (m, l, o)."""
    length, stride = keys.shape[3], values.shape[4]
    num_pages = min(BLOCK // PAGE, (first + tokens - 1 - block) // PAGE + 1)
    for number in range(num_pages):
        page = layer * keys.shape[1] + np.int64(pages[block // PAGE + number])
        at = (page * keys.shape[2] + kv_head) * length * PAGE
        key = _page(keys, at, length * PAGE, s.key_page)
        _scores(s.queries, tokens * group, length, key, advance(s.scores, number * PAGE))
    seen_from = max(block - first, 0) * group  # rows before see nothing of this block
    for row in range(seen_from, tokens * group):
        count = min(BLOCK, first + row // group + 1 - block)
        most, total = _exponentiate(advance(s.scores, row * BLOCK), count, scale)
        put(s.block_mosts, row, most)
        put(s.block_totals, row, total)
    for i in range(seen_from * stride, tokens * group * stride):
        put(s.block_sums, i, np.float32(0.0))
    for number in range(num_pages):
        page = layer * keys.shape[1] + np.int64(pages[block // PAGE + number])
        at = (page * keys.shape[2] + kv_head) * PAGE * stride
        value = _page(values, at, PAGE * stride, s.value_page)
        _weigh_page(s, value, block + number * PAGE, number, first, tokens, group, stride)
    for row in range(seen_from, tokens * group):
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
        tokens = np.int64(tasks[number, 2]) - begin
        head = begin * num_heads + kv_head * group
        pages, first = page_table[rows[begin]], np.int64(positions[begin])
        s = _carve(scratch, tokens * group, length, stride)
        _start(s, q, head * length, tokens, group, length, stride)
        for block in range(0, first + tokens, BLOCK):
            _block(s, keys, values, layer, pages, kv_head, block, first, tokens, group, scale)
        _finish(s, tokens, group, stride, value_length, out, head * value_length)
    return wait_for_all(barrier, num_workers)
