"""Causal attention over paged keys and values, as partials over blocks of 256 positions.

For a query with n positions before and at its own, and each block of them,

    m_b = max(s), p = exp((s - m_b) * scale), l_b = sum(p), o_b = sum(p · v)

are merged in order into (m, l, o), and the result is o / l. Scores are chains over the key's
length, o_b chains over the block's positions, l_b a tree over lanes; none of them contains a
position after the query's own, so the bits depend on the query and its row alone: not on the
queries that are computed beside it, nor on how a prompt was cut into chunks.

A piece is a few consecutive tokens of one segment and one page. A task is one KV head of a few
pieces, block by block. Pieces whose rows have a page in common, all of it before their tokens, go
through it together, so that a prefix that rows share is read once for many of them; each row's
sums run in the same order as they would over pages of its own.

Scratch per worker, in floats: queries (rows, key_length), scores (rows, 256), o and o_b (rows,
value_stride), m, l, m_b and l_b (rows), one page of keys and one of values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from kernels.cpu.barrier import leave_in_turn, wait_for_all
from kernels.cpu.jit import (
    F32_INPUT_MATRIX,
    F32_MATRIX,
    F32_VECTOR,
    I32_MATRIX,
    I32_VECTOR,
    I64,
    I64_MATRIX,
    I64_VECTOR,
    inlined,
    kernel,
)
from kernels.cpu.kv import (
    KV_TYPES,
    NEW_PAGES,
    PAGE,
    Kv,
    key_page,
    read_keys,
    read_values,
    value_page,
)
from kernels.cpu.memory import advance, bytes_of, get, pointer, put
from kernels.cpu.pointwise import exp
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
PIECE_ROWS = 32  # most query rows (tokens x heads of a group) of a piece of several tokens
TASK_ROWS = 64  # most query rows of a task of several pieces


def piece_tokens(group: int) -> int:
    """Tokens of a piece, for `group` query heads per KV head: a page in about equal parts."""
    parts = -(-PAGE // max(1, PIECE_ROWS // group))
    return -(-PAGE // parts)


def scratch_len(group: int, key_length: int, value_stride: int) -> int:
    """Floats of scratch that a worker needs."""
    rows = max(group, TASK_ROWS)
    return rows * (key_length + BLOCK + 2 * value_stride + 4) + PAGE * (key_length + value_stride)


# Columns of a visit: page of the row, a piece that has it, its first row in scratch, and the
# tokens of all pieces that go through the page together.
_NUMBER, _PIECE, _ROW, _TOKENS = range(4)
VISITS_SHAPE = (BLOCK // PAGE * TASK_ROWS, 4)


class _Sweep(NamedTuple):
    """What all tasks of a sweep share. length: of a key; stride: of a value, as stored"""

    pieces: Any
    kv: Any
    group: Any
    length: Any
    stride: Any


@inlined
def _num_tokens(c: Any, piece: int) -> Any:
    return np.int64(c.pieces[piece, 1]) - np.int64(c.pieces[piece, 0])


@inlined
def _first_position(c: Any, piece: int) -> Any:
    return np.int64(c.kv.positions[c.pieces[piece, 0]])


@inlined
def _end_position(c: Any, piece: int) -> Any:
    return _first_position(c, piece) + _num_tokens(c, piece)


@inlined
def _key_page(c: Any, kv_head: int, piece: int, number: int) -> Any:
    return bytes_of(key_page(c.kv, np.int64(c.pieces[piece, 0]), number, kv_head))


@inlined
def _value_page(c: Any, kv_head: int, piece: int, number: int) -> Any:
    return bytes_of(value_page(c.kv, np.int64(c.pieces[piece, 0]), number, kv_head))


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
def _start(s: Any, c: Any, q: Any, kv_head: int, begin: int, end: int) -> Any:
    """Gather the queries of pieces [begin, end), a group of heads of each token; empty (m, l, o).

    Returns the position after the last.
    """
    width, stride, row, longest = c.group * c.length, c.stride, 0, 0
    for piece in range(begin, end):
        for token in range(c.pieces[piece, 0], c.pieces[piece, 1]):
            source = pointer(q, np.int64(token) * q.shape[1] + kv_head * width)
            for i in range(width):
                put(s.queries, row * c.length + i, get(source, i))
            row += c.group
        longest = max(longest, _end_position(c, piece))
    for i in range(row * stride):
        put(s.sums, i, np.float32(0.0))
    for r in range(row):
        put(s.mosts, r, np.float32(-np.inf))
        put(s.totals, r, np.float32(0.0))
    return longest


@inlined
def _weigh_page(
    s: Any,
    values: Any,
    start: int,
    first: int,
    tokens: int,
    group: int,
    row: int,
    stride: int,
    ahead: Any,
    itemsize: int,
) -> None:
    """Add the page from position `start` on to the sums of the rows from `row` on.

    first: position of the first of the tokens; the others follow it, or lie past the page as well
    Only positions up to a query's own take part: tokens that see the whole page go together,
    those that end inside it one by one.
    """
    at = start % BLOCK
    whole = min(max(start + PAGE - 1 - first, 0), tokens)
    for t in range(max(start - first, 0), whole):
        r, count = row + t * group, first + t + 1 - start
        scores, sums = advance(s.scores, r * BLOCK + at), advance(s.block_sums, r * stride)
        _weigh(scores, group, values, stride, count, sums, ahead, itemsize)
    r = row + whole * group
    scores, sums = advance(s.scores, r * BLOCK + at), advance(s.block_sums, r * stride)
    _weigh(scores, (tokens - whole) * group, values, stride, PAGE, sums, ahead, itemsize)


@inlined
def _list_visits(c: Any, begin: int, end: int, block: int, visits: Any) -> Any:
    """Note the pages of positions [block, block + 256) that pieces [begin, end) go through.

    Returns their number.
    """
    count = 0
    for number in range(block // PAGE, (block + BLOCK) // PAGE):
        row, piece = 0, begin
        while piece < end:
            until, tokens = piece + 1, _num_tokens(c, piece)
            while until < end and number * PAGE < c.pieces[until, 2]:
                tokens += _num_tokens(c, until)
                until += 1
            if number * PAGE < _end_position(c, piece):
                visits[count, _NUMBER], visits[count, _PIECE] = number, piece
                visits[count, _ROW], visits[count, _TOKENS] = row, tokens
                count += 1
            row += tokens * c.group
            piece = until
    return count


@inlined
def _score_block(s: Any, c: Any, kv_head: int, visits: Any, count: int) -> None:
    """The scores of all rows of a task, page by page."""
    length, itemsize = c.length, c.kv.arrays.keys.itemsize
    for i in range(count):
        number, piece, row = visits[i, _NUMBER], visits[i, _PIECE], visits[i, _ROW]
        if i + 1 < count:
            ahead = _key_page(c, kv_head, visits[i + 1, _PIECE], visits[i + 1, _NUMBER])
        else:
            ahead = _value_page(c, kv_head, visits[0, _PIECE], visits[0, _NUMBER])
        token = np.int64(c.pieces[piece, 0])
        keys = read_keys(c.kv.arrays.keys, c.kv, token, number, kv_head, s.key_page)
        scores = advance(s.scores, row * BLOCK + number * PAGE % BLOCK)
        queries, rows = advance(s.queries, row * length), visits[i, _TOKENS] * c.group
        _scores(queries, rows, length, keys, scores, ahead, itemsize)


@inlined
def _weigh_block(s: Any, c: Any, kv_head: int, visits: Any, count: int, after: Any) -> None:
    """The sums of all rows of a task, page by page. after: the page that is needed next"""
    stride, itemsize = c.stride, c.kv.arrays.values.itemsize
    for i in range(count):
        number, piece, row = visits[i, _NUMBER], visits[i, _PIECE], visits[i, _ROW]
        if i + 1 < count:
            ahead = _value_page(c, kv_head, visits[i + 1, _PIECE], visits[i + 1, _NUMBER])
        else:
            ahead = after
        token = np.int64(c.pieces[piece, 0])
        values = read_values(c.kv.arrays.keys, c.kv, token, number, kv_head, s.value_page)
        _weigh_page(
            s,
            values,
            number * PAGE,
            _first_position(c, piece),
            visits[i, _TOKENS],
            c.group,
            row,
            stride,
            ahead,
            itemsize,
        )


@inlined
def _block(
    s: Any,
    c: Any,
    kv_head: int,
    begin: int,
    end: int,
    block: int,
    scale: Any,
    visits: Any,
    after: Any,
) -> Any:
    """Positions [block, block + 256) of pieces [begin, end): one partial of each row, merged.

    Returns how many pages were read.
    """
    stride = c.stride
    count = _list_visits(c, begin, end, block, visits)
    _score_block(s, c, kv_head, visits, count)
    row = 0
    for piece in range(begin, end):
        first = _first_position(c, piece)
        for i in range(_num_tokens(c, piece) * c.group):
            seen = min(BLOCK, first + i // c.group + 1 - block)
            if seen > 0:
                most, total = _exponentiate(advance(s.scores, row * BLOCK), seen, scale)
                put(s.block_mosts, row, most)
                put(s.block_totals, row, total)
            for j in range(row * stride, (row + 1) * stride):
                put(s.block_sums, j, np.float32(0.0))
            row += 1
    _weigh_block(s, c, kv_head, visits, count, after)
    row = 0
    for piece in range(begin, end):
        first = _first_position(c, piece)
        for i in range(_num_tokens(c, piece) * c.group):
            if first + i // c.group >= block:
                _merge(s, row, stride, scale)
            row += 1
    return count


@inlined
def _finish(s: Any, c: Any, kv_head: int, begin: int, end: int, length: int, out: Any) -> None:
    """out = o / l, for one KV head's group of each token; length: of a value."""
    stride, row = c.stride, 0
    for piece in range(begin, end):
        for token in range(c.pieces[piece, 0], c.pieces[piece, 1]):
            head = pointer(out, np.int64(token) * out.shape[1] + kv_head * c.group * length)
            for h in range(c.group):
                target, total = advance(head, h * length), get(s.totals, row)
                for d in range(length):
                    put(target, d, get(s.sums, row * stride + d) / total)
                row += 1


