"""How a sweep's attention is split over the GPU, and its indices on the device; made once a sweep.

The tables of a small sweep are padded with tasks that do nothing, so that the next one, a token
later, has as many.

A task is up to 16 query rows (tokens x heads of a group) of a segment, for each KV head. Segments
of few query rows and many positions are split by blocks of 256 positions too; their partials are
merged by the same arithmetic in the same order as inside a task.

With KV of 8 bits the pages that a sweep stores into are kept in halves (`HalfPages`), and those
that it fills are listed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np

from kernels.cuda.matrix import DeviceArray
from kernels.cuda.recordings import MAX_TOKENS
from kernels.cuda.uploads import Uploads
from kernels.ops import ATTENTION_BLOCK, PAGE_TOKENS, Batch, Int32, KvShape

TILE_ROWS = 16
_FIRST_TOKEN, _POSITION = 1, 2  # columns of a task
PARTIALS_NBYTES = 32 << 20  # of the partials that are in memory at once


@dataclass(frozen=True, slots=True)
class Tasks:
    """Attention tasks as rows of int32, host side.

    table: (n, 8) segment, its first token, that token's position, first query row, query rows,
        first block, end block, first partial of the segment or -1
    merges: (n, 4) token, head of the group, first partial, blocks
    num_partials: over all merges and KV heads
    """

    table: Int32
    merges: Int32
    num_partials: int


@dataclass(frozen=True, slots=True)
class HalfPages:
    """Where the pages that a sweep stores into are kept in halves: see pages.cuh.

    homes: (num_segments, 3) int32 its row, its last page, what takes an earlier page's number to
        that of a new page
    closing: (n, 2) int32 segment, pages of its row up to one that the sweep fills; in a small sweep
        a line per token, zeros where it fills none
    num_new: pages that end before the last of their segment
    leaves_an_open_page: whether a segment begins inside a page and goes on in the next
    """

    homes: DeviceArray
    closing: DeviceArray
    num_new: int
    leaves_an_open_page: bool


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Device arrays of one sweep, until the next is planned.

    pages: (num_segments, at least the most pages of one) int32
    half_pages: where pools of 8 bits are in use
    serial: of its upload
    key: equal for sweeps whose launches are the same; None where they need not be
    """

    batch: Batch
    serial: int
    key: Hashable
    num_tokens: int
    token_ids: DeviceArray
    logit_indices: DeviceArray
    positions: DeviceArray
    segments: DeviceArray
    pages: DeviceArray
    tasks: DeviceArray
    merges: DeviceArray
    num_partials: int
    half_pages: HalfPages | None


