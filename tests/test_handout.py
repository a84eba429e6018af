"""How rows are shared out among engines: each output once, all busy to the end, pieces large."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.handout import outputs_to_give
from jobs.messages import WINDOW_OUTPUTS
from jobs.records import Shard
from jobs.shard_pool import ShardPool, rows_to_run, split_shard

REPORT_S = 1.0  # an engine tells what is finished once a second


def row_length(number: int, spread: float) -> float:
    """Of a row, in units of the mean."""
    return 1 + spread * ((number * 7919) % 11 / 5 - 1)


def share_out(
    num_rows: int, speeds: Sequence[float], on_board: int, row_s: float, spread: float = 0.0
) -> tuple[float, list[int], int]:
    """A job on engines that keep at most `on_board` rows on board, `row_s` / speed seconds each.

    spread: lengths of rows vary by this share, in turn
    Returns its seconds, the rows of each engine, and the number of pieces given out.
    """
    pool, left, now, pieces = num_rows, num_rows, 0.0, 0
    held = [0] * len(speeds)
    waiting = [0] * len(speeds)
    most = [0] * len(speeds)
    done = [0] * len(speeds)
    boards: list[list[float]] = [[] for _ in speeds]
    started = 0
    while left:
        for engine in range(len(speeds)):
            more = outputs_to_give(
                left=left, held=held[engine], most_on_board=most[engine], num_engines=len(speeds)
            )
            more = min(more, pool)
            pieces += more > 0
            pool, held[engine], waiting[engine] = (
                pool - more,
                held[engine] + more,
                waiting[engine] + more,
            )
        until = now + REPORT_S
        for engine, speed in enumerate(speeds):
            board, at = boards[engine], now
            while True:
                while waiting[engine] and len(board) < on_board:
                    started += 1
                    heapq.heappush(board, at + row_length(started, spread) * row_s / speed)
                    waiting[engine] -= 1
                    most[engine] = max(most[engine], len(board))
                if not board or board[0] > until:
                    break
                at = heapq.heappop(board)
                held[engine], done[engine], left = held[engine] - 1, done[engine] + 1, left - 1
                end = at
        now = until
        last = max(end, 0.0) if not left else now
    return last, done, pieces


def pulled_one_by_one(
    num_rows: int, speeds: Sequence[float], on_board: int, row_s: float, spread: float
) -> float:
    """Seconds of the same job where each engine takes a row whenever one fits on board."""
    slots = [(0.0, engine) for engine in range(len(speeds)) for _ in range(on_board)]
    ends = []
    for number in range(1, num_rows + 1):
        at, engine = heapq.heappop(slots)
        ends.append(at + row_length(number, spread) * row_s / speeds[engine])
        heapq.heappush(slots, (ends[-1], engine))
    return max(ends)


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 1.0), (1.0, 0.8), (1.0, 0.5), (1, 1, 1, 0.7)])
@pytest.mark.parametrize("spread", [0.0, 0.5])
@pytest.mark.parametrize("waves", [8, 30])
def test_a_job_of_some_waves_takes_about_a_tenth_more_than_the_least(
    speeds: Sequence[float], spread: float, waves: int
) -> None:
    on_board, row_s = 64, 20.0
    num_rows = waves * on_board * len(speeds)
    took_s, num_done, num_pieces = share_out(num_rows, speeds, on_board, row_s, spread)
    least_s = pulled_one_by_one(num_rows, speeds, on_board, row_s, spread)
    assert sum(num_done) == num_rows
    assert took_s <= 1.11 * least_s
    assert num_pieces <= 2 * len(speeds) * waves, "a board and a half in each, about"


def test_a_faster_engine_gets_more() -> None:
    _, (fast, slow), _ = share_out(20_000, (1.0, 0.5), 64, 20.0, 0.5)
    assert fast / slow == pytest.approx(2.0, rel=0.05)


@given(
    left=st.integers(1, 200_000),
    most_on_board=st.integers(0, 5000),
    num_engines=st.integers(1, 9),
    held=st.integers(0, 200_000),
)
def test_an_engine_with_nothing_gets_something_and_none_more_than_its_window(
    left: int, most_on_board: int, num_engines: int, held: int
) -> None:
    values = {"left": left, "most_on_board": most_on_board, "num_engines": num_engines}
    assert outputs_to_give(held=0, **values) >= 1
    more = outputs_to_give(held=held, **values)
    assert more >= 0
    if more:
        assert held + more <= WINDOW_OUTPUTS // num_engines
        assert held + more <= -(-left // num_engines)


def test_one_engine_gets_all_that_its_window_holds() -> None:
    assert outputs_to_give(left=500, held=0, most_on_board=0, num_engines=1) == 500
    assert outputs_to_give(left=10**6, held=0, most_on_board=9, num_engines=1) == WINDOW_OUTPUTS


# ---- the pool ----------------------------------------------------------------------------

samples = st.integers(1, 3)


@st.composite
def shards(draw: st.DrawFn, num_samples: int) -> list[Shard]:
    found, begin = [], 0
    for number in range(draw(st.integers(0, 4))):
        end = begin + draw(st.integers(1, 20))
        outputs = list(range(begin * num_samples, end * num_samples))
        done = draw(st.sets(st.sampled_from(outputs), max_size=len(outputs) - 1))
        found.append(Shard(number=number, begin=begin, end=end, done=tuple(sorted(done))))
        begin = end
    return found


def outputs_of(shard: Shard, num_samples: int) -> list[int]:
    numbers = range(shard.begin * num_samples, shard.end * num_samples)
    return [number for number in numbers if number not in shard.done]


@given(data=st.data(), num_samples=samples)
def test_a_pool_hands_out_each_output_once_in_whole_rows(
    data: st.DataObject, num_samples: int
) -> None:
    given_in = data.draw(shards(num_samples))
    pool = ShardPool(given_in, num_samples)
    taken: list[Shard] = []
    while (shard := pool.take(data.draw(st.integers(1, 30)))) is not None:
        outputs = outputs_of(shard, num_samples)
        assert outputs
        assert rows_to_run(shard, num_samples) == sorted({n // num_samples for n in outputs})
        if taken and data.draw(st.booleans()):
            pool.give_back([shard])
            continue
        taken.append(shard)
    whole = [n for shard in given_in for n in outputs_of(shard, num_samples)]
    assert [n for shard in taken for n in outputs_of(shard, num_samples)] == whole
    assert len({shard.number for shard in taken}) == len(taken)


@given(data=st.data(), num_samples=samples, most=st.integers(1, 30))
def test_a_piece_has_as_many_outputs_as_asked_for_but_at_least_a_row(
    data: st.DataObject, num_samples: int, most: int
) -> None:
    for shard in data.draw(shards(num_samples)):
        first, rest = split_shard(shard, most, num_samples)
        count = len(outputs_of(first, num_samples))
        assert 1 <= count <= most or len(rows_to_run(first, num_samples)) == 1
        if rest is not None:
            assert first.end == rest.begin
            assert count > most - num_samples
