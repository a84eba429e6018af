"""Rows that share the pages of a prefix: their bytes are those of rows with pages of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import CpuOps
from kernels.cpu.attention import TASK_ROWS
from kernels.cpu.plan import SweepPlan, prefix_order
from kernels.ops import PAGE_TOKENS, Batch
from tests.cpu_helpers import AttentionCase, attention_case, poisoned, segments_batch

Spans = list[tuple[int, int]]  # of each row: positions [begin, end) of the sweep


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, CpuOps]]:
    made = {workers: CpuOps(workers) for workers in (1, 2)}
    yield made
    for ops in made.values():
        ops.close()


def alike(case: AttentionCase, common: list[int], source: list[int]) -> AttentionCase:
    """The case with the first `common[row]` tokens of each row those of row `source[row]`."""
    qkv = [x.copy() for x in case.qkv]
    for row, (count, other) in enumerate(zip(common, source, strict=True)):
        qkv[row][:count] = qkv[other][:count]
    return AttentionCase(case.head, case.rope, qkv)


def tables(case: AttentionCase, common: list[int], source: list[int]) -> tuple[Any, Any]:
    """Page tables in which the whole pages of equal tokens are shared, and in which none is."""
    lengths = [len(x) for x in case.qkv]
    rng = np.random.default_rng(3)
    separate = segments_batch([(0, 0, 1)], lengths, rng).page_table
    shared = separate.copy()
    for row, (count, other) in enumerate(zip(common, source, strict=True)):
        shared[row, : count // PAGE_TOKENS] = shared[other, : count // PAGE_TOKENS]
    return shared, separate


def sweep(
    ops: CpuOps, case: AttentionCase, spans: Spans, table: Any, kv_type: Any
) -> tuple[bytes, SweepPlan]:
    """Store what lies before the spans, then attend: the output's bytes and the sweep's plan."""
    lengths, head = [len(x) for x in case.qkv], case.head
    pool = ops.kv_pool(
        case.shape, num_pages=int(table.max()) + 1, kv_type=kv_type, num_rows=len(lengths)
    )
    rows = range(len(spans))
    stored = [(row, 0, spans[row][0]) for row in rows if spans[row][0]]
    out, plan = poisoned(0, 0), None
    for segments in (stored, [(row, *spans[row]) for row in rows]):
        if not segments:
            continue
        batch = replace(segments_batch(segments, lengths), page_table=table)
        plan = ops.plan(batch, case.shape, head.num_heads)
        qkv = np.concatenate([case.qkv[row][begin:end] for row, begin, end in segments])
        q = poisoned(len(qkv), head.num_heads * head.key_length)
        out = poisoned(len(qkv), head.num_heads * head.value_length)

        def body(w: int, plan=plan, qkv=qkv, batch=batch, q=q, out=out) -> None:
            ops.rope_store(w, plan, qkv, head, case.rope, batch, pool, 1, q)
            ops.attention(w, plan, q, head, batch, pool, 1, out)

        ops.run(body)
    assert plan is not None
    return out.tobytes(), plan


def pages_read(plan: SweepPlan) -> int:
    return int(plan.pages_read.sum())


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize("prefix", [0, 31, 32, 255, 256, 257, 1000])
def test_sharing_changes_no_byte(
    teams: dict[int, CpuOps], prefix: int, kv_type: str, group: int
) -> None:
    """Decoding rows and pieces of prompts behind one prefix, and a row that has none of it."""
    tails = [(0, 1), (0, 1), (5, 6), (0, 40), (70, 71), (30, 290), (0, 1)]
    spans = [(prefix + begin, prefix + end) for begin, end in tails]
    rng = np.random.default_rng(prefix)
    case = attention_case(
        rng, [end for _, end in spans], num_heads=2 * group, num_kv_heads=2, key_length=32,
        value_length=32,
    )  # fmt: skip
    common = [prefix] * 6 + [0]
    case = alike(case, common, [0] * 7)
    shared, separate = tables(case, common, [0] * 7)
    expected, plan = sweep(teams[1], case, spans, separate, kv_type)
    for ops in teams.values():
        out, sharing = sweep(ops, case, spans, shared, kv_type)
        assert out == expected
        if prefix >= PAGE_TOKENS:
            assert pages_read(sharing) < pages_read(plan)
        else:
            assert pages_read(sharing) == pages_read(plan)


def test_a_shared_page_is_read_once_for_the_rows_of_a_task(teams: dict[int, CpuOps]) -> None:
    rows, prefix, group, num_kv_heads = 64, 1000, 3, 2
    common, spans = [prefix] * rows, [(prefix, prefix + 1)] * rows
    case = attention_case(
        np.random.default_rng(1), [prefix + 1] * rows, num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads, key_length=16, value_length=16,
    )  # fmt: skip
    case = alike(case, common, [0] * rows)
    shared, separate = tables(case, common, [0] * rows)
    expected, plan = sweep(teams[2], case, spans, separate, "f32")
    out, sharing = sweep(teams[2], case, spans, shared, "f32")
    tasks = -(-rows // (TASK_ROWS // group))
    whole, all_pages = prefix // PAGE_TOKENS, prefix // PAGE_TOKENS + 1
    assert out == expected
    assert pages_read(plan) == num_kv_heads * rows * all_pages
    assert pages_read(sharing) == num_kv_heads * (tasks * whole + rows * (all_pages - whole))


def test_pages_of_integers_are_shared_once_they_are_closed(teams: dict[int, CpuOps]) -> None:
    """Spans that begin inside a page end in it, as they must with KV of 8 bits."""
    prefix = 330
    tails = [(0, 1), (0, 1), (5, 22), (10, 22), (22, 100), (54, 55), (0, 1)]
    spans = [(prefix + begin, prefix + end) for begin, end in tails]
    case = attention_case(
        np.random.default_rng(4), [end for _, end in spans], num_heads=6, num_kv_heads=2,
        key_length=32, value_length=32,
    )  # fmt: skip
    common = [prefix] * 6 + [0]
    case = alike(case, common, [0] * 7)
    shared, separate = tables(case, common, [0] * 7)
    expected, plan = sweep(teams[1], case, spans, separate, "int8")
    for ops in teams.values():
        out, sharing = sweep(ops, case, spans, shared, "int8")
        assert out == expected
        assert pages_read(sharing) < pages_read(plan)


@st.composite
def groupings(draw: st.DrawFn) -> tuple[list[int], list[int], Spans]:
    """Rows that each begin as an earlier row does, for some tokens: (common, source, spans)."""
    common, source, spans = [0], [0], [(draw(st.integers(0, 600)), 0)]
    spans[0] = (spans[0][0], spans[0][0] + draw(st.integers(1, 40)))
    for row in range(1, draw(st.integers(2, 9))):
        other = draw(st.integers(0, row - 1))
        count = draw(st.integers(0, spans[other][0]))
        begin = count + draw(st.integers(0, 300))
        common.append(count)
        source.append(other)
        spans.append((begin, begin + draw(st.integers(1, 40))))
    return common, source, spans


@settings(max_examples=40)
@given(groupings(), st.sampled_from(["f32", "f16"]), st.sampled_from([(1, 1), (4, 2), (3, 1)]))
def test_any_tree_of_prefixes_changes_no_byte(
    teams: dict[int, CpuOps],
    grouping: tuple[list[int], list[int], Spans],
    kv_type: str,
    heads: tuple[int, int],
) -> None:
    common, source, spans = grouping
    case = attention_case(
        np.random.default_rng(2), [end for _, end in spans], num_heads=heads[0],
        num_kv_heads=heads[1], key_length=16, value_length=16,
    )  # fmt: skip
    case = alike(case, common, source)
    shared, separate = tables(case, common, source)
    expected, _ = sweep(teams[1], case, spans, separate, kv_type)
    out, _ = sweep(teams[2], case, spans, shared, kv_type)
    assert out == expected


def leading_pages(batch: Batch, one: int, other: int) -> int:
    """Pages that two segments have in common, all of whose positions lie before both."""
    rows = batch.rows[batch.segments[[one, other], 0]]
    before = int(batch.positions[batch.segments[[one, other], 0]].min()) // PAGE_TOKENS
    same = batch.page_table[rows[0], :before] == batch.page_table[rows[1], :before]
    return int(np.logical_and.accumulate(same).sum())


@given(groupings())
def test_each_segment_stands_beside_one_that_shares_most_pages_with_it(
    grouping: tuple[list[int], list[int], Spans],
) -> None:
    common, source, spans = grouping
    case = attention_case(np.random.default_rng(2), [end for _, end in spans], key_length=2)
    table, _ = tables(case, common, source)
    segments = [(row, begin, end) for row, (begin, end) in enumerate(spans)]
    lengths = [end for _, end in spans]
    batch = replace(segments_batch(segments, lengths), page_table=table)
    order, shared = prefix_order(batch)
    assert sorted(order) == list(range(len(spans)))
    for place, (segment, count) in enumerate(zip(order, shared, strict=True)):
        assert count == (leading_pages(batch, order[place - 1], segment) if place else 0)
        earlier = [leading_pages(batch, other, segment) for other in order[:place]]
        assert count == max(earlier, default=0)
