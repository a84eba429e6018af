"""KV pages of rows: reservation, allocation, sharing by reference count, truncate and fork.

A row reserves the pages of its maximal length when it is admitted and takes them as it grows.
Every row counts with its full reservation, shared pages or not, so the distinct pages in use
never pass the pool and growing, or copying a shared page, cannot fail once a row is on board.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kernels.ops import PAGE_TOKENS, KvPool, Ops


def pages_for(num_tokens: int) -> int:
    """Pages that hold positions [0, num_tokens)."""
    return -(-num_tokens // PAGE_TOKENS)


@dataclass(slots=True)
class RowKv:
    """One row's share of the cache: `pages` hold positions [0, num_tokens)."""

    max_pages: int
    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0


class KvCache:
    """Pages of one pool, handed to rows.

    pool: the backend's pages; None for accounting alone
    """

    def __init__(self, num_pages: int, ops: Ops | None = None, pool: KvPool | None = None) -> None:
        self.num_pages = num_pages
        self.pool = pool
        self._ops = ops
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._reserved = 0
        self._withdrawn: list[int] = []

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_unreserved(self) -> int:
        """Pages that no row on board may still claim, and that are in use."""
        return self.num_pages - self._reserved - len(self._withdrawn)

    @property
    def num_withdrawn(self) -> int:
        """Pages out of use."""
        return len(self._withdrawn)

    def references(self, page: int) -> int:
        return self._references[page]

    def open_row(self, max_tokens: int) -> RowKv | None:
        """Reserve room for a row of `max_tokens`; None where the pool is too full now."""
        max_pages = pages_for(max_tokens)
        if max_pages > self.num_unreserved:
            return None
        self._reserved += max_pages
        return RowKv(max_pages=max_pages)

    def extend(self, row: RowKv, num_tokens: int) -> None:
        """Make positions [row.num_tokens, row.num_tokens + num_tokens) writable.

        A partly filled page that other rows share is copied first.
        """
        end = row.num_tokens + num_tokens
        num_pages = pages_for(end)
        assert num_pages <= row.max_pages, (num_pages, row.max_pages)
        self._own_last_page(row)
        row.pages += [self._take() for _ in range(num_pages - len(row.pages))]
        row.num_tokens = end

    def truncate(self, row: RowKv, num_tokens: int) -> None:
        """Forget positions from `num_tokens` on."""
        assert 0 <= num_tokens <= row.num_tokens, (num_tokens, row.num_tokens)
        keep = pages_for(num_tokens)
        for page in row.pages[keep:]:
            self._drop(page)
        del row.pages[keep:]
        row.num_tokens = num_tokens

    def fork(self, row: RowKv, max_tokens: int) -> RowKv | None:
        """Open a row that shares all of `row`'s pages; None where the pool is too full now."""
        child = self.open_row(max(max_tokens, row.num_tokens))
        if child is None:
            return None
        for page in row.pages:
            self._references[page] += 1
        child.pages = list(row.pages)
        child.num_tokens = row.num_tokens
        return child

    def close_row(self, row: RowKv) -> None:
        """Give back a row's pages and its reservation."""
        self.truncate(row, 0)
        self._reserved -= row.max_pages
        row.max_pages = 0

    def withdraw(self, num_pages: int) -> None:
        """Take unreserved pages out of use and give their memory back."""
        assert num_pages <= self.num_unreserved, (num_pages, self.num_unreserved)
        pages = [self._free.pop() for _ in range(num_pages)]
        self._withdrawn += pages
        if self._ops is not None and self.pool is not None:
            self._ops.kv_release(self.pool, pages)

    def restore(self) -> None:
        """Put all withdrawn pages back in use; their memory is taken when they are written."""
        self._free += self._withdrawn
        self._withdrawn.clear()

    def _own_last_page(self, row: RowKv) -> None:
        if row.num_tokens % PAGE_TOKENS == 0 or self._references[row.pages[-1]] == 1:
            return
        shared = row.pages[-1]
        own = self._take()
        if self._ops is not None and self.pool is not None:
            self._ops.kv_copy(self.pool, shared, own)
        row.pages[-1] = own
        self._drop(shared)

    def _take(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)
