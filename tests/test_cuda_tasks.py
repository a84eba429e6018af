"""Attention tasks of the CUDA backend, run in NumPy: each row sees each of its blocks once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cuda import sharing, tasks
from kernels.cuda.sharing import NOBODY, SHARED_ROWS, Sharing, shared_blocks
from kernels.cuda.tasks import TaskMemory, Tasks, attention_tasks, rows_that_share
from kernels.ops import ATTENTION_BLOCK, PAGE_TOKENS, Batch, KvShape
from tests.cpu_helpers import segments_batch

LENGTH = 4  # of keys and values
BLOCK_PAGES = ATTENTION_BLOCK // PAGE_TOKENS
Partial = tuple[float, float, np.ndarray]
Spans = list[tuple[int, int]]  # of each row: positions [begin, end) of the sweep


def shape_of(num_kv_heads: int) -> KvShape:
    return KvShape(num_layers=1, num_kv_heads=num_kv_heads, key_length=LENGTH, value_length=LENGTH)


def batch_of(spans: Spans, shared_pages: list[int], source: list[int]) -> Batch:
    """Rows that each begin with the first pages of an earlier row."""
    segments = [(row, *span) for row, span in enumerate(spans)]
    batch = segments_batch(segments, [end for _, end in spans], np.random.default_rng(1))
    table = batch.page_table
    for row, (count, other) in enumerate(zip(shared_pages, source, strict=True)):
        table[row, :count] = table[other, :count]
    return batch


def decoding(positions: list[int], shared_pages: int) -> Batch:
    """Rows of one token, of which all begin with the same pages."""
    spans = [(position, position + 1) for position in positions]
    return batch_of(spans, [shared_pages] * len(spans), [0] * len(spans))


def all_that_share(batch: Batch) -> Sharing:
    return shared_blocks(batch, batch.segments[:, 1] - batch.segments[:, 0] == 1)


@dataclass(frozen=True)
class Numbers:
    """q: (tokens, heads, length); keys, values: (num_pages, KV heads, 32, length)"""

    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, batch: Batch, num_heads: int, num_kv_heads: int) -> Numbers:
        rng = np.random.default_rng(2)
        pages = (int(batch.page_table.max()) + 1, num_kv_heads, PAGE_TOKENS, LENGTH)
        return cls(
            rng.standard_normal((batch.num_tokens, num_heads, LENGTH)),
            rng.standard_normal(pages),
            rng.standard_normal(pages),
        )

    def block(self, pages: np.ndarray, kv_head: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        some = pages[block * BLOCK_PAGES : (block + 1) * BLOCK_PAGES]
        shape = (-1, LENGTH)
        keys, values = self.keys[some, kv_head], self.values[some, kv_head]
        return keys.reshape(shape), values.reshape(shape)

    def partial(
        self, pages: np.ndarray, token: int, head: int, kv_head: int, block: int, position: int
    ) -> Partial:
        """(m, l, o) of one query over a block's positions up to its own."""
        keys, values = self.block(pages, kv_head, block)
        seen = min(position + 1 - block * ATTENTION_BLOCK, ATTENTION_BLOCK)
        scores = keys[:seen] @ self.q[token, head]
        weights = np.exp(scores - scores.max())
        return scores.max(), weights.sum(), weights @ values[:seen]


def merged(parts: list[Partial]) -> np.ndarray:
    most, total, sums = -np.inf, 0.0, np.zeros(LENGTH)
    for m, weight, o in parts:
        top = max(most, m)
        old, new = np.exp(most - top), np.exp(m - top)
        most, total, sums = top, total * old + weight * new, sums * old + o * new
    return sums / total


