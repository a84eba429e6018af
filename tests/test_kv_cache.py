"""Reservation, sharing and copy-on-write of KV pages, against a plain model of their contents."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_cache import MIN_CACHED, KvCache, RowKv, pages_for
from engine.prefix_tree import pieces_of
from kernels.ops import PAGE_TOKENS


class RecordingOps:
    """Page operations on plain lists: each page is PAGE_TOKENS values, stale at first."""

    def __init__(self, num_pages: int) -> None:
        self.pages: list[list[object]] = [["stale"] * PAGE_TOKENS for _ in range(num_pages)]

    def kv_release(self, pool: object, pages: list[int]) -> None:
        for page in pages:
            self.pages[page] = ["given back"] * PAGE_TOKENS

    def kv_copy(self, pool: object, source: int, target: int) -> None:
        self.pages[target] = list(self.pages[source])


@dataclass
class ModelRow:
    kv: RowKv
    max_tokens: int
    values: list[object] = field(default_factory=list)


class Harness:
    """Rows that write distinct values, so that a page shared by mistake shows."""

    def __init__(self, num_pages: int, num_host_pages: int = 0) -> None:
        self.ops = RecordingOps(num_pages)
        self.cache = KvCache(
            num_pages,
            self.ops,  # type: ignore[arg-type]
            SimpleNamespace(page_nbytes=1 << 20),  # type: ignore[arg-type]
            num_host_pages=num_host_pages,
        )
        self.rows: list[ModelRow] = []
        self.serial = 0
        self.withdrawn = 0

    def write(self, row: ModelRow, num_tokens: int) -> None:
        begin = row.kv.num_tokens
        self.cache.extend(row.kv, num_tokens)
        for position in range(begin, begin + num_tokens):
            self.serial += 1
            page = row.kv.pages[position // PAGE_TOKENS]
            self.ops.pages[page][position % PAGE_TOKENS] = self.serial
            row.values.append(self.serial)

    def check(self) -> None:
        held: dict[int, int] = {}
        for row in self.rows:
            assert len(row.kv.pages) == pages_for(row.kv.num_tokens)
            for page in row.kv.pages:
                held[page] = held.get(page, 0) + 1
            got = [
                self.ops.pages[row.kv.pages[i // PAGE_TOKENS]][i % PAGE_TOKENS]
                for i in range(row.kv.num_tokens)
            ]
            assert got == row.values
        for page in range(self.cache.num_pages):
            assert self.cache.references(page) == held.get(page, 0)
        usable = self.cache.num_pages - self.withdrawn
        assert self.cache.num_free == usable - len(held)
        reserved = sum(pages_for(row.max_tokens) for row in self.rows)
        assert self.cache.num_unreserved == usable - reserved


actions = st.tuples(
    st.sampled_from(["open", "extend", "truncate", "fork", "close", "withdraw", "restore"]),
    st.integers(0, 1 << 16),
    st.integers(0, 1 << 16),
)


def apply(harness: Harness, action: str, pick: int, size: int) -> None:
    if action == "open":
        max_tokens = 1 + size % (4 * PAGE_TOKENS)
        kv = harness.cache.open_row(max_tokens)
        if kv is not None:
            harness.rows.append(ModelRow(kv, max_tokens))
        return
    if action == "withdraw":
        count = size % (harness.cache.num_unreserved + 1)
        harness.cache.withdraw(count)
        harness.withdrawn += count
    elif action == "restore":
        harness.cache.restore()
        harness.withdrawn = 0
    if action in ("withdraw", "restore") or not harness.rows:
        return
    row = harness.rows[pick % len(harness.rows)]
    if action == "extend":
        harness.write(row, size % (row.max_tokens - row.kv.num_tokens + 1))
    elif action == "truncate":
        row.values = row.values[: size % (row.kv.num_tokens + 1)]
        harness.cache.truncate(row.kv, len(row.values))
    elif action == "fork":
        max_tokens = max(row.kv.num_tokens, 1 + size % (4 * PAGE_TOKENS))
        kv = harness.cache.fork(row.kv, max_tokens)
        if kv is not None:
            harness.rows.append(ModelRow(kv, max_tokens, list(row.values)))
    else:
        harness.cache.close_row(row.kv)
        harness.rows.remove(row)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 12), st.integers(0, 12), st.lists(actions, max_size=60))
def test_no_page_is_lost_or_shared_wrongly(
    num_pages: int, num_host_pages: int, steps: list[tuple[str, int, int]]
) -> None:
    harness = Harness(num_pages, min(num_pages, num_host_pages))
    for action, pick, size in steps:
        apply(harness, action, pick, size)
        harness.check()
    for row in list(harness.rows):
        harness.cache.close_row(row.kv)
    harness.cache.restore()
    assert harness.cache.num_free == harness.cache.num_unreserved == num_pages


def test_row_waits_when_reservations_fill_the_pool() -> None:
    cache = KvCache(4)
    first = cache.open_row(3 * PAGE_TOKENS)
    assert first is not None
    assert cache.open_row(2 * PAGE_TOKENS) is None
    assert cache.open_row(PAGE_TOKENS) is not None
    cache.close_row(first)
    assert cache.open_row(2 * PAGE_TOKENS) is not None


def test_fork_copies_the_partial_page_only_when_one_side_writes() -> None:
    harness = Harness(8)
    kv = harness.cache.open_row(64)
    assert kv is not None
    parent = ModelRow(kv, 64)
    harness.rows.append(parent)
    harness.write(parent, PAGE_TOKENS + 5)
    fork = harness.cache.fork(parent.kv, 64)
    assert fork is not None
    child = ModelRow(fork, 64, list(parent.values))
    harness.rows.append(child)
    assert child.kv.pages == parent.kv.pages
    harness.write(child, 1)
    assert child.kv.pages[0] == parent.kv.pages[0]
    assert child.kv.pages[1] != parent.kv.pages[1]
    harness.check()


def test_growing_past_the_reservation_is_caught() -> None:
    cache = KvCache(4)
    row = cache.open_row(PAGE_TOKENS)
    assert row is not None
    with pytest.raises(AssertionError):
        cache.extend(row, PAGE_TOKENS + 1)


def test_prompts_with_nothing_in_common_do_not_fill_the_pool() -> None:
    """Memory of a pool is taken as its pages are written: what nobody asks for again must go."""
    cache = KvCache(20_000)
    for number in range(3000):
        prompt = pieces_of(np.full(4 * PAGE_TOKENS + 1, number, np.int32))
        row = cache.open_row(5 * PAGE_TOKENS, prompt)
        assert row is not None
        cache.extend(row, 4 * PAGE_TOKENS + 1)
        cache.publish(row)
        cache.close_row(row)
    assert cache.num_cached == MIN_CACHED
    never_used = cache._free[: 20_000 - 2 * MIN_CACHED]
    assert never_used == list(range(19_999, 2 * MIN_CACHED - 1, -1))


def test_pages_in_host_memory_are_the_last_to_be_taken_and_the_lowest_first() -> None:
    cache = KvCache(8, num_host_pages=4)
    first, second = cache.open_row(3 * PAGE_TOKENS), cache.open_row(5 * PAGE_TOKENS)
    assert first is not None and second is not None
    cache.extend(first, 3 * PAGE_TOKENS)
    cache.extend(second, 4 * PAGE_TOKENS)
    assert (first.pages, second.pages) == ([0, 1, 2], [3, 4, 5, 6])
    cache.close_row(first)
    cache.extend(second, PAGE_TOKENS)
    assert second.pages[-1] < 3
    cache.close_row(second)
    third = cache.open_row(6 * PAGE_TOKENS)
    assert third is not None
    cache.extend(third, 6 * PAGE_TOKENS)
    assert sorted(third.pages[:4]) == [0, 1, 2, 3]
    assert third.pages[4:] == [4, 5]


def test_a_cached_page_of_the_device_goes_before_one_of_host_memory_is_taken() -> None:
    cache = KvCache(8, num_host_pages=4)
    prompt = pieces_of(np.arange(4 * PAGE_TOKENS, dtype=np.int32))
    row = cache.open_row(4 * PAGE_TOKENS, prompt)
    assert row is not None
    cache.extend(row, 4 * PAGE_TOKENS)
    cache.publish(row)
    cache.close_row(row)
    assert cache.num_cached == 4
    other = cache.open_row(6 * PAGE_TOKENS)
    assert other is not None
    cache.extend(other, 6 * PAGE_TOKENS)
    assert sorted(other.pages[:4]) == [0, 1, 2, 3]
    assert other.pages[4:] == [4, 5]
    assert cache.num_cached == 0
