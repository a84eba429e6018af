"""How a sweep's tokens and attention are split over the workers; made once a sweep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels import prefixes
from kernels.cpu.attention import TASK_ROWS, piece_tokens
from kernels.cpu.pages import page_len
from kernels.ops import PAGE_TOKENS, Batch, Float32, Int32, KvShape

_TASK_COST = 4  # of starting and finishing a task, in pages of one query row
_PAGE_COST = 10  # of bringing a page from memory, in pages of one query row

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """num_tokens: of the sweep
    ranges: token range [begin, end) of each worker for token-wise operations
    pieces: (num_pieces, 3) int32: first token, token after the last, positions shared with the
        piece before
    tasks: each worker's attention tasks, (num_tasks, 3) int32: KV head, first piece, piece
        after the last
    scratch, visits: each worker's attention scratch
    pages_read: (num_workers,) int64, pages that attention has read, counted for each KV head

    For KV of 8 bits alone:
    closing: (num_closing,) int32, tokens that close their page
    page_of: (num_tokens,) int32, which of `new_pages` a token's page is; -1: its row's open page
    new_pages: (num_pages, num_kv_heads, page_len) uint16, halves of pages that begin and end here
    leaves_an_open_page: whether a segment begins inside a page and goes on in the next
    """

    num_tokens: int
    ranges: tuple[tuple[int, int], ...]
    pieces: Int32
    tasks: tuple[Int32, ...]
    scratch: tuple[Float32, ...]
    visits: tuple[Int64, ...]
    pages_read: Int64
    closing: Int32
    page_of: Int32
    new_pages: npt.NDArray[np.uint16]
    leaves_an_open_page: bool


@dataclass(frozen=True, slots=True)
class Scratch:
    """What sweeps share, as in `SweepPlan`; new_pages: flat, as many as the sweep has."""

    floats: tuple[Float32, ...]
    visits: tuple[Int64, ...]
    new_pages: npt.NDArray[np.uint16]


def token_range(num_tokens: int, worker: int, num_workers: int) -> tuple[int, int]:
    return num_tokens * worker // num_workers, num_tokens * (worker + 1) // num_workers


def first_positions(batch: Batch) -> Int32:
    """Position of each segment's first token."""
    return batch.positions[batch.segments[:, 0]]


