"""kill -9 of the runner, again and again in one job: no row is lost, none is doubled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from jobs.control import runner_status
from jobs.driver_process import clear_leftovers
from jobs.home import HOME_VARIABLE, Home
from jobs.processes import INSTANCE_VARIABLE, ProcessId, find_instance, read_leader
from jobs.records import Job
from jobs.results import read_results
from jobs.store import JobStore
from tests.runner_helpers import SMALL_ENGINE, make_home, queue_job, wait_over, wait_until

ROOT = Path(__file__).parents[1]
NUM_ROWS = 2000
MAX_TOKENS = 120


class Crash:
    """One job, and a runner that is started and killed."""

    def __init__(self, folder: Path, home: Home, store: JobStore) -> None:
        self.home = home
        self.store = store
        self.notes = folder / "notes.jsonl"
        self.notes.touch()
        self._children: list[subprocess.Popen[bytes]] = []

    def start_runner(self, *how: str) -> subprocess.Popen[bytes]:
        environment = {key: v for key, v in os.environ.items() if key != INSTANCE_VARIABLE}
        environment |= {HOME_VARIABLE: str(self.home.path), "PYTHONPATH": str(ROOT)}
        with self.home.log_path.open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.crashing_runner", self.home.path, self.notes, *how],
                env=environment,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._children.append(child)
        return child

    def kill_at(self, job: Job, num_rows: int) -> None:
        """Start a runner and kill it when the spool has this many of the job's rows."""
        child = self.start_runner()
        wait_until(lambda: self.store.job(job.id).num_ok >= num_rows)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert self.store.job(job.id).state == "running", "the job is too short for this test"

    def rows_sent(self) -> list[list[int]]:
        return [json.loads(line) for line in self.notes.read_text().splitlines()]

    def left_over(self) -> set[ProcessId]:
        leader = read_leader(self.home.driver_path)
        return find_instance(f"{self.home.key}-", [leader] if leader else [])

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
        clear_leftovers(self.home)


@pytest.fixture
def crash(tmp_path: Path) -> Iterator[Crash]:
    home = make_home(tmp_path / "home")
    with JobStore(home.state_path) as store:
        crash = Crash(tmp_path, home, store)
        yield crash
        crash.close()


def rows_by_index(table: pa.Table) -> dict[int, str]:
    rows = table["row_index"].to_pylist()
    assert len(set(rows)) == len(rows), "a row is there twice"
    return dict(zip(rows, table["generated_text"].to_pylist(), strict=True))


def test_a_runner_killed_at_any_point_loses_and_doubles_no_row(crash: Crash) -> None:
    """Kill -9 at 10, 50 and 90 % and between the publishing and the commit of a part.

    Case 17: each row_index exactly once, and what was committed is never removed.
    """
    prompts = [f"prompt number {row}" for row in range(NUM_ROWS)]
    job = queue_job(
        crash.store,
        crash.home.path.parent / "in.parquet",
        prompts,
        max_tokens=MAX_TOKENS,
        shard_rows=100,
        part_nbytes=100_000,
    )
    kept: dict[int, str] = {}
    for percent in (10, 50, 90):
        crash.kill_at(job, NUM_ROWS * percent // 100)
        assert runner_status(crash.home).state == "absent"
        now = rows_by_index(read_results(crash.store.finished(job.id)))
        assert kept.items() <= now.items(), "a row that was committed is gone or has changed"
        kept = now
    crash.start_runner("die").wait()
    parts = crash.store.parts(job.id)
    assert parts[-1].state == "publishing"
    assert (Path(job.results_dir) / parts[-1].name).exists(), "it died after publishing"

    runner = crash.start_runner()
    done = wait_over(crash.store, job)
    assert (done.state, done.num_ok, done.attempt) == ("completed", NUM_ROWS, 5)
    final = rows_by_index(read_results(crash.store.finished(job.id)))
    assert sorted(final) == list(range(NUM_ROWS))
    assert kept.items() <= final.items()
    assert {part.state for part in crash.store.parts(job.id)} == {"committed"}

    # A row sent twice was on its way to the spool when its runner died: in one of four batches.
    batches = crash.rows_sent()
    times = Counter(row for batch in batches for row in batch)
    assert set(times) == set(range(NUM_ROWS))
    twice = sum(times.values()) - NUM_ROWS
    assert SMALL_ENGINE.sweep_tokens is not None
    assert twice <= 4 * SMALL_ENGINE.sweep_tokens

    runner.terminate()
    assert runner.wait(20) == 0
    assert crash.left_over() == set()


def test_copies_and_samples_survive_a_killed_runner(crash: Crash) -> None:
    """Each output once, and each copy with the answer of the row that it names."""
    num_rows, num_prompts = 600, 200
    job = queue_job(
        crash.store,
        crash.home.path.parent / "in.parquet",
        [f"prompt number {row % num_prompts}" for row in range(num_rows)],
        max_tokens=MAX_TOKENS,
        samples=2,  # of a greedy row: the second is a copy of the first
        part_nbytes=20_000,
    )
    for percent in (20, 60):
        crash.kill_at(job, 2 * num_rows * percent // 100)
    crash.start_runner()
    done = wait_over(crash.store, job)
    assert (done.state, done.num_ok) == ("completed", 2 * num_rows)
    table = read_results(crash.store.finished(job.id))
    names = ("row_index", "sample_index", "generated_text", "duplicate_of")
    rows = list(zip(*(table[name].to_pylist() for name in names), strict=True))
    assert [row[:2] for row in rows] == [(n // 2, n % 2) for n in range(2 * num_rows)]
    for row, sample, text, duplicate_of in rows:
        assert text == rows[2 * (row % num_prompts)][2], (row, sample)
        if duplicate_of is not None:
            assert duplicate_of % num_prompts == row % num_prompts
    computed = sum(duplicate_of is None for *_, duplicate_of in rows)
    assert (computed, done.num_copied) == (num_prompts, 2 * num_rows - num_prompts)
    assert done.completion_tokens == num_prompts * MAX_TOKENS


def test_what_a_killed_runner_left_is_gone_before_the_next_one_works(crash: Crash) -> None:
    """Its driver takes Ray down when the pipe ends; the next runner ends what still lives."""
    job = queue_job(
        crash.store,
        crash.home.path.parent / "in.parquet",
        [f"x {row}" for row in range(60)],
        max_tokens=200,
    )
    child = crash.start_runner()
    wait_until(lambda: "device" in crash.store.job(job.id).record)
    orphans = crash.left_over()
    leader = read_leader(crash.home.driver_path)
    assert leader in orphans
    assert len(orphans) > 3
    assert leader is not None
    # A stopped driver cannot do its part: as if it hung.
    os.kill(leader.pid, signal.SIGSTOP)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert leader.is_running()
    crash.start_runner()
    done = wait_over(crash.store, job)
    assert done.num_ok == 60
    assert not any(process.is_running() for process in orphans)
