"""Pages under reuse: long random walks of rows that come, grow, fail, fork and go.

A page is modelled as the tokens that led to each of its positions, so any mistake in sharing,
copying or evicting shows as a position that holds another row's past.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from engine.kv_cache import MIN_GAIN, KvCache, RowKv, pages_for
from engine.prefix_tree import Node, is_full, pieces_of, tokens_in
from kernels.ops import PAGE_TOKENS
from tests.test_prefix_tree import num_alike

NUM_OPERATIONS = 10_000
MAX_ROWS = 12


def pasts(tokens: list[int]) -> list[int]:
    """For each position, a number that stands for all tokens up to it."""
    out, past = [], 0
    for token in tokens:
        past = hash((past, token))
        out.append(past)
    return out


class Pages:
    """Page operations on plain lists."""

    def __init__(self, num_pages: int) -> None:
        self.content: list[list[int]] = [[0] * PAGE_TOKENS for _ in range(num_pages)]

    def kv_release(self, pool: object, pages: list[int]) -> None:
        for page in pages:
            self.content[page] = [0] * PAGE_TOKENS

    def kv_copy(self, pool: object, source: int, target: int) -> None:
        assert source != target
        self.content[target] = list(self.content[source])


@dataclass(eq=False)
class Row:
    """tokens: prompt and all that may ever follow it"""

    tokens: list[int]
    num_prompt: int
    kv: RowKv
    pasts: list[int] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.kv.num_tokens


class Walk:
    """A cache under random use, and everything it must never get wrong."""

    def __init__(
        self, seed: int, num_pages: int, *, shares_parts: bool, num_host_pages: int = 0
    ) -> None:
        self.shares_parts = shares_parts
        self.rng = np.random.default_rng(seed)
        self.pages = Pages(num_pages)
        self.cache = KvCache(
            num_pages,
            self.pages,  # type: ignore[arg-type]
            SimpleNamespace(page_nbytes=1 << 20),  # type: ignore[arg-type]
            num_host_pages=num_host_pages,
            shares_parts=shares_parts,
        )
        self.rows: list[Row] = []
        self.waiting: list[list[int]] = []
        self.beginnings = [self.random_tokens(150) for _ in range(4)]
        self.done: Counter[str] = Counter()

    def random_tokens(self, count: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, 3, count)]

    def step(self) -> None:
        actions = {
            self.arrive: 3, self.admit: 4, self.compute: 8, self.fail_sweep: 1, self.finish: 2,
            self.preempt: 1, self.fork: 1, self.truncate: 1, self.grow_all: 0.1, self.touch: 1,
            self.go_on: 2,
            self.withdraw: 0.3, self.restore: 0.3,
        }  # fmt: skip
        weights = np.array(list(actions.values()))
        action = list(actions)[self.rng.choice(len(actions), p=weights / weights.sum())]
        action()
        self.check()

    def any_row(self) -> Row | None:
        return self.rows[self.rng.integers(len(self.rows))] if self.rows else None

    # ---- what happens ------------------------------------------------------------------------

    def arrive(self) -> None:
        """A prompt: a cut of a beginning, and often an end of its own; now and then a twin."""
        if len(self.waiting) > MAX_ROWS:
            return
        if self.waiting and self.rng.random() < 0.2:
            self.waiting.append(self.waiting[-1])
            return
        beginning = self.beginnings[self.rng.integers(len(self.beginnings))]
        cut = int(self.rng.integers(0, len(beginning)))
        prompt = beginning[:cut] + self.random_tokens(int(self.rng.integers(0, 40)))
        self.waiting.append(prompt or [1])

    def admit(self) -> None:
        if not self.waiting or len(self.rows) == MAX_ROWS:
            return
        at = int(self.rng.integers(len(self.waiting)))
        prompt = self.waiting[at]
        pieces = pieces_of(np.asarray(prompt, np.int32))
        awaited = self.cache.is_coming(pieces)
        assert awaited == self.is_coming(prompt)
        if awaited:
            self.done["waited"] += 1
            return
        tokens = prompt + self.random_tokens(int(self.rng.integers(0, 40)))
        spare, unreserved = int(self.rng.integers(3)), self.cache.num_unreserved
        fits_unshared = pages_for(len(tokens)) + spare <= unreserved
        known = self.longest_known(prompt)
        kv = self.cache.open_row(len(tokens), pieces, spare=spare)
        if kv is None:
            assert not fits_unshared, "cached pages keep a row out"
            self.done["refused"] += 1
            return
        assert kv.num_reused == kv.num_tokens == known
        assert self.cache.num_unreserved >= spare
        self.done["shared a row in"] += not fits_unshared
        self.done["reused"] += known > 0
        self.waiting.pop(at)
        self.rows.append(Row(tokens, len(prompt), kv, pasts(tokens)))

    def write(self, row: Row, count: int, *, fails: bool = False) -> None:
        begin = row.kv.num_tokens
        self.cache.extend(row.kv, count)
        for position in range(begin, begin + count):
            page = row.kv.pages[position // PAGE_TOKENS]
            value = -1 if fails else row.pasts[position]
            self.pages.content[page][position % PAGE_TOKENS] = value
        if fails:
            self.cache.truncate(row.kv, begin)
        else:
            self.cache.publish(row.kv)

    def compute(self, *, fails: bool = False) -> None:
        row = self.any_row()
        if row is None:
            return
        prompt_left = row.num_prompt - row.kv.num_tokens
        most = prompt_left if prompt_left > 0 else min(1, row.num_left)
        if most:
            count = most if self.rng.random() < 0.4 else int(self.rng.integers(1, most + 1))
            self.write(row, count, fails=fails)

    def fail_sweep(self) -> None:
        self.compute(fails=True)

    def finish(self) -> None:
        row = self.any_row()
        if row is not None:
            self.cache.close_row(row.kv)
            self.rows.remove(row)

    def preempt(self) -> None:
        row = self.any_row()
        if row is not None:
            self.cache.close_row(row.kv)
            self.rows.remove(row)
            self.waiting.append(row.tokens[: row.num_prompt] or row.tokens)

    def go_on(self) -> None:
        """A row turns out to be longer."""
        row = self.any_row()
        if row is None:
            return
        tokens = row.tokens + self.random_tokens(int(self.rng.integers(1, 40)))
        while row.kv.max_pages < pages_for(len(tokens)):
            if not self.cache.grow(row.kv):
                assert self.cache.num_unreserved == 0
                self.done["stopped"] += 1
                return
        row.tokens, row.pasts = tokens, pasts(tokens)
        self.done["went on"] += 1

    def fork(self) -> None:
        row = self.any_row()
        if row is None or len(self.rows) == MAX_ROWS:
            return
        if row.kv.num_tokens % PAGE_TOKENS and not self.shares_parts:
            return
        tokens = row.tokens[: row.kv.num_tokens] + self.random_tokens(20)
        kv = self.cache.fork(row.kv, len(tokens))
        if kv is not None:
            self.rows.append(Row(tokens, 0, kv, pasts(tokens)))
            self.done["forked"] += 1

    def truncate(self) -> None:
        row = self.any_row()
        if row is not None:
            least = row.kv.num_shared * PAGE_TOKENS
            self.cache.truncate(row.kv, int(self.rng.integers(least, row.kv.num_tokens + 1)))

    def grow_all(self) -> None:
        """Every row to its end at once: the worst case that reservations are for."""
        for row in self.rows:
            if row.num_left:
                self.write(row, row.num_left)
        self.done["grew all"] += 1

    def touch(self) -> None:
        for prompt in self.waiting[:4]:
            self.cache.touch(pieces_of(np.asarray(prompt, np.int32)))

    def withdraw(self) -> None:
        self.cache.withdraw(int(self.rng.integers(0, self.cache.num_unreserved + 1)))
        self.done["withdrew"] += 1

    def restore(self) -> None:
        self.cache.restore()

    # ---- what must hold ----------------------------------------------------------------------

    def nodes(self) -> Iterator[tuple[list[int], Node]]:
        """All nodes of the tree with the tokens that lead to the end of each."""
        stack: list[tuple[list[int], Node]] = [([], self.cache._tree.root)]
        while stack:
            before, node = stack.pop()
            for child in node.children.values():
                tokens = before + np.frombuffer(child.piece, ">u4").tolist()
                stack.append((tokens, child))
                yield tokens, child

    def longest_known(self, prompt: list[int]) -> int:
        """What the tree has of a prompt, by comparing with every node."""
        common = (min(num_alike(tokens, prompt), len(prompt) - 1) for tokens, _ in self.nodes())
        most = max(common, default=0)
        return most if self.shares_parts else most // PAGE_TOKENS * PAGE_TOKENS

    def is_coming(self, prompt: list[int]) -> bool:
        """Whether a row on board is computing what this prompt goes on with, by comparing all."""
        full = [tokens for tokens, node in self.nodes() if is_full(node.piece)]
        begun = (len(t) for t in full if t == prompt[: len(t)] and len(t) < len(prompt))
        have, known = max(begun, default=0), self.longest_known(prompt)
        wanted = prompt[: have + PAGE_TOKENS]
        for row in self.rows:
            promised = row.tokens[: min(have + PAGE_TOKENS, row.num_prompt)]
            if not row.kv.prompt or row.kv.num_shared * PAGE_TOKENS != have:
                continue
            gain = min(num_alike(promised, prompt), len(prompt) - 1) - known
            if promised == wanted and have + PAGE_TOKENS < len(prompt):
                return True
            if self.shares_parts and gain >= (1 if promised == wanted else MIN_GAIN):
                return True
        return False

    def check(self) -> None:
        content = self.pages.content
        held: Counter[int] = Counter()
        for row in self.rows:
            kv = row.kv
            held.update(kv.pages)
            assert len(kv.pages) == pages_for(kv.num_tokens)
            for index, page in enumerate(kv.pages):
                begin = index * PAGE_TOKENS
                expected = row.pasts[begin : min(begin + PAGE_TOKENS, kv.num_tokens)]
                assert content[page][: len(expected)] == expected
        in_tree: dict[int, Node] = {}
        for tokens, node in self.nodes():
            assert node.page not in in_tree, "a page stands for two beginnings"
            in_tree[node.page] = node
            count = tokens_in(node.piece)
            assert content[node.page][:count] == pasts(tokens)[-count:]
            assert node.is_held == (held[node.page] > 0)
        self.check_counts(held, in_tree)

    def check_counts(self, held: Counter[int], in_tree: dict[int, Node]) -> None:
        cache = self.cache
        assert [cache.references(page) for page in range(cache.num_pages)] == [
            held[page] for page in range(cache.num_pages)
        ]
        unused = [*cache._free, *cache._free_in_host, *cache._withdrawn]
        used = held.keys() | in_tree.keys()
        assert sorted([*unused, *used]) == list(range(cache.num_pages)), "a page is lost, or twice"
        idle = in_tree.keys() - held.keys()
        assert cache.num_cached == len(idle)
        shared = sum(is_full(node.piece) for page, node in in_tree.items() if page in held)
        reserved = sum(row.kv.max_pages - row.kv.num_shared for row in self.rows)
        usable = cache.num_pages - cache.num_withdrawn
        assert cache.num_unreserved == usable - reserved - shared >= 0
        growth = sum(row.kv.max_pages - len(row.kv.pages) for row in self.rows)
        assert growth <= cache.num_free + cache.num_cached, "a row may find no page"


@pytest.mark.parametrize(
    ("seed", "num_pages", "num_host_pages"), [(0, 12, 0), (1, 24, 10), (7, 60, 20)]
)
@pytest.mark.parametrize("shares_parts", [True, False], ids=["parts", "whole-pages"])
def test_no_page_is_lost_or_shared_wrongly_and_every_row_finds_its_pages(
    seed: int, num_pages: int, num_host_pages: int, shares_parts: bool
) -> None:
    walk = Walk(seed, num_pages, shares_parts=shares_parts, num_host_pages=num_host_pages)
    for _ in range(NUM_OPERATIONS):
        walk.step()
    assert all(walk.done[name] > 20 for name in ("waited", "reused", "forked", "withdrew"))
    assert all(walk.done[name] > 20 for name in ("refused", "shared a row in", "grew all"))
    assert all(walk.done[name] > 20 for name in ("went on", "stopped"))
    for row in walk.rows:
        walk.cache.close_row(row.kv)
    walk.rows.clear()
    walk.check()
    walk.cache.restore()
    assert walk.cache.num_free + walk.cache.num_cached == num_pages
    assert walk.cache.num_unreserved == num_pages
    assert not walk.cache._tree.root.promised


def test_the_beginning_that_was_used_last_stays_when_pages_run_out() -> None:
    """Two prompts fill the pool; one is asked for again; then a third needs room."""
    cache = KvCache(7)
    prompts = [pieces_of(np.full(3 * PAGE_TOKENS, token, np.int32)) for token in (1, 2, 3)]

    def run(prompt: tuple[bytes, ...]) -> int:
        row = cache.open_row(3 * PAGE_TOKENS, prompt)
        assert row is not None
        reused = row.num_reused
        cache.extend(row, 3 * PAGE_TOKENS - row.num_tokens)
        cache.publish(row)
        cache.close_row(row)
        return reused

    whole = 3 * PAGE_TOKENS - 1
    assert [run(prompts[index]) for index in (0, 1, 0, 2, 0)] == [0, 0, whole, 0, whole]
    assert run(prompts[1]) < whole
