"""Several engines share a job: who gets which rows, and what becomes of those of a lost engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jobs.control import RunnerLock
from jobs.home import Home
from jobs.isolation import MAX_LONE_LOSSES
from jobs.records import Job
from jobs.results import read_results
from jobs.runner import Runner
from jobs.stop_signal import StopSignal
from jobs.store import JobStore
from tests.runner_helpers import queue_job
from tests.scripted_fleet import MOST_ON_BOARD, ScriptedFleet

NUM_ROWS = 200


@pytest.fixture
def job(store: JobStore, tmp_path: Path) -> Job:
    prompts = [f"prompt {row}" for row in range(NUM_ROWS)]
    return queue_job(store, tmp_path / "in.parquet", prompts, shard_rows=50)


def run(home: Home, store: JobStore, *fleets: ScriptedFleet) -> Job:
    """Run the one job, each driver after the loss of the one before."""
    drivers = iter(fleets)
    with RunnerLock(home) as lock, StopSignal() as stop:
        start: Any = lambda home: next(drivers)  # noqa: E731
        Runner(home, lock, store=store, stop=stop, start_driver=start, idle_exit_s=0.0).run()
    return store.list_jobs()[0]


def statuses(store: JobStore, job: Job) -> dict[int, str | None]:
    """Error code of each row, and that each is there once."""
    table = read_results(store.finished(job.id))
    rows = table["row_index"].to_pylist()
    assert rows == list(range(NUM_ROWS))
    return dict(zip(rows, table["error_code"].to_pylist(), strict=True))


def rows_begun(fleet: ScriptedFleet, number: int) -> set[int]:
    return {row for board in fleet.engines[number].boards for row in board}


def test_a_faster_engine_does_more_and_no_row_is_done_twice(
    home: Home, store: JobStore, job: Job
) -> None:
    fleet = ScriptedFleet(store, [3, 1])
    done = run(home, store, fleet)
    assert (done.state, done.num_ok) == ("completed", NUM_ROWS)
    statuses(store, job)
    fast, slow = (rows_begun(fleet, number) for number in (0, 1))
    assert not fast & slow
    assert 2 < len(fast) / len(slow) < 4
    engines = done.record["engines"]
    assert [engine["node"] for engine in engines] == ["node 0", "node 1"]
    assert [engine["num_lost"] for engine in engines] == [0, 0]


def test_no_more_engines_than_rows_are_started(home: Home, store: JobStore, tmp_path: Path) -> None:
    queue_job(store, tmp_path / "two.parquet", ["a", "b"])
    fleet = ScriptedFleet(store, [1, 1, 1])
    assert run(home, store, fleet).num_ok == 2
    assert [len(engine.starts) for engine in fleet.engines] == [1, 1, 0]


@pytest.mark.parametrize("speeds", [[1, 1], [4, 1], [1, 4], [2, 2, 2]])
def test_a_row_that_kills_its_engine_ends_alone_and_the_others_go_on(
    home: Home, store: JobStore, job: Job, speeds: list[int]
) -> None:
    """Case 71 on several engines: half the rows each time on the engine that was lost."""
    fleet = ScriptedFleet(store, speeds, deadly=[70], breaks=[131])
    done = run(home, store, fleet)
    assert (done.state, done.num_ok, done.num_error) == ("completed", NUM_ROWS - 2, 2)
    codes = statuses(store, job)
    assert {row: code for row, code in codes.items() if code} == {
        70: "worker_crashed",
        131: "internal_error",
    }
    killed = [engine for engine in fleet.engines if any(70 in board for board in engine.boards)]
    assert len(killed) == 1, "its suspects stay with the engine that it killed"
    sizes = [len(board) for board in killed[0].boards if 70 in board]
    assert sizes[0] == MOST_ON_BOARD
    # Halved each time, then alone, and once more, given up, as an error row.
    assert Counter(sizes)[1] == MAX_LONE_LOSSES + 1
    undisturbed = [e for e in fleet.engines if not any({70, 131} & set(b) for b in e.boards)]
    assert all(len(engine.starts) == 1 for engine in undisturbed)


def test_a_lost_engines_other_rows_are_done_by_whoever_is_first(
    home: Home, store: JobStore, job: Job
) -> None:
    """Rows computed twice are at most those on board at losses."""
    fleet = ScriptedFleet(store, [1, 1], deadly=[3])
    done = run(home, store, fleet)
    assert done.num_ok == NUM_ROWS - 1
    first, second = fleet.engines
    assert len(first.starts) > 4
    assert len(second.starts) == 1
    suspects = set(first.boards[0])
    assert not suspects & rows_begun(fleet, 1)
    assert len(rows_begun(fleet, 1)) > NUM_ROWS / 2
    losses = done.record["engines"][0]["num_lost"]
    assert losses == 6, "8, 4, 2, and three times 1 on board"
    assert "job" in home.job_log_path(job.id).read_text()


def test_an_engine_that_does_not_load_is_done_without(
    home: Home, store: JobStore, job: Job
) -> None:
    fleet = ScriptedFleet(store, [2, 2])
    fleet.engines[1].loads = False
    done = run(home, store, fleet)
    assert (done.state, done.num_ok) == ("completed", NUM_ROWS)
    assert (
        "goes on without engine 1: engine 1 does not load" in home.job_log_path(job.id).read_text()
    )


def test_a_job_fails_where_no_engine_loads(home: Home, store: JobStore, job: Job) -> None:
    fleet = ScriptedFleet(store, [2, 2])
    for engine in fleet.engines:
        engine.loads = False
    done = run(home, store, fleet)
    assert done.state == "failed"
    assert done.reason == "engine 1 does not load"


def test_an_engine_that_is_lost_again_and_again_before_any_row_is_given_up(
    home: Home, store: JobStore, job: Job
) -> None:
    class Doomed(ScriptedFleet):
        def wait(self, timeout_s: float, others: Any = ()) -> list[Any]:
            from jobs.messages import EngineLost, JobReady

            events = super().wait(timeout_s, others)
            return [
                EngineLost(event.attempt, "it vanished", engine=1)
                if isinstance(event, JobReady) and event.engine == 1
                else event
                for event in events
            ]

    fleet = Doomed(store, [1, 1])
    done = run(home, store, fleet)
    assert (done.state, done.num_ok) == ("completed", NUM_ROWS)
    assert len(fleet.engines[1].starts) == 4
    assert "lost 4 times without a finished row; the last time: it vanished" in str(
        done.record["engines"][1]["losses"]
    )


def test_suspects_are_remembered_when_all_engines_are_lost(
    home: Home, store: JobStore, job: Job
) -> None:
    """The driver goes while engine 0 tries four rows, of which it knows that one may be bad."""
    first = ScriptedFleet(store, [1, 1], deadly=[3], lost_after=8)
    second = ScriptedFleet(store, [1, 1], deadly=[3])
    done = run(home, store, first, second)
    assert (done.num_ok, done.num_error) == (NUM_ROWS - 1, 1)
    assert second.engines[0].starts[0].max_rows is not None
    assert statuses(store, job)[3] == "worker_crashed"
