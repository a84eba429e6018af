"""KV pages in host memory: which travel in a sweep, how they are copied, and what rows see."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import EngineConfig
from engine.engine import Engine
from kernels.host_pages import MOST_GAP, MOST_RUNS, pages_read, pages_written, runs_of
from kernels.ops import PAGE_TOKENS, Batch
from tests import golden
from tests.cpu_helpers import segments_batch
from tests.test_preemption import run_with_preemptions
from tests.test_prefix_reuse import POOL, Rows, mixed_rows, run

spans = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 100)).map(lambda at: (at[0], sum(at))),
    min_size=1,
    max_size=8,
)


def batch_of(rows: list[tuple[int, int]]) -> Batch:
    """A segment [begin, end) of each row, in pages that are shuffled."""
    segments = [(row, *span) for row, span in enumerate(rows)]
    return segments_batch(segments, [end for _, end in rows], np.random.default_rng(1))


@given(spans, st.integers(0, 40))
def test_what_comes_was_stored_before_and_what_goes_back_is_stored_now(
    rows: list[tuple[int, int]], first_page: int
) -> None:
    batch = batch_of(rows)
    read: dict[str, set[int]] = {"f16": set(), "int8": set()}
    written: dict[str, set[int]] = {"f16": set(), "int8": set()}
    for row, (begin, end) in enumerate(rows):
        for number, page in enumerate(batch.page_table[row]):
            first, last = number * PAGE_TOKENS, (number + 1) * PAGE_TOKENS
            if page < first_page:
                continue
            place = int(page) - first_page
            if first < begin:
                read["f16"].add(place)
            if last <= begin:
                read["int8"].add(place)
            if first < end and last > begin:
                written["f16"].add(place)
            if begin < last <= end:
                written["int8"].add(place)
    for kv_type in ("f16", "int8"):
        assert pages_read(batch, first_page, kv_type).tolist() == sorted(read[kv_type])  # type: ignore[arg-type]
        assert pages_written(batch, first_page, kv_type).tolist() == sorted(written[kv_type])  # type: ignore[arg-type]


@given(st.sets(st.integers(0, 3000), max_size=400))
def test_a_few_runs_hold_all_pages_and_no_gap_that_another_run_could_spare(pages: set[int]) -> None:
    runs = runs_of(np.array(sorted(pages), np.int32))
    assert len(runs) <= MOST_RUNS
    held = [page for begin, end in runs for page in range(begin, end)]
    assert held == sorted(set(held)) and pages <= set(held)
    assert all(begin in pages and end - 1 in pages for begin, end in runs)
    ordered = sorted(pages)
    gaps = [b - a - 1 for a, b in itertools.pairwise(ordered)]
    kept = [gap for a, gap in zip(ordered, gaps, strict=False) if a + 1 in held or gap == 0]
    cut = [gap for a, gap in zip(ordered, gaps, strict=False) if a + 1 not in held and gap]
    assert all(gap > MOST_GAP for gap in cut)
    if len(runs) < MOST_RUNS:
        assert all(gap <= MOST_GAP for gap in kept)
    elif cut:
        assert max(kept, default=0) <= min(cut)


def with_host_pages(ops: Any, num_pages: int, num_host_pages: int, **settings: Any) -> Engine:
    """A golden model whose KV pool is in two tiers. ops: None makes the CPU's"""
    config = EngineConfig(kv_memory_nbytes=POOL, **settings)
    path = golden.load("llama-q4_k_m").model
    with Engine(path, config, ops=ops) as engine:
        plan = replace(engine.plan, kv_pages=num_pages, host_kv_pages=num_host_pages)
    return Engine(path, config, ops=ops, plan=plan)


def check_rows_do_not_see_where_their_pages_are(ops: Any, kv_type: str, **settings: Any) -> Engine:
    """Rows in both tiers, some preempted, with beginnings in common: bytes as in one tier."""
    seen: list[Rows] = []
    for pages in ((400, 0), (9, 391)):
        engine = with_host_pages(ops, *pages, kv_type=kv_type, **settings)
        with engine:
            seen.append(run(engine, mixed_rows()))
            for each in mixed_rows():
                engine.add(each)
            seen.append(run_with_preemptions(engine, seed=3)[0])
    assert all(rows == seen[0] for rows in seen)
    return engine


@pytest.mark.parametrize("kv_type", ["f32", "f16", "int8"])
def test_rows_do_not_see_where_their_pages_are(kv_type: str) -> None:
    check_rows_do_not_see_where_their_pages_are(None, kv_type)
