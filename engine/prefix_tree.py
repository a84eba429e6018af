"""Beginnings of prompts whose KV pages are at hand: a tree with one page in each node.

A node stands for the tokens of its page, after all those of its parents. Only a leaf may be
partly filled. Rows hold pages: who holds one holds those of all its parents too, so a node that
nobody holds is never above one that somebody does, and everything idle can go, leaves first.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kernels.ops import PAGE_TOKENS

_ID_NBYTES = 4
PIECE_NBYTES = PAGE_TOKENS * _ID_NBYTES


def pieces_of(token_ids: npt.NDArray[np.int32]) -> tuple[bytes, ...]:
    """A prompt cut into pages: what the tree knows it by. The last one may be short.

    Ids are big-endian, so that pieces are ordered as their tokens are.
    """
    data = token_ids.astype(">u4").tobytes()
    return tuple(data[at : at + PIECE_NBYTES] for at in range(0, len(data), PIECE_NBYTES))


def tokens_in(piece: bytes) -> int:
    return len(piece) // _ID_NBYTES


def is_full(piece: bytes) -> bool:
    return len(piece) == PIECE_NBYTES


def tokens_of(pieces: Sequence[bytes]) -> int:
    """Tokens of a whole prompt."""
    return (len(pieces) - 1) * PAGE_TOKENS + tokens_in(pieces[-1]) if pieces else 0


def num_common(a: bytes, b: bytes) -> int:
    """Tokens with which both pieces begin."""
    nbytes = min(len(a), len(b))
    differing = int.from_bytes(a[:nbytes]) ^ int.from_bytes(b[:nbytes])
    return (8 * nbytes - differing.bit_length()) // (8 * _ID_NBYTES)


def nearest(ordered: Sequence[bytes], piece: bytes) -> tuple[bytes, int]:
    """Of sorted pieces the one that begins most like `piece`, and with how many of its tokens."""
    at = bisect.bisect_left(ordered, piece)
    near = ordered[max(0, at - 1) : at + 1]  # no other has more in common
    best = max(near, key=lambda other: num_common(other, piece), default=b"")
    return best, num_common(best, piece)


@dataclass(slots=True, eq=False)
class Node:
    """One page of some prompts.

    piece: the ids of its valid tokens; what its page holds after them is anybody's
    is_held: by a row on board
    ordered: pieces of `children`, sorted
    promised: pieces that rows on board are computing to follow this one, each as often, sorted
    """

    parent: Node | None
    piece: bytes
    page: int
    is_held: bool = True
    last_used: int = 0
    children: dict[bytes, Node] = field(default_factory=dict)
    ordered: list[bytes] = field(default_factory=list)
    promised: list[bytes] = field(default_factory=list)

    @property
    def can_go(self) -> bool:
        return self.parent is not None and not (self.is_held or self.children)

    def closest(self, piece: bytes) -> tuple[Node | None, int]:
        """The child that begins most like `piece`, and with how many of its tokens."""
        best, count = nearest(self.ordered, piece)
        return (self.children[best], count) if count else (None, 0)

    def promise(self, piece: bytes) -> None:
        """A row on board is computing `piece`, to follow this."""
        bisect.insort(self.promised, piece)

    def take_back(self, piece: bytes) -> None:
        """One such row has computed it, or has left."""
        del self.promised[bisect.bisect_left(self.promised, piece)]


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree has of a prompt.

    nodes: full pages, from the first on
    last: the last of them, or the root
    rest: the piece after it, as far as it was asked for
    source, num_common: the page that goes on most like the prompt, and with how many tokens
    """

    nodes: list[Node]
    last: Node
    rest: bytes
    source: Node | None
    num_common: int

    @property
    def num_tokens(self) -> int:
        return len(self.nodes) * PAGE_TOKENS + self.num_common