def prefix_order(batch: Batch) -> tuple[Int64, Int64]:
    """The segments in an order that puts those next to each other which share most pages.

    Returns their order, and how many leading pages each has in common with the segment before it
    in that order: whole pages that lie before the tokens of both.
    """
    rows = batch.rows[batch.segments[:, 0]]
    return prefixes.prefix_order(batch.page_table, rows, first_positions(batch) // PAGE_TOKENS)


def attention_pieces(batch: Batch, group: int) -> Int32:
    """The sweep's pieces, (num_pieces, 3), those that share pages next to each other.

    None leaves a page.
    """
    order, common = prefix_order(batch)
    begins, ends = batch.segments[:, 0], batch.segments[:, 1]
    slots = batch.positions % PAGE_TOKENS
    is_start = slots % piece_tokens(group) == 0
    is_start[begins] = True
    begin = np.flatnonzero(is_start)
    end = np.append(begin[1:], batch.num_tokens)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    segment = np.searchsorted(ends, begin, side="right")
    moved = np.argsort(place[segment], kind="stable")
    begin, end, segment = begin[moved], end[moved], segment[moved]
    before = batch.positions[np.append(0, begin[:-1])] // PAGE_TOKENS  # the piece before
    is_first = begin == begins[segment]
    shared = np.where(is_first, common[place[segment]], before) * PAGE_TOKENS
    return np.stack([begin, end, shared], axis=1).astype(np.int32)


def task_bounds(pieces: Int32, group: int) -> Int64:
    """Where the tasks' pieces begin, and the end of the last.

    A task's pieces all share pages, and have `TASK_ROWS` query rows at most.
    """
    bounds, rows = [0], 0
    sizes = (pieces[:, 1] - pieces[:, 0]) * group
    for number, (size, shared) in enumerate(
        zip(sizes.tolist(), pieces[:, 2].tolist(), strict=True)
    ):
        if number and (shared == 0 or rows + size > TASK_ROWS):
            bounds.append(number)
            rows = 0
        rows += size
    return np.array([*bounds, len(pieces)], np.int64)


def num_new_pages(batch: Batch) -> Int64:
    """Of each segment: pages that end before its last one."""
    last = batch.positions[batch.segments[:, 1] - 1].astype(np.int64)
    return last // PAGE_TOKENS - first_positions(batch) // PAGE_TOKENS


def number_pages(batch: Batch) -> Int32:
    """Where the page of each token is kept in float16 while the sweep runs, (num_tokens,).

    The last page of a segment is kept where its row's open page is, marked -1; the others, which
    the sweep closes, are numbered.
    """
    counts = num_new_pages(batch)
    sizes = batch.segments[:, 1] - batch.segments[:, 0]
    pages = batch.positions // PAGE_TOKENS
    inside = pages - np.repeat(first_positions(batch) // PAGE_TOKENS, sizes)
    number = np.repeat(np.cumsum(counts) - counts, sizes) + inside
    number[inside == np.repeat(counts, sizes)] = -1
    return number.astype(np.int32)


def leaves_an_open_page(batch: Batch) -> bool:
    """Whether a segment begins inside a page and goes on in the next."""
    first = first_positions(batch)
    last = batch.positions[batch.segments[:, 1] - 1]
    return bool(((first % PAGE_TOKENS > 0) & (first // PAGE_TOKENS < last // PAGE_TOKENS)).any())


def attention_tasks(
    batch: Batch, pieces: Int32, num_kv_heads: int, group: int
) -> tuple[Int32, Int64]:
    """All tasks of a sweep and their costs; those that read the same pages follow each other.

    Returns tasks (num_tasks, 3) and costs (num_tasks,), in pages of one query row.
    """
    bounds = task_bounds(pieces, group)
    starts, stops = bounds[:-1], bounds[1:]
    counts = pieces[:, 1] - pieces[:, 0]
    pages = batch.positions[pieces[:, 1] - 1].astype(np.int64) // PAGE_TOKENS + 1
    shared = pieces[:, 2].astype(np.int64) // PAGE_TOKENS
    shared[starts] = 0
    work = counts * group * pages + _PAGE_COST * (pages - shared)
    costs = np.add.reduceat(work, starts) + _TASK_COST
    cluster = np.cumsum(pieces[starts, 2] == 0)
    cluster = np.tile(cluster, num_kv_heads)
    kv_head = np.repeat(np.arange(num_kv_heads), len(starts))
    order = np.lexsort((kv_head, cluster))
    tasks = np.stack([kv_head, np.tile(starts, num_kv_heads), np.tile(stops, num_kv_heads)], axis=1)
    return tasks[order].astype(np.int32), np.tile(costs, num_kv_heads)[order]


def split_by_cost(costs: Int64, num_workers: int) -> Int64:
    """Bounds (num_workers + 1,) of consecutive ranges of about equal cost."""
    done = np.cumsum(costs, dtype=np.int64)
    total = done[-1] if len(done) else 0
    bounds = np.searchsorted(done, total * np.arange(1, num_workers) / num_workers)
    return np.concatenate([[0], bounds, [len(costs)]])


def plan_sweep(batch: Batch, shape: KvShape, num_heads: int, scratch: Scratch) -> SweepPlan:
    """Plan for one worker per scratch array."""
    num_workers, group = len(scratch.floats), num_heads // shape.num_kv_heads
    pieces = attention_pieces(batch, group)
    tasks, costs = attention_tasks(batch, pieces, shape.num_kv_heads, group)
    bounds = split_by_cost(costs, num_workers)
    return SweepPlan(
        num_tokens=batch.num_tokens,
        ranges=tuple(token_range(batch.num_tokens, w, num_workers) for w in range(num_workers)),
        pieces=pieces,
        tasks=tuple(tasks[bounds[w] : bounds[w + 1]] for w in range(num_workers)),
        scratch=scratch.floats,
        visits=scratch.visits,
        pages_read=np.zeros(num_workers, np.int64),
        closing=np.flatnonzero(batch.positions % PAGE_TOKENS == PAGE_TOKENS - 1).astype(np.int32),
        page_of=number_pages(batch),
        new_pages=scratch.new_pages.reshape(-1, shape.num_kv_heads, page_len(shape)),
        leaves_an_open_page=leaves_an_open_page(batch),
    )
