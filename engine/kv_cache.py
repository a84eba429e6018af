"""KV pages of rows: reservation, allocation, reuse of prompts, truncate and fork.

A row reserves pages beyond the full ones that the prefix tree shares with others: for what it has
and a little more at first, then one after the other (`grow`), and takes them as it is computed.
Those shared pages count once, however many rows hold them. So

    reserved by rows + full pages of the tree that rows hold + withdrawn <= pages of the pool

and every other page is free or idle in the tree, to be had for the asking: taking what is reserved,
or copying a shared page, cannot fail, and pages kept for reuse keep no row out.

Pages in host memory, which travel to the device in each sweep that needs them, are taken only where
no page of the device is free or idle. A row may have both.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.prefix_tree import (
    Match,
    Node,
    PrefixTree,
    is_full,
    nearest,
    tokens_in,
    tokens_of,
)
from kernels.ops import PAGE_TOKENS, KvPool, Ops

CACHED_PER_HELD = 2  # pages kept for prompts to come, for each that rows have held at once
MIN_CACHED, MIN_CACHED_NBYTES = 256, 64 << 20  # the larger; in pages, and in bytes of them
MIN_GAIN = 8  # tokens saved for which a row waits a sweep


def pages_for(num_tokens: int) -> int:
    """Pages that hold positions [0, num_tokens)."""
    return -(-num_tokens // PAGE_TOKENS)


@dataclass(slots=True)
class RowKv:
    """One row's share of the cache: `pages` hold positions [0, num_tokens).

    max_pages: that it may have so far, shared ones among them
    prompt: its pieces; empty once all of them are in the tree, or where none shall be
    parent: node of the last full page in the tree
    num_shared: leading pages that are full pages of the tree
    num_reused: tokens that the tree had
    """

    max_pages: int
    prompt: Sequence[bytes]
    parent: Node
    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_shared: int = 0
    num_reused: int = 0

    @property
    def num_reserved(self) -> int:
        return self.max_pages - self.num_shared

    @property
    def next_piece(self) -> bytes | None:
        """The first piece of the prompt that is not in the tree."""
        return self.prompt[self.num_shared] if self.num_shared < len(self.prompt) else None


class KvCache:
    """Pages of one pool, handed to rows.

    num_pages: those in host memory among them, which are the last `num_host_pages`
    pool: the backend's pages; None for accounting alone
    shares_parts: the first tokens of a page can be taken over by a copy of it; where they cannot,
        only full pages are shared
    """

    def __init__(
        self,
        num_pages: int,
        ops: Ops | None = None,
        pool: KvPool | None = None,
        *,
        num_host_pages: int = 0,
        shares_parts: bool = True,
    ) -> None:
        self.num_pages = num_pages
        self._num_device_pages = num_pages - num_host_pages
        self.pool = pool
        self._shares_parts = shares_parts
        self._ops = ops
        self._tree = PrefixTree(self._num_device_pages)
        self._free = list(range(self._num_device_pages - 1, -1, -1))
        # A heap: the fewer gaps between those in use, the fewer copies.
        self._free_in_host = list(range(self._num_device_pages, num_pages))
        self._references = [0] * num_pages  # by rows
        self._reserved = 0
        least = 0 if pool is None else MIN_CACHED_NBYTES // pool.page_nbytes
        self._most_cached = max(MIN_CACHED, least)
        self._withdrawn: list[int] = []

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free) + len(self._free_in_host)

    @property
    def num_cached(self) -> int:
        """Pages that no row holds, kept for prompts to come."""
        return self._tree.num_idle

    @property
    def num_unreserved(self) -> int:
        """Pages that no row on board may still claim, and that are in use."""
        return self.num_pages - self._reserved - self._tree.num_held - len(self._withdrawn)

    @property
    def num_withdrawn(self) -> int:
        """Pages out of use."""
        return len(self._withdrawn)

    def references(self, page: int) -> int:
        """Rows that hold a page."""
        return self._references[page]

    # ---- prompts ---------------------------------------------------------------------------

    def is_coming(self, prompt: Sequence[bytes]) -> bool:
        """Whether a prompt should wait for what rows on board are computing.

        That is: the whole of its next page, all that it lacks, or at least `MIN_GAIN` tokens more
        than the tree has.
        """
        match = self._find(prompt)
        promised = match.last.promised
        if not promised or not prompt:
            return False
        piece = prompt[len(match.nodes)]
        is_whole = nearest(promised, piece)[0] == piece
        if is_whole and is_full(match.rest):
            return True
        gain = nearest(promised, match.rest)[1] - match.num_common
        return self._shares_parts and gain >= (1 if is_whole else MIN_GAIN)

    def touch(self, prompt: Sequence[bytes]) -> None:
        """Keep what the tree has of a prompt longer than what nobody asks for."""
        match = self._find(prompt)
        self._tree.touch(match.source or match.last)

    def publish(self, row: RowKv) -> None:
        """Share the pieces of a row's prompt that have been computed.

        To be called when the positions that `extend` gave the row have been written. A full page
        that is in the tree already takes the place of the row's own.
        """
        self._take_promise_back(row)
        while (piece := row.next_piece) and self._is_written(row, piece):
            if is_full(piece):
                self._share_page(row, piece)
            else:
                self._add_tail(row, piece)
        self._promise_next(row)

    # ---- rows ------------------------------------------------------------------------------

    def open_row(
        self, max_tokens: int, prompt: Sequence[bytes] = (), *, spare: int = 0
    ) -> RowKv | None:
        """Reserve room for a row of `max_tokens`; None where the pool is too full now.

        spare: pages that must stay unreserved beside it
        prompt: the row begins with what the tree has of it, but for its last token at least, and
            gives what it computes of it to the tree; without one it has nothing to do with others
        """
        match = self._find(prompt)
        max_pages, num_shared = pages_for(max_tokens), len(match.nodes)
        woken = sum(not node.is_held for node in match.nodes)
        if max_pages - num_shared + woken + spare > self.num_unreserved:
            return None
        row = RowKv(max_pages, prompt, match.last, num_shared=num_shared)
        self._reserved += row.num_reserved
        for node in match.nodes:
            self._hold(node.page)
            row.pages.append(node.page)
        self._tree.touch(match.source or match.last)
        if match.source is not None:
            row.pages.append(self._copy(match.source.page))
        row.num_tokens = row.num_reused = match.num_tokens
        self._promise_next(row)
        return row

    def grow(self, row: RowKv) -> bool:
        """Reserve one more page for a row; False where the pool is too full now."""
        if self.num_unreserved == 0:
            return False
        row.max_pages += 1
        self._reserved += 1
        return True

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
        """Forget positions from `num_tokens` on, but none in full pages that the tree shares."""
        assert num_tokens <= row.num_tokens, (num_tokens, row.num_tokens)
        assert num_tokens >= row.num_shared * PAGE_TOKENS, (num_tokens, row.num_shared)
        self._drop_from(row, pages_for(num_tokens))
        row.num_tokens = num_tokens

    def fork(self, row: RowKv, max_tokens: int) -> RowKv | None:
        """Open a row that shares all of `row`'s pages; None where the pool is too full now.

        What it computes stays its own.
        """
        piece = row.next_piece
        assert piece is None or not self._is_written(row, piece), "publish before a fork"
        assert self._shares_parts or row.num_tokens % PAGE_TOKENS == 0, row.num_tokens
        max_pages = pages_for(max(max_tokens, row.num_tokens))
        if max_pages - row.num_shared > self.num_unreserved:
            return None
        child = RowKv(max_pages, (), row.parent, list(row.pages), row.num_tokens, row.num_shared)
        self._reserved += child.num_reserved
        for page in child.pages:
            self._references[page] += 1
        return child

    def close_row(self, row: RowKv) -> None:
        """Give back a row's pages and its reservation; the tree keeps those it has.

        It keeps no more than twice what rows have held at once: where prompts have nothing in
        common, a large pool must not fill up with them.
        """
        num_held = self.num_pages - self.num_free - self.num_cached - self.num_withdrawn
        self._most_cached = max(self._most_cached, CACHED_PER_HELD * num_held)
        self._take_promise_back(row)
        self._tree.touch(self._tail(row) or row.parent)
        self._reserved -= row.num_reserved
        self._drop_from(row, 0)
        row.max_pages = row.num_shared = row.num_tokens = 0
        while self.num_cached > self._most_cached:
            self._give_back(self._tree.evict())

    # ---- the pool --------------------------------------------------------------------------

    def withdraw(self, num_pages: int) -> None:
        """Take unreserved pages out of use and give their memory back."""
        assert num_pages <= self.num_unreserved, (num_pages, self.num_unreserved)
        pages = [self._take_unused() for _ in range(num_pages)]
        self._withdrawn += pages
        if self._ops is not None and self.pool is not None:
            self._ops.kv_release(self.pool, pages)

    def restore(self) -> None:
        """Put all withdrawn pages back in use; their memory is taken when they are written."""
        for page in self._withdrawn:
            self._give_back(page)
        self._withdrawn.clear()

    def _find(self, prompt: Sequence[bytes]) -> Match:
        match = self._tree.find(prompt, max(0, tokens_of(prompt) - 1))
        return match if self._shares_parts else replace(match, source=None, num_common=0)

    def _promise_next(self, row: RowKv) -> None:
        if (piece := row.next_piece) is not None:
            row.parent.promise(piece)

    def _take_promise_back(self, row: RowKv) -> None:
        if (piece := row.next_piece) is not None:
            row.parent.take_back(piece)

    def _is_written(self, row: RowKv, piece: bytes) -> bool:
        return row.num_shared * PAGE_TOKENS + tokens_in(piece) <= row.num_tokens

    def _share_page(self, row: RowKv, piece: bytes) -> None:
        own = row.pages[row.num_shared]
        node = row.parent.children.get(piece)
        if node is None:
            node = self._tree.insert(row.parent, piece, own)
        elif node.page != own:
            self._hold(node.page)
            row.pages[row.num_shared] = node.page
            self._drop(own)
        row.parent = node
        row.num_shared += 1
        self._reserved -= 1

    def _add_tail(self, row: RowKv, piece: bytes) -> None:
        """The row goes on writing into this page, after the tokens that the tree knows of."""
        if self._shares_parts and row.parent.closest(piece)[1] < tokens_in(piece):
            self._tree.insert(row.parent, piece, row.pages[row.num_shared])
        row.prompt = ()

    def _tail(self, row: RowKv) -> Node | None:
        """The node of the page after the full ones, where the tree has it."""
        after = row.pages[row.num_shared : row.num_shared + 1]
        return self._tree.at(after[0]) if after else None

    def _own_last_page(self, row: RowKv) -> None:
        filled = row.num_tokens % PAGE_TOKENS
        if filled == 0:
            return
        page = row.pages[-1]
        node = self._tree.at(page)
        known = node if node is not None and tokens_in(node.piece) > filled else None
        if self._references[page] > 1 or (known is not None and is_full(known.piece)):
            row.pages[-1] = self._copy(page)
            self._drop(page)
        elif known is not None:
            self._tree.remove(known)

    def _copy(self, source: int) -> int:
        # Where the source itself is the one page to be had, it holds the tokens already.
        page = self._take()
        if page != source and self._ops is not None and self.pool is not None:
            self._ops.kv_copy(self.pool, source, page)
        return page

    def _take(self) -> int:
        page = self._take_unused()
        self._references[page] = 1
        return page

    def _take_unused(self) -> int:
        if self._free:
            return self._free.pop()
        page = self._tree.evict_of(far=False)
        if page is not None:
            return page
        return heapq.heappop(self._free_in_host) if self._free_in_host else self._tree.evict()

    def _give_back(self, page: int) -> None:
        if page < self._num_device_pages:
            self._free.append(page)
        else:
            heapq.heappush(self._free_in_host, page)

    def _hold(self, page: int) -> None:
        node = self._tree.at(page)
        if node is not None and self._references[page] == 0:
            self._tree.hold(node)
        self._references[page] += 1

    def _drop_from(self, row: RowKv, index: int) -> None:
        for page in row.pages[index:]:
            self._drop(page)
        del row.pages[index:]

    def _drop(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page]:
            return
        node = self._tree.at(page)
        if node is None:
            self._give_back(page)
        else:
            self._tree.let_go(node)
