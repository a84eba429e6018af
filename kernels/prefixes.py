"""Which rows begin with the same pages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.ops import Int32

Int64 = npt.NDArray[np.int64]


def prefix_order(page_table: Int32, rows: Int32, num_pages: Int32) -> tuple[Int64, Int64]:
    """An order that puts those next to each other which begin with the most of the same pages.

    page_table: (num_rows, max_pages) int32
    rows: (n,) int32, rows of the table
    num_pages: (n,) int32, leading pages of each that count

    Returns the order, (n,), and how many leading pages each has in common with the one before it
    in that order, (n,).
    """
    _, groups, sizes = np.unique(page_table[rows, 0], return_inverse=True, return_counts=True)
    is_sharing = (sizes[groups] > 1) & (num_pages > 0)
    sharing = np.flatnonzero(is_sharing)
    order = np.concatenate([np.flatnonzero(~is_sharing), sharing])
    common = np.zeros(len(rows), np.int64)
    if len(sharing) < 2:
        return order, common
    most = int(num_pages[sharing].max())
    pages = page_table[rows[sharing], :most]
    own = np.arange(most) >= num_pages[sharing, None]
    pages[own] = np.broadcast_to(-1 - sharing[:, None], pages.shape)[own]  # equal to no other's
    sorting = np.argsort(pages.view(f"V{pages.itemsize * most}")[:, 0], kind="stable")
    pages = pages[sorting]
    same = np.logical_and.accumulate(pages[1:] == pages[:-1], axis=1)
    order[-len(sharing) :] = sharing[sorting]
    common[len(common) - len(sharing) + 1 :] = same.sum(axis=1)
    return order, common
