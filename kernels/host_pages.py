"""KV pages in host memory that a sweep reads and writes, and how their copies are cut."""

from __future__ import annotations

import numpy as np

from kernels.ops import PAGE_TOKENS, Batch, Int32, KvType

MOST_RUNS = 64  # copies into one layer's keys, or its values
MOST_GAP = 2  # pages that nobody needs, copied along rather than begin another copy


def pages_read(batch: Batch, first_page: int, kv_type: KvType) -> Int32:
    """Pages from `first_page` on, ascending, with positions that come before the batch's own.

    batch: of one sweep; kv_type: one of 8 bits reads closed pages alone
    Returns (num_pages,) int32, counted from `first_page`.
    """
    begins = batch.positions[batch.segments[:, 0]]
    return _chosen(batch, first_page, np.zeros_like(begins), _pages(begins, kv_type))


def pages_written(batch: Batch, first_page: int, kv_type: KvType) -> Int32:
    """The same of pages that the batch stores into; of 8 bits, of those that it closes."""
    begins = batch.positions[batch.segments[:, 0]]
    ends = batch.positions[batch.segments[:, 1] - 1] + 1
    return _chosen(batch, first_page, begins // PAGE_TOKENS, _pages(ends, kv_type))


def _pages(num_positions: Int32, kv_type: KvType) -> Int32:
    whole: Int32 = num_positions // PAGE_TOKENS
    return whole if kv_type == "int8" else -(-num_positions // PAGE_TOKENS)


def _chosen(batch: Batch, first_page: int, begins: Int32, ends: Int32) -> Int32:
    """Of each segment's row the pages [begin, end)."""
    numbers = np.arange(ends.max(initial=0))
    table = batch.page_table[batch.rows[batch.segments[:, 0]], : len(numbers)]
    pages = table[(numbers >= begins[:, None]) & (numbers < ends[:, None])]
    return np.unique(pages[pages >= first_page]) - first_page


def runs_of(pages: Int32) -> Int32:
    """Ranges [begin, end) that hold the pages, at most `MOST_RUNS`, and as little else as may be.

    pages: (num_pages,) int32, ascending
    Returns (num_runs, 2) int32.
    """
    if len(pages) == 0:
        return np.empty((0, 2), np.int32)
    gaps = np.diff(pages) - 1
    widest = np.argsort(-gaps, kind="stable")[: MOST_RUNS - 1]
    cuts = np.sort(widest[gaps[widest] > MOST_GAP])
    begins = pages[np.concatenate([[0], cuts + 1])]
    ends = pages[np.concatenate([cuts, [len(pages) - 1]])] + 1
    return np.stack([begins, ends], axis=1).astype(np.int32)
