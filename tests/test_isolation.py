"""Which rows run again after a loss: fewer each time, until the bad ones are alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jobs.isolation import MAX_LONE_LOSSES, Isolation, RowLoss
from jobs.job_run import shards_of

CRASH = RowLoss("worker_crashed", "it died")


def run_all(num_rows: int, on_board: int, bad: set[int]) -> tuple[dict[int, str], list[int]]:
    """Run rows as the runner does, an engine dying with each bad row.

    Returns the rows that failed, and the number on board at each loss.
    """
    isolation = Isolation()
    todo, failed, losses = set(range(num_rows)), {}, []
    while todo:
        rows = isolation.rows or sorted(todo)
        board = rows[: isolation.max_rows or on_board]
        given_up = [row for row in board if row in isolation.failed]
        for row in given_up:
            failed[row] = isolation.failed[row].reason
        alive = [row for row in board if row not in given_up]
        if bad & set(alive):
            losses.append(len(alive))
            isolation.accuse(alive, CRASH)
            continue
        todo -= set(board)
        isolation.settle(board, num_ok=len(alive))
    assert isolation.rows == []
    assert not isolation.failed
    return failed, losses


@given(
    num_rows=st.integers(1, 80),
    on_board=st.integers(1, 40),
    bad=st.sets(st.integers(0, 79), max_size=4),
)
def test_exactly_the_bad_rows_fail_each_after_three_losses_alone(
    num_rows: int, on_board: int, bad: set[int]
) -> None:
    bad = {row for row in bad if row < num_rows}
    failed, losses = run_all(num_rows, on_board, bad)
    assert set(failed) == bad
    assert Counter(losses)[1] == MAX_LONE_LOSSES * len(bad)
    assert all("3 times with this row alone" in reason for reason in failed.values())


def test_the_rows_on_board_are_halved_down_to_one() -> None:
    _, losses = run_all(num_rows=200, on_board=64, bad={70})
    assert losses == [64, 32, 16, 8, 4, 2, 1, 1, 1]


def test_an_exception_of_a_row_alone_is_final() -> None:
    isolation = Isolation()
    isolation.accuse((5, 6), RowLoss("internal_error", "ValueError: no"))
    assert (isolation.rows, isolation.max_rows, dict(isolation.failed)) == ([5, 6], 1, {})
    isolation.accuse((6,), RowLoss("internal_error", "ValueError: no"))
    assert isolation.rows == [6]
    assert isolation.failed[6].reason == "ValueError: no"


def test_rows_given_up_in_series_are_counted_until_one_succeeds() -> None:
    isolation = Isolation()
    for row in (1, 2):
        isolation.accuse((row,), RowLoss("internal_error", "no"))
        isolation.settle((row,), num_ok=0)
    assert isolation.num_failed_in_series == 2
    isolation.settle((3,), num_ok=1)
    assert isolation.num_failed_in_series == 0


@given(
    rows=st.sets(st.integers(0, 60)),
    shard_rows=st.integers(1, 20),
    samples=st.integers(1, 3),
    done=st.sets(st.integers(0, 182)),
)
def test_shards_of_rows_hold_what_is_left_of_these_rows_alone(
    rows: set[int], shard_rows: int, samples: int, done: set[int]
) -> None:
    def settled(begin: int, end: int) -> np.ndarray:
        return np.array(sorted(n for n in done if begin <= n // samples < end), np.int64)

    shards = list(shards_of(sorted(rows), shard_rows, samples, settled))
    ranges = [(range(s.begin * samples, s.end * samples), s.done) for s in shards]
    held = [number for outputs, others in ranges for number in outputs if number not in others]
    assert held == [n for n in range(61 * samples) if n // samples in rows and n not in done]
    assert len({s.number for s in shards}) == len(shards)
    assert all(s.end - s.begin <= shard_rows for s in shards)
    assert all(isinstance(number, int) for s in shards for number in (s.begin, s.end, *s.done))