@inlined
def _num_rows(c: Any, begin: int, end: int) -> Any:
    rows = 0
    for piece in range(begin, end):
        rows += _num_tokens(c, piece) * c.group
    return rows


@kernel(
    *[
        types.boolean(
            I64_VECTOR,
            I64,
            I64,
            I32_MATRIX,
            I32_MATRIX,
            F32_INPUT_MATRIX,
            arrays,
            NEW_PAGES,
            I32_VECTOR,
            I64,
            I64,
            I64,
            I32_VECTOR,
            I32_VECTOR,
            I32_MATRIX,
            F32_MATRIX,
            F32_VECTOR,
            I64_MATRIX,
            I64_VECTOR,
        )
        for arrays in KV_TYPES
    ]
)
def attention(
    barrier: Any,
    worker: int,
    num_workers: int,
    tasks: Any,
    pieces: Any,
    q: Any,
    arrays: Any,
    new_pages: Any,
    page_of: Any,
    layer: int,
    num_heads: int,
    value_length: int,
    positions: Any,
    rows: Any,
    page_table: Any,
    out: Any,
    scratch: Any,
    visits: Any,
    pages_read: Any,
) -> Any:
    """Attention of this worker's tasks; waits for all before and after, False when broken.

    tasks: (num_tasks, 3): KV head, first piece, piece after the last
    pieces: (num_pieces, 3): first token, token after the last, and how many positions, of whole
        pages before its tokens, the piece has in the same pages as the piece before it; tokens
        of a piece belong to one row and are consecutive
    arrays, new_pages, page_of: see `KvArrays` and `SweepPlan`
    visits: scratch of VISITS_SHAPE
    pages_read: (num_workers,), counts the pages that each has read, for every KV head
    """
    if not wait_for_all(barrier, num_workers):
        return False
    length, stride = arrays.keys.shape[3], arrays.values.shape[4]
    group = num_heads // arrays.keys.shape[2]
    scale = np.float32(1.0 / np.sqrt(np.float64(length)))
    kv = Kv(arrays, new_pages, page_of, positions, rows, page_table, layer)
    c = _Sweep(pieces, kv, group, length, stride)
    count = 0
    for number in range(len(tasks)):
        kv_head = np.int64(tasks[number, 0])
        begin, end = np.int64(tasks[number, 1]), np.int64(tasks[number, 2])
        s = _carve(scratch, _num_rows(c, begin, end), length, stride)
        longest = _start(s, c, q, kv_head, begin, end)
        then = tasks[min(number + 1, len(tasks) - 1)]
        next_task = _key_page(c, np.int64(then[0]), np.int64(then[1]), 0)
        for block in range(0, longest, BLOCK):
            # The first piece may end before this block: what is asked for then is not needed.
            following = min(block + BLOCK, _end_position(c, begin) - 1) // PAGE
            is_last = block + BLOCK >= longest
            after = next_task if is_last else _key_page(c, kv_head, begin, following)
            count += _block(s, c, kv_head, begin, end, block, scale, visits, after)
        _finish(s, c, kv_head, begin, end, value_length, out)
    pages_read[worker] += count
    return leave_in_turn(barrier, worker, num_workers)
