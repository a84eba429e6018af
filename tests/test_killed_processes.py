"""kill -9 of what runs below the runner; `scripts/chaos.py` does so many more times."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jobs.control import ensure_runner, stop_runner
from jobs.home import Home
from jobs.processes import ProcessId
from jobs.results import read_results
from jobs.store import JobStore
from scripts.chaos import BACK_S, GONE_S, instance, process_of, run_chaos
from tests.runner_helpers import MODEL, make_home, queue_job, wait_over, wait_until

NUM_ROWS = 600
HELPERS = ("log_monitor.py", "dashboard.py", "monitor.py")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = make_home(tmp_path / "home")
    yield home
    stop_runner(home)


def helpers(home: Home) -> list[ProcessId]:
    """Processes of Ray that do nothing for us."""
    return [
        process
        for process in instance(home)
        if any(name in " ".join(psutil.Process(process.pid).cmdline()) for name in HELPERS)
    ]


@pytest.mark.slow
def test_a_job_goes_on_after_the_death_of_helpers_agents_raylet_and_driver(
    home: Home, tmp_path: Path
) -> None:
    """Case 73: truth is on disk. Each row once, equal prompts with equal texts."""
    with JobStore(home.state_path) as store:
        job = queue_job(
            store,
            tmp_path / "in.parquet",
            ["same"] * NUM_ROWS,
            max_tokens=200,
            shard_rows=50,
            dedupe=False,
        )
        ensure_runner(home)
        wait_until(lambda: store.job(job.id).num_ok > 0)
        first = process_of(home, "EngineActor")
        doomed = helpers(home)
        assert len(doomed) >= 2
        for process in doomed:
            os.kill(process.pid, signal.SIGKILL)
        done = store.job(job.id).num_ok
        wait_until(lambda: store.job(job.id).num_ok > done + 64, BACK_S)
        assert process_of(home, "EngineActor") == first, "nobody needed them"
        for role in ("DashboardAgent", "raylet", "driver"):
            process = wait_until(lambda role=role: process_of(home, role), BACK_S)
            before = instance(home)
            assert store.job(job.id).state == "running", "the job is too short for this test"
            os.kill(process.pid, signal.SIGKILL)
            wait_until(lambda before=before: not any(p.is_running() for p in before), GONE_S)
            done = store.job(job.id).num_ok
            wait_until(lambda done=done: store.job(job.id).num_ok > done, BACK_S)
        finished = wait_over(store, job)
        assert (finished.state, finished.num_ok) == ("completed", NUM_ROWS)
        table = read_results(store.finished(job.id))
        assert table["row_index"].to_pylist() == list(range(NUM_ROWS))
        assert len(set(table["generated_text"].to_pylist())) == 1


@pytest.mark.slow
def test_a_job_survives_whatever_is_killed(tmp_path: Path) -> None:
    """The runner, the engine actor and the driver: each row once, and nothing kept runs again."""
    make_home(tmp_path / "home")
    kills, again = run_chaos(MODEL, tmp_path, num_rows=600, num_kills=3, max_tokens=200, seed=17)
    assert {"runner", "EngineActor", "driver"} <= {kill.role for kill in kills}
    assert sum(kill.num_on_board > 0 for kill in kills) == 3
    assert again.num_begun > 0
    assert all(kill.num_left == 0 for kill in kills)
