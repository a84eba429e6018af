"""A job run through in numbers: no row or token is lost, and small jobs come out as by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.costs import Curve, Load, SweepCost
from engine.forecast import GENERATIONS, Board, Pace, Workload, forecast
from engine.scheduler import Progress, admission_budget, compose_sweep
from engine.sweep_log import load_of
from kernels.ops import PAGE_TOKENS

COST = SweepCost(
    layers=Curve.line(1.0, 0.1),
    head=Curve.line(0.0, 0.05),
    decode_position_s=0.001,
    prefill_position_s=0.002,
)
FREE = SweepCost(layers=Curve.line(0.0, 0.0), head=Curve.line(0.0, 0.0))
NOTHING = Pace(cost=FREE, streams={"disk": 0.0})

workloads = st.builds(
    lambda rows, prompt, output, share: Workload(
        num_rows=rows, prompt_tokens=prompt, output_tokens=output, reused_tokens=share * prompt
    ),
    st.integers(1, 300),
    st.floats(0, 200),
    st.floats(1, 60),
    st.one_of(st.just(0.0), st.floats(0, 1)),
)
boards = st.builds(
    lambda tokens, rows: Board(sweep_tokens=tokens, max_rows=min(tokens, rows)),
    st.integers(1, 300),
    st.integers(1, 100),
)


@given(workloads, boards)
def test_every_token_is_computed_once_but_those_taken_over(work: Workload, board: Board) -> None:
    """Of a long job the rest is carried on from its first generations, and so is about right."""
    found = forecast(work, board, NOTHING)
    prompt, output, rows = work.whole_prompt, work.whole_output, work.num_rows
    length = prompt + output - 1  # the last token is never fed back
    reused = prompt - work.whole_computed
    assert 0 <= reused < prompt
    assert found.outputs == pytest.approx(rows * output)
    assert found.tokens == pytest.approx(rows * (length - reused))
    assert found.decode_positions + found.prefill_positions == pytest.approx(
        rows * (length * (length + 1) - reused * (reused + 1)) / 2
    )
    assert found.tokens <= found.num_sweeps * board.sweep_tokens * (1 + 1e-9)
    assert found.outputs <= found.num_sweeps * board.max_rows * (1 + 1e-9)


@given(workloads, boards)
def test_sweeps_are_those_of_the_scheduler(work: Workload, board: Board) -> None:
    """Against the engine's own composition of each sweep, row by row."""
    prompt, output, waiting = work.whole_prompt, work.whole_output, min(work.num_rows, 40)
    work = replace(work, num_rows=waiting)
    rows: dict[int, list[int]] = {}  # slot -> known, computed
    taken, seconds = 0, 0.0
    pace = Pace(cost=COST, streams={"disk": 3.0})

    def progress() -> list[Progress]:
        return [Progress(slot, known, computed) for slot, (known, computed) in rows.items()]

    while waiting or rows:
        budget = admission_budget(progress(), board.sweep_tokens)
        while waiting and budget > 0 and len(rows) < board.max_rows:
            rows[work.num_rows - waiting] = [prompt, prompt - work.whole_computed]
            waiting, budget = waiting - 1, budget - work.whole_computed
        chunks = compose_sweep(progress(), board.sweep_tokens)
        taken += 1
        seconds += pace.sweep_s(load_of(chunks))[0]
        for chunk in chunks:
            row = rows[chunk.slot]
            row[1] = chunk.end
            row[0] += chunk.wants_logits
            if row[0] == prompt + output:
                del rows[chunk.slot]
    if work.num_rows <= GENERATIONS * board.max_rows:
        found = forecast(work, board, pace)
        assert found.num_sweeps == taken
        # Sweeps that are alike are counted as those of the middle one.
        assert found.seconds == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize(("prompt", "tokens"), [(70, 100), (512, 1000), (130, 300)])
def test_pieces_of_prompts_end_with_pages_of_8_bits(prompt: int, tokens: int) -> None:
    """Against the scheduler: what is left of a sweep's budget then stays empty."""
    work = Workload(num_rows=40, prompt_tokens=prompt, output_tokens=30)
    board = Board(sweep_tokens=tokens, max_rows=12, page_tokens=PAGE_TOKENS)
    found = forecast(work, board, NOTHING)
    rows, waiting, taken = [], 40, 0  # [known, computed] of each row
    while waiting or rows:
        progress = [Progress(slot, *row) for slot, row in enumerate(rows)]
        budget = admission_budget(progress, tokens)
        while waiting and budget > 0 and len(rows) < board.max_rows:
            rows.append([prompt, 0])
            waiting, budget = waiting - 1, budget - prompt
        progress = [Progress(slot, *row) for slot, row in enumerate(rows)]
        for chunk in compose_sweep(progress, tokens, PAGE_TOKENS):
            rows[chunk.slot][1] = chunk.end
            rows[chunk.slot][0] += chunk.wants_logits
        rows = [row for row in rows if row[0] < prompt + 30]
        taken += 1
    assert found.num_sweeps == taken
    assert forecast(work, replace(board, page_tokens=1), NOTHING).num_sweeps <= taken


