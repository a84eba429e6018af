"""The tree of prompt prefixes: what it finds, and what goes first, against plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.prefix_tree import (
    Node,
    PrefixTree,
    is_full,
    num_common,
    pieces_of,
    tokens_in,
    tokens_of,
)
from kernels.ops import PAGE_TOKENS

# Few ids, and pieces that are alike for long, so that prompts have much in common.
token_lists = st.lists(st.sampled_from([0, 1, 255, 256, 65535, 151_000]), max_size=80)


def num_alike(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens with which both begin."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))


def ids(tokens: list[int]) -> np.ndarray:
    return np.asarray(tokens, np.int32)


def piece(tokens: list[int]) -> bytes:
    (one,) = pieces_of(ids(tokens))
    return one


@given(token_lists)
def test_pieces_are_the_prompt_in_pages(tokens: list[int]) -> None:
    pieces = pieces_of(ids(tokens))
    assert tokens_of(pieces) == len(tokens)
    assert all(tokens_in(each) == PAGE_TOKENS for each in pieces[:-1])
    assert np.frombuffer(b"".join(pieces), ">u4").tolist() == tokens


@given(token_lists, token_lists)
def test_common_tokens_are_counted_exactly(a: list[int], b: list[int]) -> None:
    a, b = a[:PAGE_TOKENS], b[:PAGE_TOKENS]
    common = num_alike(a, b)
    x, y = (pieces_of(ids(tokens)) for tokens in (a, b))
    assert num_common(x[0] if x else b"", y[0] if y else b"") == common


@given(st.lists(token_lists, max_size=12), token_lists)
def test_the_child_that_begins_most_alike_is_found(
    children: list[list[int]], wanted: list[int]
) -> None:
    tree, pages = PrefixTree(), iter(range(100))
    for tokens in children:
        one = tokens[:PAGE_TOKENS]
        if one and piece(one) not in tree.root.children:
            tree.insert(tree.root, piece(one), next(pages))
    rest = wanted[:PAGE_TOKENS]
    common = [num_alike(tokens[:PAGE_TOKENS], rest) for tokens in children]
    child, count = tree.root.closest(piece(rest) if rest else b"")
    assert count == max(common, default=0)
    if child is not None:
        assert num_common(child.piece, piece(rest)) == count


def test_a_prompt_is_found_to_the_token_and_never_whole() -> None:
    tree = PrefixTree()
    prompt = list(range(2 * PAGE_TOKENS + 10))
    parent = tree.root
    for page, one in enumerate(pieces_of(ids(prompt))):
        parent = tree.insert(parent, one, page)
    for tokens, full, common in [
        (prompt, 2, 9),
        ([*prompt, 7, 7], 2, 10),
        (prompt[:70] + [7] * 50, 2, 6),
        (prompt[: 2 * PAGE_TOKENS], 1, PAGE_TOKENS - 1),
        ([*prompt[:40], 7], 1, 8),
        ([7, *prompt], 0, 0),
        (prompt[:1], 0, 0),
    ]:
        pieces = pieces_of(ids(tokens))
        match = tree.find(pieces, len(tokens) - 1)
        assert (len(match.nodes), match.num_common) == (full, common)
        assert match.num_tokens == full * PAGE_TOKENS + common


def test_promises_are_counted_by_row() -> None:
    node, one, other = Node(None, b"", -1), piece([1, 2]), piece([1])
    for each in (one, other, one):
        node.promise(each)
    node.take_back(one)
    assert node.promised == [other, one]
    node.take_back(one)
    assert node.promised == [other]


@dataclass(slots=True)
class Entry:
    """A node as a plain list knows it."""

    node: Node
    parent: int | None
    last_used: int


class ListedTree:
    """The same tree beside a list of entries that is searched from end to end."""

    def __init__(self) -> None:
        self.tree = PrefixTree()
        self.entries: dict[int, Entry] = {}
        self.clock = self.next_page = 0

    def path(self, page: int) -> list[int]:
        pages: list[int] = []
        at: int | None = page
        while at is not None:
            pages.append(at)
            at = self.entries[at].parent
        return pages

    def leaves(self) -> list[int]:
        parents = {entry.parent for entry in self.entries.values()}
        idle = [page for page, entry in self.entries.items() if not entry.node.is_held]
        return [page for page in idle if page not in parents]

    def touch(self, page: int) -> None:
        self.clock += 1
        self.tree.touch(self.entries[page].node)
        for each in self.path(page):
            self.entries[each].last_used = self.clock

    def set_held(self, pages: list[int], held: bool) -> None:
        for page in pages:
            node = self.entries[page].node
            if node.is_held != held:
                (self.tree.hold if held else self.tree.let_go)(node)

    def add(self, parent: int | None, tokens: list[int]) -> None:
        if parent is not None:
            self.set_held(self.path(parent), True)
        above = self.tree.root if parent is None else self.entries[parent].node
        if piece(tokens) not in above.children:
            node = self.tree.insert(above, piece(tokens), self.next_page)
            self.entries[self.next_page] = Entry(node, parent, 0)
            self.touch(self.next_page)
            self.next_page += 1

    def evict(self) -> None:
        leaves = self.leaves()
        if not leaves:
            with pytest.raises(IndexError):
                self.tree.evict()
            return
        oldest = min(leaves, key=lambda page: self.entries[page].last_used)
        assert self.tree.evict() == oldest
        del self.entries[oldest]

    def let_go_of_all_but(self, pages: list[int]) -> None:
        kept = {above for page in pages for above in self.path(page)}
        self.set_held([page for page in self.entries if page not in kept], False)

    def check(self) -> None:
        held = [entry.node for entry in self.entries.values() if entry.node.is_held]
        assert len(self.tree) == len(self.entries)
        assert self.tree.num_idle == len(self.entries) - len(held)
        assert self.tree.num_held == sum(is_full(node.piece) for node in held)
        assert len(self.tree._leaving) <= 4 * len(self.entries) + PAGE_TOKENS + 1


@pytest.mark.parametrize("seed", range(3))
def test_the_idle_leaf_that_was_unused_for_longest_goes_first(seed: int) -> None:
    rng = np.random.default_rng(seed)
    listed = ListedTree()
    for _ in range(4000):
        pages = list(listed.entries)
        page = int(rng.choice(pages)) if pages else None
        action = rng.choice(["add", "add", "touch", "touch", "let go", "evict"])
        if action == "add" and len(pages) < 40:
            full = [entry for entry in pages if is_full(listed.entries[entry].node.piece)]
            parent = int(rng.choice(full)) if full and rng.random() < 0.8 else None
            length = PAGE_TOKENS if rng.random() < 0.7 else int(rng.integers(1, PAGE_TOKENS))
            listed.add(parent, [int(rng.integers(0, 4))] * length)
        elif action == "touch" and page is not None:
            listed.touch(page)
        elif action == "let go":
            listed.let_go_of_all_but([] if page is None or rng.random() < 0.3 else [page])
        else:
            listed.evict()
        listed.check()