class PrefixTree:
    """Which pages hold which beginnings of prompts; it neither takes nor frees pages.

    num_near: pages before this number are one tier, those from it on another; None: all are one
    num_idle: pages that no row holds
    num_held: full pages that rows hold
    """

    def __init__(self, num_near: int | None = None) -> None:
        self._num_near = num_near
        self.root = Node(None, b"", -1)
        self.num_idle = 0
        self.num_held = 0
        self._by_page: dict[int, Node] = {}
        self._clock = 0
        self._serial = itertools.count()
        # Heaps of leaves by last use, near ones and far ones; some are stale.
        self._leaving: tuple[list[_Leaf], list[_Leaf]] = ([], [])

    def __len__(self) -> int:
        return len(self._by_page)

    def at(self, page: int) -> Node | None:
        """The node of a page, where the tree has it."""
        return self._by_page.get(page)

    def find(self, pieces: Sequence[bytes], num_tokens: int) -> Match:
        """The longest beginning of a prompt that is there, at most `num_tokens` of it."""
        last, nodes = self.root, []
        for piece in pieces[: num_tokens // PAGE_TOKENS]:
            child = last.children.get(piece)
            if child is None:
                break
            nodes.append(child)
            last = child
        left = num_tokens - len(nodes) * PAGE_TOKENS
        rest = pieces[len(nodes)][: left * _ID_NBYTES] if left else b""
        source, count = last.closest(rest)
        return Match(nodes, last, rest, source, count)

    def insert(self, parent: Node, piece: bytes, page: int) -> Node:
        """Add a page that a row holds, with its parents."""
        assert parent.is_held and piece not in parent.children and page not in self._by_page
        node = Node(parent, piece, page)
        parent.children[piece] = node
        bisect.insort(parent.ordered, piece)
        self._by_page[page] = node
        self.num_held += is_full(node.piece)
        self.touch(node)
        return node

    def remove(self, node: Node) -> None:
        """Forget a leaf."""
        parent = node.parent
        assert parent is not None and not node.children and not node.promised
        del parent.children[node.piece]
        del parent.ordered[bisect.bisect_left(parent.ordered, node.piece)]
        del self._by_page[node.page]
        node.parent = None
        parent.last_used = max(parent.last_used, node.last_used)
        if node.is_held:
            self.num_held -= is_full(node.piece)
        else:
            self.num_idle -= 1
        self._may_leave(parent)

    def evict(self) -> int:
        """Forget the leaf that was unused for longest; returns its page.

        Raises IndexError: nothing is idle.
        """
        leaves = [leaf for heap in self._leaving if (leaf := _oldest(heap)) is not None]
        if not leaves:
            raise IndexError("no page is idle")
        return self._forget(min(leaves))

    def evict_of(self, *, far: bool) -> int | None:
        """The same among the pages of one tier; None where none of them can go."""
        leaf = _oldest(self._leaving[far])
        return None if leaf is None else self._forget(leaf)

    def _forget(self, leaf: _Leaf) -> int:
        _, _, node = leaf
        self.remove(node)
        return node.page

    def hold(self, node: Node) -> None:
        """A row holds the page now, and nobody did before."""
        assert not node.is_held
        node.is_held = True
        self.num_idle -= 1
        self.num_held += is_full(node.piece)

    def let_go(self, node: Node) -> None:
        """No row holds the page any more."""
        assert node.is_held
        node.is_held = False
        self.num_idle += 1
        self.num_held -= is_full(node.piece)
        self._may_leave(node)

    def touch(self, node: Node) -> None:
        """A node is used now, with its parents, which stay as long as it does."""
        self._clock += 1
        node.last_used = self._clock
        self._may_leave(node)

    def _may_leave(self, node: Node) -> None:
        if node.can_go:
            heapq.heappush(self._leaving[self._is_far(node)], self._leaf(node))
            if sum(map(len, self._leaving)) > 4 * len(self._by_page) + PAGE_TOKENS:
                self._forget_stale()

    def _is_far(self, node: Node) -> bool:
        return self._num_near is not None and node.page >= self._num_near

    def _leaf(self, node: Node) -> _Leaf:
        return node.last_used, next(self._serial), node

    def _forget_stale(self) -> None:
        self._leaving = ([], [])
        for node in self._by_page.values():
            if node.can_go:
                self._leaving[self._is_far(node)].append(self._leaf(node))
        for heap in self._leaving:
            heapq.heapify(heap)


_Leaf = tuple[int, int, Node]  # its last use, a number of its own, the node


def _oldest(heap: list[_Leaf]) -> _Leaf | None:
    """The leaf unused for longest; what is stale before it is dropped."""
    while heap:
        last_used, _, node = heap[0]
        if node.can_go and node.last_used == last_used:
            return heap[0]
        heapq.heappop(heap)
    return None
