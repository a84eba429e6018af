"""How a sweep's attention is split over the GPU, and its indices on the device; made once a sweep.

A task is up to 16 query rows (tokens x heads of a group) of a segment, for each KV head. Segments
of few query rows and many positions are split by blocks of 256 positions too; their partials are
merged by the same arithmetic in the same order as inside a task.
"""

from __future__ import annotations

from dataclasses import dataclass

import cupy as cp
import numpy as np

from kernels.cuda.matrix import DeviceArray
from kernels.ops import ATTENTION_BLOCK, PAGE_TOKENS, Batch, Int32, KvShape

TILE_ROWS = 16
MAX_PARTIALS = 1 << 17  # rows, KV heads and blocks whose partials are in memory at once


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
class SweepPlan:
    """Device arrays of one sweep. pages: (num_segments, most pages of one) int32."""

    num_tokens: int
    positions: DeviceArray
    segments: DeviceArray
    pages: DeviceArray
    tasks: DeviceArray
    merges: DeviceArray
    num_partials: int


def plan_sweep(batch: Batch, shape: KvShape, num_heads: int) -> SweepPlan:
    tasks = attention_tasks(batch, shape, num_heads)
    begins, ends = batch.segments[:, 0], batch.segments[:, 1]
    most_pages = int(batch.positions[ends - 1].max()) // PAGE_TOKENS + 1
    upload = cp.asarray
    return SweepPlan(
        num_tokens=batch.num_tokens,
        positions=upload(batch.positions),
        segments=upload(np.repeat(np.arange(len(begins), dtype=np.int32), ends - begins)),
        pages=upload(np.ascontiguousarray(batch.page_table[batch.rows[begins], :most_pages])),
        tasks=upload(tasks.table),
        merges=upload(tasks.merges),
        num_partials=tasks.num_partials,
    )


def attention_tasks(batch: Batch, shape: KvShape, num_heads: int) -> Tasks:
    """The tasks of a sweep, those with the most positions first."""
    group = num_heads // shape.num_kv_heads
    begins, ends = batch.segments[:, 0], batch.segments[:, 1]
    tokens, rows = ends - begins, (ends - begins) * group
    blocks = batch.positions[ends - 1] // ATTENTION_BLOCK + 1
    split = (blocks > 1) & ((tokens == 1) | (rows <= TILE_ROWS))
    partials = np.where(split, rows * blocks * shape.num_kv_heads, 0)
    first_partial = np.cumsum(partials) - partials
    split &= first_partial + partials <= MAX_PARTIALS
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
