"""Rows that give their pages back go on later with the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.engine import Engine
from tests.test_prefix_reuse import (
    Rows,
    engine_with,
    mixed_rows,
    page_nbytes,
    request,
    run,
    some_tokens,
)


def run_with_preemptions(engine: Engine, seed: int) -> tuple[Rows, int]:
    """All rows, some taken off board before about every other sweep; how many that were."""
    rng, rows, taken = np.random.default_rng(seed), Rows(), 0
    while engine.has_work:
        if rng.integers(2) == 0:
            taken += len(engine.preempt(int(rng.integers(1, 20))))
        for row in engine.sweep():
            rows[row.row_index, row.sample_index] = row
    return rows, taken


@pytest.mark.parametrize("kv_type", ["f32", "f16", "int8"])
@pytest.mark.parametrize("settings", [{}, {"sweep_tokens": 37}, {"reuse_prefixes": False}], ids=str)
def test_a_preempted_row_ends_with_the_same_bytes(kv_type: str, settings: dict[str, Any]) -> None:
    """Case 21: text, tokens, log-probabilities and random draws."""
    with engine_with(kv_type=kv_type, **settings) as engine:
        undisturbed = run(engine, mixed_rows())
    with engine_with(kv_type=kv_type, **settings) as engine:
        for each in mixed_rows():
            engine.add(each)
        rows, taken = run_with_preemptions(engine, seed=3)
        assert engine.totals.num_preempted == taken > 20
    assert rows == undisturbed


def test_the_youngest_rows_leave_and_return_before_those_that_wait() -> None:
    with engine_with(kv_memory_nbytes=8 * page_nbytes()) as engine:
        for index in range(12):  # of a page each: 8 are on board, 4 wait
            engine.add(request(index, some_tokens(index, 10), max_tokens=20))
        engine.sweep()
        assert engine.preempt(3) == [(5, 0), (6, 0), (7, 0)]
        assert [index for index, _ in engine.rows_on_board()] == [0, 1, 2, 3, 4]
        assert engine.num_waiting == 4 + 3
        engine.sweep()
        assert [index for index, _ in engine.rows_on_board()] == list(range(8))
        assert len(run(engine)) == 12


def test_more_rows_than_are_on_board_cannot_leave() -> None:
    with engine_with() as engine:
        assert engine.preempt(5) == []
        engine.add(request(0, some_tokens(0, 10)))
        engine.sweep()
        assert engine.preempt(5) == [(0, 0)]
        (row,) = run(engine).values()
        assert row.completion_tokens == 4


def test_rows_that_may_be_long_share_the_cache_until_they_are() -> None:
    """Each may take 5 of 16 pages, so that 3 could be sure of theirs; most end on their first."""
    short = {"max_tokens": 5}
    long = [request(i, some_tokens(i, 10), max_tokens=150) for i in range(4)]
    limits = [request(10 + i, some_tokens(20 + i, 10), **short) for i in range(8)]
    with engine_with(kv_memory_nbytes=64 << 20) as engine:
        undisturbed = run(engine, [*long, *limits])
    with engine_with(kv_memory_nbytes=16 * page_nbytes()) as engine:
        for each in [*long, *limits]:
            engine.add(each)
        engine.sweep()
        on_board = engine.num_running
        rows = run(engine)
        assert on_board > 3
        assert engine.totals.num_preempted > 0
    assert rows == undisturbed


def test_a_row_that_fills_the_cache_alone_comes_to_its_end() -> None:
    with engine_with(kv_memory_nbytes=5 * page_nbytes()) as engine:
        rows = run(engine, [request(i, some_tokens(i, 10), max_tokens=150) for i in range(3)])
    assert [row.completion_tokens for row in rows.values()] == [150] * 3
