"""How a sweep's attention is split over the GPU.

A task is up to 16 query rows (tokens x heads of a group) of a segment, for each KV head. Segments
of few query rows and many positions are split by blocks of 256 positions too; their partials are
merged by the same arithmetic in the same order as inside a task. Where decoding rows begin with the
same blocks, tasks for several of them take the place of their own (`kernels.cuda.sharing`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.cuda import sharing
from kernels.cuda.sharing import NOBODY, TILE_ROWS, Sharing
from kernels.ops import ATTENTION_BLOCK, PAGE_TOKENS, Batch, Int32, KvShape

_FIRST_TOKEN, _POSITION = 1, 2  # columns of a task
PARTIALS_NBYTES = 32 << 20  # of the partials that are in memory at once
_STATS_NBYTES = 8
_ALIGNMENT_NBYTES = 1 << 10  # lost where sums and what goes with them are put one behind the other

Int64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Round:
    """Ranges [begin, end) of tables: tasks that run together, then the merges of their partials."""

    shared: tuple[int, int]
    tasks: tuple[int, int]
    merges: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tasks:
    """Attention tasks as rows of int32, host side, those of a round behind each other.

    table: (n, 8) segment, its first token, that token's position, first query row, query rows,
        first block, end block, first partial of the segment or -1
    shared: (n, 4) segment whose pages are read, first query row among those of all members, query
        rows, block
    members: (n, 3) of each segment that shares: its token, first partial, blocks
    merges: (n, 4) token, head of the group, first partial, blocks
    """

    table: Int32
    shared: Int32
    members: Int32
    merges: Int32
    rounds: tuple[Round, ...]

    def pages_read(self, group: int, num_kv_heads: int) -> int:
        """Pages that one layer's attention reads, counted for each KV head and task."""
        _, _, position, first_row, num_rows, first_block, end_block, _ = self.table.T
        last = (position + (first_row + num_rows - 1) // group) // PAGE_TOKENS + 1
        block_pages = ATTENTION_BLOCK // PAGE_TOKENS
        own = np.minimum(end_block * block_pages, last) - first_block * block_pages
        return num_kv_heads * (int(own.sum()) + len(self.shared) * block_pages)


class TaskMemory:
    """The attention tasks of the last sweep that only decoded."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._tasks: Tasks | None = None

    def tasks_of(self, batch: Batch, shape: KvShape, num_heads: int) -> Tasks:
        """See `attention_tasks`; where tokens only moved on inside their blocks, made anew of the
        last ones.
        """
        shared = rows_that_share(batch, shape, num_heads)
        if len(batch.segments) < batch.num_tokens:
            return attention_tasks(batch, shape, num_heads, shared)
        blocks = (batch.positions // ATTENTION_BLOCK).tobytes()
        key = (shape, num_heads, blocks, shared.key())
        if self._tasks is None or key != self._key:
            self._key, self._tasks = key, attention_tasks(batch, shape, num_heads, shared)
        table = self._tasks.table.copy()
        table[:, _POSITION] = batch.positions[table[:, _FIRST_TOKEN]]
        return replace(self._tasks, table=table)


def most_partials(value_length: int) -> int:
    """That are in memory at once."""
    return (PARTIALS_NBYTES - _ALIGNMENT_NBYTES) // (4 * value_length + _STATS_NBYTES)


def rows_that_share(batch: Batch, shape: KvShape, num_heads: int) -> Sharing:
    """Decoding rows that begin with the same blocks; nobody where too little would be saved."""
    if len(batch.segments) < 2:
        return NOBODY
    group = num_heads // shape.num_kv_heads
    partials = _partials(batch, shape, group)
    sizes = batch.segments[:, 1] - batch.segments[:, 0]
    may_share = (sizes == 1) & (partials <= most_partials(shape.value_length))
    found = sharing.shared_blocks(batch, may_share)
    saved = sharing.saved_tasks(found, group) * shape.num_kv_heads
    return found if saved >= sharing.LEAST_SAVED else NOBODY


def attention_tasks(batch: Batch, shape: KvShape, num_heads: int, shared: Sharing) -> Tasks:
    """The tasks of a sweep, in each round those with the most positions first.

    shared: rows that go through their first blocks together
    """
    group, num_kv_heads = num_heads // shape.num_kv_heads, shape.num_kv_heads
    shared, segments = _segments(batch, shape, group, shared)
    table = _tasks(segments, group)
    turns = segments.turn[table[:, 0]]
    order = np.lexsort((table[:, 5] - table[:, 6], turns))
    table, turns = np.ascontiguousarray(table[order]), turns[order]
    merges, merge_turns = _merges(segments, group, num_kv_heads)
    tiles = sharing.tiles(shared, group)
    tiles[:, 0] = shared.segments[tiles[:, 0]]
    tile_turns = segments.turn[tiles[:, 0]]
    order = np.argsort(tile_turns, kind="stable")
    return Tasks(
        table=table,
        shared=tiles[order],
        members=_members(segments)[shared.segments],
        merges=merges,
        rounds=_rounds(tile_turns[order], turns, merge_turns),
    )


@dataclass(frozen=True, slots=True)
class _Segments:
    """Of each segment.

    begin, position: its first token and that token's position
    rows, blocks: query rows, and blocks up to its last token's
    split: whether each block is left as partials, from `first_partial` on
    first_block: before it others go through the blocks too
    turn: the round that it is in
    """

    begin: Int32
    position: Int32
    rows: Int32
    blocks: Int32
    split: Bools
    first_partial: Int64
    first_block: Int64
    turn: Int64


def _segments(
    batch: Batch, shape: KvShape, group: int, shared: Sharing
) -> tuple[Sharing, _Segments]:
    """Also `shared`, where rows of different rounds have nothing in common."""
    begins, sizes = batch.segments[:, 0], batch.segments[:, 1] - batch.segments[:, 0]
    rows, blocks, most = sizes * group, _blocks(batch), most_partials(shape.value_length)
    partials = _partials(batch, shape, group)
    split = (blocks > 1) & ((sizes == 1) | (rows <= TILE_ROWS))
    split[shared.segments] = False  # they come after the others
    taken = np.where(split, partials, 0)
    first_partial = np.cumsum(taken) - taken
    split &= first_partial + partials <= most
    used = int(partials[split].sum())
    turn, first_block = np.zeros(len(begins), np.int64), np.zeros(len(begins), np.int64)
    turns, firsts = sharing.rounds_of(partials[shared.segments], used, most)
    shared = shared.cut(np.flatnonzero(np.diff(turns, prepend=0)))
    split[shared.segments] = True
    first_partial[shared.segments] = firsts
    turn[shared.segments] = turns
    first_block[shared.segments] = shared.num_blocks
    return shared, _Segments(
        begin=begins,
        position=batch.positions[begins],
        rows=rows,
        blocks=blocks,
        split=split,
        first_partial=first_partial,
        first_block=first_block,
        turn=turn,
    )


def _blocks(batch: Batch) -> Int32:
    """Of each segment, up to its last token's."""
    blocks: Int32 = batch.positions[batch.segments[:, 1] - 1] // ATTENTION_BLOCK + 1
    return blocks


def _partials(batch: Batch, shape: KvShape, group: int) -> Int64:
    """Of each segment, over all KV heads, if it were split."""
    sizes = (batch.segments[:, 1] - batch.segments[:, 0]).astype(np.int64)
    return sizes * group * _blocks(batch) * shape.num_kv_heads


def _tasks(segments: _Segments, group: int) -> Int32:
    """(num_tasks, 8): each segment in steps of query rows, and of blocks where it is split."""
    pieces = np.where(segments.split, segments.blocks - segments.first_block, 1)
    counts = -(-segments.rows // TILE_ROWS) * pieces
    segment = np.repeat(np.arange(len(counts)), counts)
    inside = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    at, piece = np.divmod(inside, pieces[segment])
    first_row = at * TILE_ROWS
    num_rows = np.minimum(TILE_ROWS, segments.rows[segment] - first_row)
    position = segments.position[segment]
    last_block = (position + (first_row + num_rows - 1) // group) // ATTENTION_BLOCK
    is_split, block = segments.split[segment], segments.first_block[segment] + piece
    table = [
        segment,
        segments.begin[segment],
        position,
        first_row,
        num_rows,
        np.where(is_split, block, 0),
        np.where(is_split, block, last_block) + 1,
        np.where(is_split, segments.first_partial[segment], -1),
    ]
    return np.stack(table, axis=1).astype(np.int32)


def _merges(segments: _Segments, group: int, num_kv_heads: int) -> tuple[Int32, Int64]:
    """(num_merges, 4) in order of their rounds, and those."""
    counts = np.where(segments.split, segments.rows, 0)
    segment = np.repeat(np.arange(len(counts)), counts)
    row = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks = segments.blocks[segment]
    first = segments.first_partial[segment] + row * num_kv_heads * blocks
    table = np.stack([segments.begin[segment] + row // group, row % group, first, blocks], axis=1)
    turns = segments.turn[segment]
    order = np.argsort(turns, kind="stable")
    return table[order].astype(np.int32), turns[order]


def _members(segments: _Segments) -> Int32:
    columns: list[npt.NDArray[Any]] = [segments.begin, segments.first_partial, segments.blocks]
    return np.stack(columns, axis=1).astype(np.int32)


def _rounds(shared: Int64, tasks: Int64, merges: Int64) -> tuple[Round, ...]:
    """From the rounds, in order, of the rows of each table."""
    numbers = np.arange(int(tasks.max(initial=0)) + 2)
    ends = [np.searchsorted(turns, numbers).tolist() for turns in (shared, tasks, merges)]
    return tuple(Round(*bounds) for bounds in zip(*(pairwise(each) for each in ends), strict=True))