def test_two_rows_by_hand() -> None:
    """Prompts of 3 tokens, 3 outputs, both on board at once: sweeps of 6, 2 and 2 tokens."""
    work = Workload(num_rows=2, prompt_tokens=3, output_tokens=3)
    found = forecast(work, Board(sweep_tokens=8, max_rows=8), Pace(cost=COST, streams={}))
    assert found.num_sweeps == 3
    prefill = 1.0 + 6 * 0.1 + 2 * 0.05 + 2 * (1 + 2 + 3) * 0.002
    decode = 2 * (1.0 + 2 * 0.1 + 2 * 0.05) + 2 * (4 + 5) * 0.001
    assert found.seconds == pytest.approx(prefill + decode)
    assert found.limited_s == {"compute": pytest.approx(prefill + decode)}


def test_the_last_rows_wait_for_the_disk_in_every_sweep() -> None:
    """One row at a time, 5 sweeps each: a tail costs as many seconds a sweep as a full board."""
    work = Workload(num_rows=3, prompt_tokens=1, output_tokens=5)
    pace = Pace(cost=COST, streams={"disk": 2.0, "link": 1.5})
    found = forecast(work, Board(sweep_tokens=8, max_rows=1), pace)
    assert (found.num_sweeps, found.seconds) == (15, 30.0)
    assert found.limited_s == {"disk": 30.0}


def test_what_is_kept_at_the_end_no_longer_streams() -> None:
    work = Workload(num_rows=4, prompt_tokens=1, output_tokens=10)
    asked: list[tuple[int, int]] = []

    def kept(rows: int, sweeps_left: int) -> float:
        asked.append((rows, sweeps_left))
        return 0.5

    pace = Pace(cost=FREE, streams={"disk": 1.0}, kept=kept)
    found = forecast(work, Board(sweep_tokens=8, max_rows=2), pace)
    # Two rows after two; while the first two are on board, the others wait.
    assert found.num_sweeps == 20
    assert asked == [(2, 9)]
    assert found.seconds == pytest.approx(11 + 9 * 0.5)


def test_a_long_job_goes_on_at_the_pace_of_its_first_generations() -> None:
    """Ten rows at once, 20 sweeps each, none of them held up by prompts."""
    board, work = Board(sweep_tokens=64, max_rows=10), Workload(prompt_tokens=1, output_tokens=20)
    pace = Pace(cost=COST, streams={"disk": 5.0})
    short = forecast(replace(work, num_rows=GENERATIONS * 10), board, pace)
    long = forecast(replace(work, num_rows=100_000), board, pace)
    assert short.num_sweeps == GENERATIONS * 20
    assert long.num_sweeps == pytest.approx(10_000 * 20)
    assert long.seconds / 100_000 == pytest.approx(short.seconds / short.outputs * 20)


@given(workloads, boards, st.floats(0, 10), st.floats(1, 3))
def test_faster_machines_never_take_longer(
    work: Workload, board: Board, disk_s: float, times: float
) -> None:
    slow = Pace(cost=COST, streams={"disk": times * disk_s})
    fast = Pace(cost=COST, streams={"disk": disk_s})
    costly = replace(COST, layers=Curve.line(times, times * 0.1))
    base = forecast(work, board, fast).seconds
    assert base <= forecast(work, board, slow).seconds * (1 + 1e-9)
    assert base <= forecast(work, board, replace(fast, cost=costly)).seconds * (1 + 1e-9)


def test_tokens_are_computed_in_whole_tiles() -> None:
    cost = replace(COST, tile_tokens=256)
    assert cost.compute_s(Load(1, 0, 0, 0)) == cost.compute_s(Load(256, 0, 0, 0))
    assert cost.compute_s(Load(257, 0, 0, 0)) == pytest.approx(1.0 + 512 * 0.1)
    assert cost.compute_s(Load(0, 0, 0, 0)) == 1.0
