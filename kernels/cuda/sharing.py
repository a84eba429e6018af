"""Which decoding rows of a sweep go through the pages that they begin with together, and how.

Rows share whole blocks of 256 positions, those before the block of their own token. In an order
that puts those next to each other which share the most, the rows that share a block follow each
other; their query rows, that is heads of a group, are cut into tasks of `SHARED_ROWS`.

A task leaves a partial for each of its query rows and KV heads, where the row's other tasks leave
theirs. Partials take memory: where it does not hold those of all such rows, they take turns in
rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kernels.ops import ATTENTION_BLOCK, PAGE_TOKENS, Batch, Int32
from kernels.prefixes import prefix_order

TILE_ROWS = 16  # query rows of a task for one segment
SHARED_ROWS = 32  # of one for several
LEAST_SAVED = 512  # tasks, over all KV heads, for which one more launch in each layer pays
_BLOCK_PAGES = ATTENTION_BLOCK // PAGE_TOKENS

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Rows that share blocks, in such an order.

    segments: (n,) theirs, of one token each
    common: (n,) leading blocks that each has in common with the one before it
    """

    segments: Int64
    common: Int64

    @property
    def num_blocks(self) -> Int64:
        """(n,) leading blocks that each has in common with another."""
        num_blocks: Int64 = np.maximum(self.common, np.append(self.common[1:], 0))
        return num_blocks

    def key(self) -> tuple[bytes, bytes]:
        return self.segments.tobytes(), self.common.tobytes()

    def cut(self, bounds: Int64) -> Sharing:
        """As if the rows from each of the bounds on had nothing in common with those before."""
        common = self.common.copy()
        common[bounds] = 0
        return Sharing(self.segments, common)


NOBODY = Sharing(np.empty(0, np.int64), np.empty(0, np.int64))


def shared_blocks(batch: Batch, may_share: npt.NDArray[np.bool_]) -> Sharing:
    """Rows of one token that have blocks in common.

    may_share: (num_segments,) which are asked about
    """
    begins = batch.segments[:, 0]
    num_blocks = batch.positions[begins] // ATTENTION_BLOCK
    asked = np.flatnonzero(may_share & (num_blocks > 0))
    if len(asked) < 2:
        return NOBODY
    num_pages = num_blocks[asked] * _BLOCK_PAGES
    order, common_pages = prefix_order(batch.page_table, batch.rows[begins[asked]], num_pages)
    all_rows = Sharing(asked[order], common_pages // _BLOCK_PAGES)
    shares = all_rows.num_blocks > 0
    return Sharing(all_rows.segments[shares], all_rows.common[shares])


def tiles(sharing: Sharing, group: int) -> Int32:
    """The tasks of rows that share, (num_tasks, 4): place in `Sharing` of the first row that they
    are of, first query row over all of its rows, query rows, block.
    """
    num_blocks = sharing.num_blocks
    levels = np.unique(np.append(sharing.common, 0)).tolist()
    parts = [np.empty((0, 4), np.int64)]
    for begin, end in pairwise(levels):
        # Between two levels the same rows go together.
        is_start = (sharing.common <= begin) & (num_blocks > begin)
        starts = np.flatnonzero(is_start)
        goes_on = num_blocks > begin
        sizes = np.add.reduceat(goes_on, starts, dtype=np.int64) * group
        parts.append(_cut(starts, sizes, group, begin, end))
    return np.concatenate(parts).astype(np.int32)


def _cut(starts: Int64, sizes: Int64, group: int, begin: int, end: int) -> Int64:
    """Tasks of runs of `sizes` query rows from the places `starts` on, for blocks [begin, end)."""
    counts = -(-sizes // SHARED_ROWS)
    run = np.repeat(np.arange(len(starts)), counts)
    inside = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = inside * SHARED_ROWS
    table = [starts[run], starts[run] * group + first, np.minimum(SHARED_ROWS, sizes[run] - first)]
    blocks = np.arange(begin, end)
    return np.concatenate(
        [np.tile(np.stack(table, axis=1), (len(blocks), 1)), np.repeat(blocks, len(run))[:, None]],
        axis=1,
    )


def saved_tasks(sharing: Sharing, group: int) -> int:
    """Of each KV head: how many fewer there are than if every row were on its own."""
    alone = int(sharing.num_blocks.sum()) * -(-group // TILE_ROWS)
    return alone - len(tiles(sharing, group))


def rounds_of(sizes: Int64, used: int, most: int) -> tuple[Int64, Int64]:
    """Partials one behind the other, as many at a time as there is memory for.

    sizes: (n,) partials of each, at most `most`; used: by others in the first round

    Returns the round of each and its first partial in it.
    """
    rounds, firsts, number, at = [], [], 0, used
    for size in sizes.tolist():
        if at + size > most:
            number, at = number + 1, 0
        rounds.append(number)
        firsts.append(at)
        at += size
    return np.array(rounds, np.int64), np.array(firsts, np.int64)
