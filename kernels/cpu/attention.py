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
    I64_VECTOR,
    inlined,
    kernel_for_kv,
)
from kernels.cpu.kv import (
    KV_TYPES,
    NEW_PAGES,
    PAGE,
    key_page,
    layer_kv,
    pool_head,
    position_of,
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


# Columns of a visit: the page's first position; its head in the pool; a token whose own page it
# is, or -1; the first of the rows in scratch that go through it together, their tokens, and the
# position of the first of these: the others follow it, or lie past the page as well.
_START, _HEAD, _OWN, _ROW, _TOKENS, _FIRST, _COLUMNS = range(7)
VISITS_LEN = BLOCK // PAGE * TASK_ROWS * _COLUMNS


class _Sweep(NamedTuple):
    """What all tasks of a sweep share. pieces: a pointer; itemsize: of keys and values"""

    pieces: Any
    kv: Any
    group: Any
    itemsize: Any


@inlined
def _first_token(c: Any, piece: int) -> Any:
    return np.int64(get(c.pieces, 3 * piece))


@inlined
def _end_token(c: Any, piece: int) -> Any:
    return np.int64(get(c.pieces, 3 * piece + 1))


@inlined
def _num_shared(c: Any, piece: int) -> Any:
    """Positions that the piece has in common with the one before it."""
    return np.int64(get(c.pieces, 3 * piece + 2))


@inlined
def _num_tokens(c: Any, piece: int) -> Any:
    return _end_token(c, piece) - _first_token(c, piece)


@inlined
def _first_position(c: Any, piece: int) -> Any:
    return position_of(c.kv, _first_token(c, piece))


@inlined
def _end_position(c: Any, piece: int) -> Any:
    return _first_position(c, piece) + _num_tokens(c, piece)


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
    width, stride, row, longest = c.group * c.kv.key_length, c.kv.stride, 0, 0
    for piece in range(begin, end):
        for token in range(_first_token(c, piece), _end_token(c, piece)):
            source = pointer(q, token * q.shape[1] + kv_head * width)
            for i in range(width):
                put(s.queries, row * c.kv.key_length + i, get(source, i))
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
def _list_visits(c: Any, kv_head: int, begin: int, end: int, block: int, visits: Any) -> Any:
    """Note the pages of positions [block, block + 256) that pieces [begin, end) go through.

    Returns their number.
    """
    count = 0
    for start in range(block, block + BLOCK, PAGE):
        row, piece = 0, begin
        while piece < end:
            until, tokens = piece + 1, _num_tokens(c, piece)
            while until < end and start < _num_shared(c, until):
                tokens += _num_tokens(c, until)
                until += 1
            first = _first_position(c, piece)
            if start < first + _num_tokens(c, piece):
                token = _first_token(c, piece)
                visit = advance(visits, count * _COLUMNS)
                put(visit, _START, start)
                put(visit, _HEAD, pool_head(c.kv, token, start // PAGE, kv_head))
                put(visit, _OWN, token if first < start + PAGE else -1)
                put(visit, _ROW, row)
                put(visit, _TOKENS, tokens)
                put(visit, _FIRST, first)
                count += 1
            row += tokens * c.group
            piece = until
    return count


@inlined
def _score_block(s: Any, c: Any, kv_head: int, visits: Any, count: int) -> None:
    """The scores of all rows of a task, page by page."""
    length, itemsize = c.kv.key_length, c.itemsize
    for i in range(count):
        visit, following = advance(visits, i * _COLUMNS), advance(visits, (i + 1) * _COLUMNS)
        if i + 1 < count:
            ahead = bytes_of(key_page(c.kv, get(following, _HEAD)))
        else:
            ahead = bytes_of(value_page(c.kv, get(visits, _HEAD)))
        head, own, row = get(visit, _HEAD), get(visit, _OWN), get(visit, _ROW)
        keys = read_keys(c.kv.keys, c.kv, head, own, kv_head, s.key_page)
        scores = advance(s.scores, row * BLOCK + get(visit, _START) % BLOCK)
        queries, rows = advance(s.queries, row * length), get(visit, _TOKENS) * c.group
        _scores(queries, rows, length, keys, scores, ahead, itemsize)


@inlined
def _weigh_block(s: Any, c: Any, kv_head: int, visits: Any, count: int, after: Any) -> None:
    """The sums of all rows of a task, page by page. after: the page that is needed next"""
    for i in range(count):
        visit, following = advance(visits, i * _COLUMNS), advance(visits, (i + 1) * _COLUMNS)
        ahead = bytes_of(value_page(c.kv, get(following, _HEAD))) if i + 1 < count else after
        head, own = get(visit, _HEAD), get(visit, _OWN)
        values = read_values(c.kv.keys, c.kv, head, own, kv_head, s.value_page)
        _weigh_page(
            s,
            values,
            get(visit, _START),
            get(visit, _FIRST),
            get(visit, _TOKENS),
            c.group,
            get(visit, _ROW),
            c.kv.stride,
            ahead,
            c.itemsize,
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
    stride = c.kv.stride
    count = _list_visits(c, kv_head, begin, end, block, visits)
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
def _keys_at(c: Any, kv_head: int, piece: int, position: int) -> Any:
    """The page of keys at a position of a piece's row, or its last where it ends before."""
    number = min(position, _end_position(c, piece) - 1) // PAGE
    head = pool_head(c.kv, _first_token(c, piece), number, kv_head)
    return bytes_of(key_page(c.kv, head))


@inlined
def _finish(s: Any, c: Any, kv_head: int, begin: int, end: int, length: int, out: Any) -> None:
    """out = o / l, for one KV head's group of each token; length: of a value."""
    stride, row = c.kv.stride, 0
    for piece in range(begin, end):
        for token in range(_first_token(c, piece), _end_token(c, piece)):
            head = pointer(out, token * out.shape[1] + kv_head * c.group * length)
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


@kernel_for_kv(
    {
        kv_type: types.boolean(
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
            I64_VECTOR,
            I64_VECTOR,
        )
        for kv_type, arrays in KV_TYPES.items()
    }
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
    visits: scratch, (VISITS_LEN,)
    pages_read: (num_workers,), counts the pages that each has read, for every KV head
    """
    if not wait_for_all(barrier, num_workers):
        return False
    length, stride = arrays.keys.shape[3], arrays.values.shape[4]
    group = num_heads // arrays.keys.shape[2]
    scale = np.float32(1.0 / np.sqrt(np.float64(length)))
    kv = layer_kv(arrays, new_pages, page_of, positions, rows, page_table, layer)
    c = _Sweep(pointer(pieces, 0), kv, group, arrays.keys.itemsize)
    count = 0
    for number in range(len(tasks)):
        kv_head = np.int64(tasks[number, 0])
        begin, end = np.int64(tasks[number, 1]), np.int64(tasks[number, 2])
        s = _carve(scratch, _num_rows(c, begin, end), length, stride)
        longest = _start(s, c, q, kv_head, begin, end)
        then = tasks[min(number + 1, len(tasks) - 1)]
        next_task = _keys_at(c, np.int64(then[0]), np.int64(then[1]), 0)
        for block in range(0, longest, BLOCK):
            is_last = block + BLOCK >= longest
            after = next_task if is_last else _keys_at(c, kv_head, begin, block + BLOCK)
            count += _block(s, c, kv_head, begin, end, block, scale, pointer(visits, 0), after)
        _finish(s, c, kv_head, begin, end, value_length, out)
    pages_read[worker] += count
    return leave_in_turn(barrier, worker, num_workers)
