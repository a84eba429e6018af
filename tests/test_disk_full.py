"""A disk that is full for a while: the job pauses, says so, and goes on with no row lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from engine import FinishedRow
from jobs.control import RunnerLock, runner_status
from jobs.disk_space import is_disk_full
from jobs.home import Home
from jobs.job_log import cap_log
from jobs.processes import ProcessId
from jobs.records import DiskFullError, Job
from jobs.runner import Runner
from jobs.stop_signal import StopSignal
from jobs.store import JobStore
from tests.job_factories import ok_row
from tests.runner_helpers import ScriptedDriver, make_home, queue_job

NUM_ROWS = 40


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Take all room that is left."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return path


def run(home: Home, store: JobStore, answer: Callable[[int], FinishedRow] = ok_row) -> None:
    """A runner until it has no more to do."""
    with RunnerLock(home) as lock, StopSignal() as stop:
        start: Any = lambda home: ScriptedDriver(store, answer=answer)  # noqa: E731
        Runner(home, lock, store=store, stop=stop, start_driver=start, idle_exit_s=0.0).run()


def filling_at(row: int, folder: Path) -> Callable[[int], FinishedRow]:
    """Answers that fill a folder's disk when this row is asked for."""

    def answer(index: int) -> FinishedRow:
        if index == row:
            fill(folder)
        return ok_row(index)

    return answer


def check_pause_and_way_on(home: Home, store: JobStore, job: Job, full: Path) -> None:
    paused = store.job(job.id)
    assert paused.state == "paused"
    assert "ntx-batch resume" in (paused.reason or "")
    assert "No space left" in (paused.reason or "") or "full" in (paused.reason or "")
    (full / "filler").unlink()
    store.set_state(job.id, "queued")
    run(home, store)
    done = store.job(job.id)
    assert (done.state, done.num_ok) == ("completed", NUM_ROWS)
    tables = [pq.read_table(Path(done.results_dir) / part.name) for part in store.parts(job.id)]
    rows = [row for table in tables for row in table["row_index"].to_pylist()]
    assert sorted(rows) == list(range(NUM_ROWS))


def test_full_disk_of_the_results(tmp_path: Path, small_disk: Path) -> None:
    home = make_home(tmp_path / "home")
    with JobStore(home.state_path) as store:
        job = queue_job(
            store,
            tmp_path / "in.parquet",
            ["x"] * NUM_ROWS,
            shard_rows=10,
            part_nbytes=1,
            output=str(small_disk / "out"),
        )
        run(home, store, filling_at(15, small_disk))
        assert str(small_disk) in (store.job(job.id).reason or "")
        check_pause_and_way_on(home, store, job, small_disk)


def test_full_disk_of_the_state_folder(tmp_path: Path, small_disk: Path) -> None:
    """What is left in the room kept for it: the state and the reason."""
    home = make_home(small_disk / "home")
    with JobStore(home.state_path) as store:
        job = queue_job(
            store,
            tmp_path / "in.parquet",
            ["x"] * NUM_ROWS,
            shard_rows=10,
            output=str(tmp_path / "out"),
        )
        run(home, store, filling_at(25, small_disk))
        assert "state.sqlite" in (store.job(job.id).reason or "")
        check_pause_and_way_on(home, store, job, small_disk)


def test_a_runner_says_who_it_is_on_a_full_disk(small_disk: Path) -> None:
    home = make_home(small_disk / "home")
    with RunnerLock(home) as lock:
        fill(small_disk)
        lock.note("stopping")
        status = runner_status(home)
        assert (status.state, status.pid) == ("stopping", ProcessId.current().pid)


def test_a_full_disk_is_known_behind_other_errors() -> None:
    try:
        try:
            raise OSError(28, os.strerror(28), "part.parquet")
        except OSError as error:
            raise ValueError("the writer failed") from error
    except ValueError as error:
        assert is_disk_full(error)
    assert is_disk_full(DiskFullError("state.sqlite"))
    assert not is_disk_full(OSError(2, os.strerror(2)))


def test_a_log_is_capped_at_a_line(tmp_path: Path) -> None:
    """Case 68, the logs: the newest lines stay."""
    path = tmp_path / "runner.log"
    path.write_text("".join(f"line {number}\n" for number in range(1000)))
    cap_log(path, 100_000)
    assert path.read_text().startswith("line 0\n")
    cap_log(path, 1000)
    lines = path.read_text().splitlines()
    assert lines[-1] == "line 999"
    assert lines[0].startswith("line ")
    assert path.stat().st_size <= 500
