"""A sweep's attention tasks (`kernels.cuda.tasks`) and indices on the device; made once a sweep.

The tables of a small sweep are padded with tasks that do nothing, so that the next one, a token
later, has as many.

With KV of 8 bits the pages that a sweep stores into are kept in halves (`HalfPages`), and those
that it fills are listed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from kernels.cuda.matrix import DeviceArray
from kernels.cuda.recordings import MAX_TOKENS
from kernels.cuda.tasks import Round, TaskMemory, Tasks
from kernels.cuda.uploads import Uploads
from kernels.ops import PAGE_TOKENS, Batch, Int32, KvShape


@dataclass(frozen=True, slots=True)
class RoundTables:
    """The tables of `Tasks` that run together."""

    shared: DeviceArray
    tasks: DeviceArray
    merges: DeviceArray


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
    host_tasks, members, rounds: of attention
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
    host_tasks: Tasks
    members: DeviceArray
    rounds: tuple[RoundTables, ...]
    half_pages: HalfPages | None


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
    tables, is_small = _tables(tasks), batch.num_tokens <= MAX_TOKENS
    if is_small:
        tables = [_padded(table) for table in tables]
        most_pages = min(_power_of_two(most_pages), batch.page_table.shape[1])
    arrays = [
        batch.token_ids,
        batch.logit_indices,
        batch.positions,
        np.repeat(np.arange(len(begins), dtype=np.int32), ends - begins),
        batch.page_table[batch.rows[begins], :most_pages],
        *tables,
    ]
    if in_halves:
        arrays += [homes_of(batch), closing_pages(batch, num_lines=batch.num_tokens * is_small)]
    there = uploads.bring(arrays)
    token_ids, logit_indices, positions, segments, pages = there[:5]
    shared, members, table, merges, *halves = there[5:]
    sizes = tuple(array.shape for array in arrays)
    return SweepPlan(
        batch=batch,
        serial=uploads.serial,
        key=(uploads.places_serial, sizes, tasks.rounds[:-1]) if is_small else None,
        num_tokens=batch.num_tokens,
        token_ids=token_ids,
        logit_indices=logit_indices,
        positions=positions,
        segments=segments,
        pages=pages,
        host_tasks=tasks,
        members=members,
        rounds=_round_tables(tasks.rounds, shared, table, merges),
        half_pages=_half_pages(batch, *halves) if in_halves else None,
    )


def _tables(tasks: Tasks) -> list[Int32]:
    return [tasks.shared, tasks.members, tasks.table, tasks.merges]


def _round_tables(rounds: tuple[Round, ...], *tables: DeviceArray) -> tuple[RoundTables, ...]:
    """tables: shared, tasks, merges; what they are padded with goes with the last round."""
    ends: list[tuple[int | None, ...]] = [
        (each.shared[1], each.tasks[1], each.merges[1]) for each in rounds[:-1]
    ]
    ends.append((None, None, None))
    begins = [(each.shared[0], each.tasks[0], each.merges[0]) for each in rounds]
    return tuple(
        RoundTables(*(table[b:e] for table, b, e in zip(tables, begin, end, strict=True)))
        for begin, end in zip(begins, ends, strict=True)
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