class Runner:
    """Runs tasks as the kernels do, and fails where anything is written twice or read unwritten."""

    def __init__(self, batch: Batch, numbers: Numbers, num_kv_heads: int) -> None:
        self.batch, self.numbers, self.num_kv_heads = batch, numbers, num_kv_heads
        self.group = numbers.q.shape[1] // num_kv_heads
        self.out = np.full(numbers.q.shape, np.nan)
        self.slots: dict[int, Partial] = {}

    def run(self, made: Tasks) -> np.ndarray:
        for part in made.rounds:
            self.slots.clear()  # the next round's take their place
            for task in made.shared[slice(*part.shared)]:
                self.run_shared(made, *task)
            for task in made.table[slice(*part.tasks)]:
                self.run_own(*task)
            for merge in made.merges[slice(*part.merges)]:
                self.merge(*merge)
        assert not np.isnan(self.out).any()
        return self.out

    def pages(self, segment: int) -> np.ndarray:
        return self.batch.page_table[self.batch.rows[self.batch.segments[segment, 0]]]

    def leave(self, slot: int, partial: Partial) -> None:
        assert slot not in self.slots
        assert slot < tasks.most_partials(LENGTH)
        self.slots[slot] = partial

    def run_shared(self, made: Tasks, segment: int, first: int, count: int, block: int) -> None:
        assert 0 < count <= SHARED_ROWS
        for at in range(first, first + count):
            token, first_partial, blocks = made.members[at // self.group]
            assert (block + 1) * ATTENTION_BLOCK <= self.batch.positions[token]
            for kv_head in range(self.num_kv_heads):
                number = at % self.group * self.num_kv_heads + kv_head
                head = kv_head * self.group + at % self.group
                partial = self.numbers.partial(
                    self.pages(segment), token, head, kv_head, block, 1 << 30
                )
                self.leave(first_partial + number * blocks + block, partial)

    def run_own(
        self, segment: int, token: int, position: int, first: int, count: int, begin: int, end: int,
        partial: int,
    ) -> None:  # fmt: skip
        last = position + (first + count - 1) // self.group
        for row in range(first, first + count):
            of_row = position + row // self.group
            for kv_head in range(self.num_kv_heads):
                head = kv_head * self.group + row % self.group
                parts = [
                    self.numbers.partial(
                        self.pages(segment), token + row // self.group, head, kv_head, block, of_row
                    )
                    for block in range(begin, min(end, of_row // ATTENTION_BLOCK + 1))
                ]
                if partial < 0:
                    self.put(token + row // self.group, head, parts)
                elif parts:
                    number = row * self.num_kv_heads + kv_head
                    slot = partial + number * (last // ATTENTION_BLOCK + 1) + begin
                    self.leave(slot, parts[0])

    def put(self, token: int, head: int, parts: list[Partial]) -> None:
        assert np.isnan(self.out[token, head]).all()
        self.out[token, head] = merged(parts)

    def merge(self, token: int, row: int, first: int, blocks: int) -> None:
        for kv_head in range(self.num_kv_heads):
            slots = range(first + kv_head * blocks, first + (kv_head + 1) * blocks)
            parts = [self.slots[slot] for slot in slots if slot in self.slots]
            self.put(token, kv_head * self.group + row, parts)


def reference(batch: Batch, numbers: Numbers, num_kv_heads: int) -> np.ndarray:
    """Softmax over all positions up to each token's own."""
    out = np.empty_like(numbers.q)
    group = out.shape[1] // num_kv_heads
    for token, (row, position) in enumerate(zip(batch.rows, batch.positions, strict=True)):
        pages = batch.page_table[row, : position // PAGE_TOKENS + 1]
        for head in range(out.shape[1]):
            keys, values = (
                each[pages, head // group].reshape(-1, LENGTH)[: position + 1]
                for each in (numbers.keys, numbers.values)
            )
            weights = np.exp(keys @ numbers.q[token, head])
            out[token, head] = weights @ values / weights.sum()
    return out


def outputs(batch: Batch, shared: Sharing, num_heads: int, num_kv_heads: int) -> np.ndarray:
    numbers = Numbers.of(batch, num_heads, num_kv_heads)
    made = attention_tasks(batch, shape_of(num_kv_heads), num_heads, shared)
    return Runner(batch, numbers, num_kv_heads).run(made)


@st.composite
def sweeps(draw: st.DrawFn) -> Batch:
    """Rows that each begin as an earlier one does for some pages; most decode, some are prompts."""
    spans: Spans = []
    counts, source = [], []
    for row in range(draw(st.integers(1, 9))):
        other = draw(st.integers(0, max(row - 1, 0)))
        most = spans[other][0] // PAGE_TOKENS if row else 0
        count = draw(st.sampled_from([most, most, draw(st.integers(0, most))]))
        begin = count * PAGE_TOKENS + draw(st.integers(0, 700))
        spans.append((begin, begin + draw(st.sampled_from([1, 1, 1, 1, 2, 40]))))
        counts.append(count)
        source.append(other)
    return batch_of(spans, counts, source)


HEADS = [(1, 1), (2, 2), (3, 1), (4, 1), (8, 1), (16, 2), (40, 1)]


@settings(max_examples=60, deadline=None)
@given(sweeps(), st.sampled_from(HEADS), st.sampled_from([32 << 20, 12_000]))
def test_each_row_sees_each_of_its_blocks_once_with_shared_pages_and_without(
    batch: Batch, heads: tuple[int, int], partials_nbytes: int
) -> None:
    """Also where memory holds the partials of a row or two alone; not a bit changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "PARTIALS_NBYTES", partials_nbytes)
        patch.setattr(sharing, "LEAST_SAVED", 1)
        shared = rows_that_share(batch, shape_of(heads[1]), heads[0])
        out = outputs(batch, shared, *heads)
        alone = outputs(batch, NOBODY, *heads)
    assert out.tobytes() == alone.tobytes()
    expected = reference(batch, Numbers.of(batch, *heads), heads[1])
    np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-9)


@given(sweeps())
def test_rows_share_the_whole_blocks_that_lie_before_both_of_their_tokens(batch: Batch) -> None:
    shared = all_that_share(batch)
    for place, segment in enumerate(shared.segments):
        others = [other for other in range(len(batch.segments)) if other != segment]
        counts = [blocks_in_common(batch, segment, other) for other in others]
        assert shared.num_blocks[place] == max(counts) > 0
    one_token = np.flatnonzero(batch.segments[:, 1] - batch.segments[:, 0] == 1)
    for segment in set(one_token) - set(shared.segments):
        assert all(
            blocks_in_common(batch, segment, other) == 0 for other in one_token if other != segment
        )


def blocks_in_common(batch: Batch, one: int, other: int) -> int:
    tokens = batch.segments[[one, other], 0]
    if (batch.segments[[one, other], 1] - tokens > 1).any():
        return 0
    before = int(batch.positions[tokens].min()) // ATTENTION_BLOCK * BLOCK_PAGES
    tables = batch.page_table[batch.rows[tokens], :before]
    return int(np.logical_and.accumulate(tables[0] == tables[1]).sum()) // BLOCK_PAGES


@pytest.mark.parametrize("group", [1, 3, 4, 8, 16, 40])
@pytest.mark.parametrize("num_rows", [2, 5, 33])
def test_a_block_is_read_once_for_as_many_query_rows_as_a_task_has(
    num_rows: int, group: int
) -> None:
    prefix, num_kv_heads = 3 * ATTENTION_BLOCK, 2
    batch = decoding([prefix + 40] * num_rows, prefix // PAGE_TOKENS)
    shape, num_heads = shape_of(num_kv_heads), group * num_kv_heads
    made = attention_tasks(batch, shape, num_heads, all_that_share(batch))
    alone = attention_tasks(batch, shape, num_heads, NOBODY)
    pieces = -(-group // 16)
    assert len(made.shared) == 3 * -(-num_rows * group // SHARED_ROWS)
    assert len(made.table) == num_rows * pieces
    assert len(made.members) == num_rows
    pages = len(made.shared) * BLOCK_PAGES + num_rows * pieces * 2
    assert made.pages_read(group, num_kv_heads) == num_kv_heads * pages
    all_pages = num_rows * pieces * (3 * BLOCK_PAGES + 2)
    assert alone.pages_read(group, num_kv_heads) == num_kv_heads * all_pages


def test_a_prefix_that_branches_is_shared_by_fewer_rows_from_there_on() -> None:
    """Eight rows share two blocks, then four and three of them go on alike for two and one more."""
    positions = [5 * ATTENTION_BLOCK] * 8
    batch = decoding(positions, 2 * BLOCK_PAGES)
    batch.page_table[1:4, : 4 * BLOCK_PAGES] = batch.page_table[0, : 4 * BLOCK_PAGES]
    batch.page_table[5:7, : 3 * BLOCK_PAGES] = batch.page_table[4, : 3 * BLOCK_PAGES]
    shared = all_that_share(batch)
    assert dict(zip(shared.segments.tolist(), shared.num_blocks.tolist(), strict=True)) == {
        0: 4, 1: 4, 2: 4, 3: 4, 4: 3, 5: 3, 6: 3, 7: 2
    }  # fmt: skip
    made = sharing.tiles(shared, 8)
    rows_of = {block: sorted(made[made[:, 3] == block, 2].tolist()) for block in range(5)}
    assert rows_of == {0: [32, 32], 1: [32, 32], 2: [24, 32], 3: [32], 4: []}


def test_little_is_not_worth_another_launch() -> None:
    """Sixteen rows save 12 tasks for each block and KV head: 480 with five, 576 with six."""
    shape = KvShape(num_layers=80, num_kv_heads=8, key_length=128, value_length=128)
    for blocks, pays in ((5, False), (6, True)):
        batch = decoding([blocks * ATTENTION_BLOCK] * 16, blocks * BLOCK_PAGES)
        assert (len(rows_that_share(batch, shape, 64).segments) > 0) is pays


def test_a_thousand_rows_share_in_rounds_that_their_partials_fit_in() -> None:
    shape = KvShape(num_layers=80, num_kv_heads=8, key_length=128, value_length=128)
    batch = decoding([1520 + row for row in range(120)] * 9, 1500 // PAGE_TOKENS)
    made = TaskMemory().tasks_of(batch, shape, 64)
    most = tasks.most_partials(128)
    assert most * (4 * 128 + 8) <= tasks.PARTIALS_NBYTES
    assert len(made.rounds) == 8
    assert made.rounds[-1].merges[1] == len(made.merges) == 1080 * 8
    assert made.rounds[-1].tasks[1] == len(made.table)
    assert made.rounds[-1].shared[1] == len(made.shared)
    for part in made.rounds:
        first, blocks = made.merges[slice(*part.merges), 2:].T
        assert (first + 8 * blocks).max() <= most
        assert part.tasks[1] > part.tasks[0]
    # Five blocks of the six or seven are read for four rows at once, of 1,080 in eight rounds.
    assert 5 * 270 <= len(made.shared) <= 5 * 278


def test_tasks_are_made_anew_when_pages_are_shared_otherwise() -> None:
    shape = KvShape(num_layers=1, num_kv_heads=8, key_length=16, value_length=16)
    together = decoding([2000] * 60, 1900 // PAGE_TOKENS)
    moved = replace(together, positions=together.positions + 1)
    table = together.page_table.copy()
    table[7, 0] = table.max() + 1
    one_left = replace(moved, page_table=table)
    memory = TaskMemory()
    for batch in (together, moved, one_left, together):
        made, expected = memory.tasks_of(batch, shape, 64), TaskMemory().tasks_of(batch, shape, 64)
        for name in ("table", "shared", "members", "merges"):
            assert np.array_equal(getattr(made, name), getattr(expected, name)), name
        assert made.rounds == expected.rounds
    assert len(memory.tasks_of(one_left, shape, 64).members) == 59


def test_tasks_of_the_same_blocks_are_kept() -> None:
    calls: list[Any] = []
    shape = KvShape(num_layers=1, num_kv_heads=8, key_length=16, value_length=16)
    batch, memory = decoding([2000] * 60, 1900 // PAGE_TOKENS), TaskMemory()
    with pytest.MonkeyPatch.context() as patch:
        make = attention_tasks
        patch.setattr(tasks, "attention_tasks", lambda *a: calls.append(a) or make(*a))
        for step in range(40):
            moved = replace(batch, positions=batch.positions + step)
            made = memory.tasks_of(moved, shape, 64)
            assert (made.table[:, 2] == 2000 + step).all()
    assert len(calls) == 1
