"""Rows that are on board for too long end alone, between two sweeps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from engine import Engine, Request, RowError, SamplingParams
from jobs.row_clock import RowClock
from tests.runner_helpers import MODEL, SMALL_ENGINE


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(MODEL, SMALL_ENGINE) as engine:
        yield engine


def request(row_index: int, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(row_index=row_index, token_ids=np.arange(5, 9, dtype=np.int32), params=params)


def test_a_row_counts_from_when_it_is_first_on_board() -> None:
    times = iter([100.0, 104.0, 106.0, 111.0])
    clock = RowClock(5.0, clock=lambda: next(times))
    assert list(clock.late_rows([(1, 0)])) == []
    assert list(clock.late_rows([(1, 0), (2, 0)])) == []
    (((key, error)),) = clock.late_rows([(1, 0), (2, 0)])
    assert (key, error.code) == ((1, 0), "timeout")
    assert "on board for 6.0 s, --row-timeout is 5 s" in str(error)
    # Row 1 left; the row that now has its place counts anew.
    assert [key for key, _ in clock.late_rows([(1, 1), (2, 0)])] == [(2, 0)]


def test_without_a_limit_no_row_is_late() -> None:
    assert list(RowClock(None).late_rows([(1, 0)])) == []


def test_a_cancelled_row_leaves_the_others_as_they_are(engine: Engine) -> None:
    engine.add(request(0, 12))
    while engine.has_work:
        alone = engine.sweep()
    for row_index in (0, 1, 2):
        engine.add(request(row_index, 12 if row_index == 0 else 500))
    for _ in range(4):
        engine.sweep()
    assert sorted(engine.rows_on_board()) == [(0, 0), (1, 0), (2, 0)]
    for row_index in (1, 2):
        row = engine.cancel_row(row_index, 0, RowError("timeout", "too long"))
        assert (row.row_index, row.status, row.error_code) == (row_index, "error", "timeout")
        assert (row.prompt_tokens, row.error_message) == (4, "too long")
    assert engine.rows_on_board() == [(0, 0)]
    while engine.has_work:
        beside_others = engine.sweep()
    assert beside_others == alone
    with pytest.raises(KeyError, match="row 1 sample 0 is not on board"):
        engine.cancel_row(1, 0, RowError("timeout", "too long"))