class TaskMemory:
    """The attention tasks of the last sweep that only decoded."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._tasks: Tasks | None = None

    def tasks_of(self, batch: Batch, shape: KvShape, num_heads: int) -> Tasks:
        """See `attention_tasks`; where tokens only moved on inside their blocks, made anew of the
        last ones.
        """
        if len(batch.segments) < batch.num_tokens:
            return attention_tasks(batch, shape, num_heads)
        key = (shape, num_heads, (batch.positions // ATTENTION_BLOCK).tobytes())
        if self._tasks is None or key != self._key:
            self._key, self._tasks = key, attention_tasks(batch, shape, num_heads)
        table = self._tasks.table.copy()
        table[:, _POSITION] = batch.positions[table[:, _FIRST_TOKEN]]
        return replace(self._tasks, table=table)


def plan_sweep(
    batch: Batch,
    shape: KvShape,
    num_heads: int,
    uploads: Uploads,
    memory: TaskMemory,
    *,
    in_halves: bool = False,
) -> SweepPlan:
    """in_halves: list the pages that pools of 8 bits keep in halves"""
    tasks = memory.tasks_of(batch, shape, num_heads)
    begins, ends = batch.segments[:, 0], batch.segments[:, 1]
    most_pages = int(batch.positions[ends - 1].max(initial=0)) // PAGE_TOKENS + 1
    table, merges, is_small = tasks.table, tasks.merges, batch.num_tokens <= MAX_TOKENS
    if is_small:
        table, merges = _padded(table), _padded(merges)
        most_pages = min(_power_of_two(most_pages), batch.page_table.shape[1])
    arrays = [
        batch.token_ids,
        batch.logit_indices,
        batch.positions,
        np.repeat(np.arange(len(begins), dtype=np.int32), ends - begins),
        batch.page_table[batch.rows[begins], :most_pages],
        table,
        merges,
    ]
    if in_halves:
        arrays += [homes_of(batch), closing_pages(batch, num_lines=batch.num_tokens * is_small)]
    token_ids, logit_indices, positions, segments, pages, task_table, merge_table, *halves = (
        uploads.bring(arrays)
    )
    sizes = tuple(array.shape for array in arrays)
    return SweepPlan(
        batch=batch,
        serial=uploads.serial,
        key=(uploads.places_serial, sizes) if is_small else None,
        num_tokens=batch.num_tokens,
        token_ids=token_ids,
        logit_indices=logit_indices,
        positions=positions,
        segments=segments,
        pages=pages,
        tasks=task_table,
        merges=merge_table,
        num_partials=tasks.num_partials,
        half_pages=_half_pages(batch, *halves) if in_halves else None,
    )


def _half_pages(batch: Batch, homes: DeviceArray, closing: DeviceArray) -> HalfPages:
    first, last = _first_and_last_pages(batch)
    begins_inside = batch.positions[batch.segments[:, 0]] % PAGE_TOKENS > 0
    return HalfPages(
        homes=homes,
        closing=closing,
        num_new=int((last - first).sum()),
        leaves_an_open_page=bool((begins_inside & (first < last)).any()),
    )


def _first_and_last_pages(batch: Batch) -> tuple[Int32, Int32]:
    """Of each segment, by number in its row."""
    begins, ends = batch.segments[:, 0], batch.segments[:, 1]
    return batch.positions[begins] // PAGE_TOKENS, batch.positions[ends - 1] // PAGE_TOKENS


def homes_of(batch: Batch) -> Int32:
    """See `HalfPages`."""
    first, last = _first_and_last_pages(batch)
    counts = last - first
    rows = batch.rows[batch.segments[:, 0]]
    return np.stack([rows, last, np.cumsum(counts) - counts - first], axis=1).astype(np.int32)


def closing_pages(batch: Batch, *, num_lines: int = 0) -> Int32:
    """See `HalfPages`. num_lines: at least, with zeros behind"""
    tokens = np.flatnonzero(batch.positions % PAGE_TOKENS == PAGE_TOKENS - 1)
    lines = np.zeros((max(len(tokens), num_lines), 2), np.int32)
    lines[: len(tokens), 0] = np.searchsorted(batch.segments[:, 1], tokens, side="right")
    lines[: len(tokens), 1] = batch.positions[tokens] // PAGE_TOKENS + 1
    return lines


def _padded(table: Int32) -> Int32:
    """With rows of zeros behind it, up to a power of two; none stays none."""
    count = _power_of_two(len(table)) if len(table) else 0
    return np.concatenate([table, np.zeros((count - len(table), table.shape[1]), np.int32)])


def _power_of_two(count: int) -> int:
    """The first from 8 on that is no less."""
    return max(8, 1 << (count - 1).bit_length())


def attention_tasks(batch: Batch, shape: KvShape, num_heads: int) -> Tasks:
    """The tasks of a sweep, those with the most positions first."""
    group = num_heads // shape.num_kv_heads
    begins, ends = batch.segments[:, 0], batch.segments[:, 1]
    tokens, rows = ends - begins, (ends - begins) * group
    blocks = batch.positions[ends - 1] // ATTENTION_BLOCK + 1
    split = (blocks > 1) & ((tokens == 1) | (rows <= TILE_ROWS))
    partials = np.where(split, rows * blocks * shape.num_kv_heads, 0)
    first_partial = np.cumsum(partials) - partials
    split &= first_partial + partials <= PARTIALS_NBYTES // (4 * shape.value_length + 8)
    return Tasks(
        table=_longest_first(_tasks(batch, group, blocks, split, first_partial)),
        merges=_merges(begins, rows, blocks, first_partial, split, group, shape.num_kv_heads),
        num_partials=int(partials[split].sum()),
    )


def _tasks(
    batch: Batch,
    group: int,
    blocks: Int32,
    split: np.ndarray,
    first_partial: np.ndarray,
) -> Int32:
    """(num_tasks, 8): each segment in steps of query rows, and of blocks where it is split."""
    begins, ends = batch.segments[:, 0], batch.segments[:, 1]
    rows = (ends - begins) * group
    pieces = np.where(split, blocks, 1)
    counts = -(-rows // TILE_ROWS) * pieces
    segment = np.repeat(np.arange(len(begins)), counts)
    inside = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    at, piece = np.divmod(inside, pieces[segment])
    first_row = at * TILE_ROWS
    num_rows = np.minimum(TILE_ROWS, rows[segment] - first_row)
    position = batch.positions[begins[segment]]
    last_block = (position + (first_row + num_rows - 1) // group) // ATTENTION_BLOCK
    is_split = split[segment]
    table = [
        segment,
        begins[segment],
        position,
        first_row,
        num_rows,
        np.where(is_split, piece, 0),
        np.where(is_split, piece, last_block) + 1,
        np.where(is_split, first_partial[segment], -1),
    ]
    return np.stack(table, axis=1).astype(np.int32)


def _merges(
    begins: Int32,
    rows: Int32,
    blocks: Int32,
    first_partial: np.ndarray,
    split: np.ndarray,
    group: int,
    num_kv_heads: int,
) -> Int32:
    segment = np.repeat(np.arange(len(rows)), np.where(split, rows, 0))
    counts = np.where(split, rows, 0)
    row = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = first_partial[segment] + row * num_kv_heads * blocks[segment]
    table = [begins[segment] + row // group, row % group, first, blocks[segment]]
    return np.stack(table, axis=1).astype(np.int32)


def _longest_first(tasks: Int32) -> Int32:
    order = np.argsort(tasks[:, 5] - tasks[:, 6], kind="stable")
    return np.ascontiguousarray(tasks[order])
