"""Which row to run next: depth first over shared prompt prefixes, longest expected first.

Pure policy. Prompts make a tree whose edges are whole pages of tokens, the unit in which rows share
what is computed. A row that has come to the end of its shared pages is a leaf. Once a branch is
entered, all of its rows come out before any other's, those that are put in meanwhile too.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kernels.ops import PAGE_TOKENS

Item = TypeVar("Item")
TokenIds = npt.NDArray[np.int32]
# Smaller comes first: tokens still to make, negative; length of the prompt, negative; order of
# coming. The last is unique, so what it ranks is never compared.
Rank = tuple[float, int, int]


class _Node(Generic[Item]):
    """Rows whose prompts agree up to `end`; those before `begin` are the parent's.

    tokens: a prompt that runs through here
    num_items: in it and below
    best: the smallest rank that its parent knows of
    heap: what comes next: a row that ends here, or a child; a child may be there more than once
    """

    __slots__ = ("begin", "best", "children", "end", "heap", "num_items", "tokens")

    def __init__(self, tokens: TokenIds, begin: int, end: int, best: Rank) -> None:
        self.tokens = tokens
        self.begin = begin
        self.end = end
        self.best = best
        self.num_items = 0
        self.children: dict[bytes, _Node[Item]] = {}
        self.heap: list[tuple[Rank, _Node[Item] | None, Item | None]] = []

    @property
    def key(self) -> bytes:
        return _page(self.tokens, self.begin)


class PrefixQueue(Generic[Item]):
    """Rows that wait. Putting one in or taking one out costs its depth in the tree."""

    def __init__(self) -> None:
        self._root: _Node[Item] = _Node(np.empty(0, np.int32), 0, 0, (0.0, 0, 0))
        self._path = [self._root]
        self._counter: Iterator[int] = itertools.count()

    def __len__(self) -> int:
        return self._root.num_items

    def push(self, item: Item, token_ids: TokenIds, expected_tokens: float) -> None:
        """Put a row in.

        token_ids: (num_tokens,) int32, its prompt; not copied
        expected_tokens: how many it is expected to generate
        """
        rank = (-expected_tokens, -len(token_ids), next(self._counter))
        # The last token is always computed: it is not shared.
        end = (len(token_ids) - 1) // PAGE_TOKENS * PAGE_TOKENS
        node = self._root
        node.num_items += 1
        while node.end < end:
            key = _page(token_ids, node.end)
            child = node.children.get(key)
            if child is None:
                child = _Node(token_ids, node.end, end, rank)
                node.children[key] = child
                heapq.heappush(node.heap, (rank, child, None))
            else:
                self._split(child, _common_end(child, token_ids, end))
                if rank < child.best:
                    child.best = rank
                    heapq.heappush(node.heap, (rank, child, None))
            child.num_items += 1
            node = child
        heapq.heappush(node.heap, (rank, None, item))

    def pop(self) -> Item:
        """Take out the row that comes next. Raises IndexError: there is none."""
        if not self._root.num_items:
            raise IndexError("no row waits")
        while True:
            node = self._path[-1]
            if not node.num_items:
                self._path.pop()
                del self._path[-1].children[node.key]
                continue
            _, child, item = heapq.heappop(node.heap)
            if child is None:
                for passed in self._path:
                    passed.num_items -= 1
                assert item is not None
                return item
            if child.num_items:
                self._path.append(child)

    def _split(self, node: _Node[Item], at: int) -> None:
        """Make `node` end at `at`, with all that it held in one child."""
        if at == node.end:
            return
        lower: _Node[Item] = _Node(node.tokens, at, node.end, node.best)
        lower.num_items, lower.children, lower.heap = node.num_items, node.children, node.heap
        node.end, node.children, node.heap = at, {lower.key: lower}, [(node.best, lower, None)]
        if node in self._path:
            self._path.insert(self._path.index(node) + 1, lower)


def _page(tokens: TokenIds, begin: int) -> bytes:
    return tokens[begin : begin + PAGE_TOKENS].tobytes()


def _common_end(node: _Node[Item], tokens: TokenIds, end: int) -> int:
    """Where the whole pages end in which a prompt agrees with a node."""
    end = min(end, node.end)
    differs = np.flatnonzero(node.tokens[node.begin : end] != tokens[node.begin : end])
    if not len(differs):
        return end
    return node.begin + int(differs[0]) // PAGE_TOKENS * PAGE_TOKENS
