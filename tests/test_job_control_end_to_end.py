"""Jobs stopped, resumed, limited and watched by many at once, on a real engine through Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from jobs.control import runner_status, stop_runner
from jobs.home import Home
from jobs.records import Job
from jobs.results import read_results
from jobs.store import JobStore
from ntx_batch import client
from tests.cli_helpers import MODEL, ROOT, run_process, started_process, write_prompts
from tests.runner_helpers import make_home, queue_job, wait_over, wait_until

MOST_STOPPING_S = 5.0


@dataclass(frozen=True)
class World:
    """A state folder that all tests of this module share, so that Ray and the model start once."""

    folder: Path
    home: Home
    store: JobStore

    def queue(self, name: str, num_rows: int, **options: object) -> Job:
        prompts = [f"prompt {row}" for row in range(num_rows)]
        job = queue_job(self.store, self.folder / f"{name}.parquet", prompts, **options)  # type: ignore[arg-type]
        client.start_runner(home=self.home.path)
        return job

    def handle(self, job: Job) -> client.JobHandle:
        return client.JobHandle(job.id, self.home)

    def rows(self, job: Job) -> pa.Table:
        return read_results(self.store.finished(job.id))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("control")
    home = make_home(folder / "home")
    with JobStore(home.state_path) as store:
        yield World(folder, home, store)
    stop_runner(home)


def wait_rows(world: World, job: Job, count: int) -> None:
    wait_until(lambda: world.store.job(job.id).num_ok >= count)


def test_cancel_ends_a_generation_of_4000_tokens_at_once(world: World) -> None:
    """Case 41: the long rows do not run on; the short one, which was finished, is kept."""
    path = write_prompts(
        world.folder / "long.parquet",
        ["short", *(f"long {row}" for row in range(8))],
        max_tokens=[1, *[4000] * 8],
    )
    job = client.submit(
        path,
        model=MODEL,
        param_columns="max_tokens",
        ignore_eos=True,
        home=world.home.path,
    )
    wait_until(lambda: job.snapshot().num_ok == 1)
    # All nine prompts fit into the first sweep, which the short row ended with.
    started = time.monotonic()
    said = job.cancel()
    assert time.monotonic() - started < MOST_STOPPING_S
    assert said == f"job {job.id} cancelled; its 1 finished row is kept"
    assert job.cancel() == f"job {job.id} was already cancelled"
    assert job.results()["status"].to_pylist() == ["ok", *["cancelled"] * 8]
    # The engine is free: another job runs at once.
    following = world.queue("after", 3)
    assert wait_over(world.store, following, 30).state == "completed"


def test_a_row_that_is_on_board_for_too_long_is_an_error_row(world: World) -> None:
    path = write_prompts(
        world.folder / "late.parquet", ["a", "b", "c", "d"], max_tokens=[1, 6000, 1, 6000]
    )
    job = client.submit(
        path,
        model=MODEL,
        param_columns="max_tokens",
        ignore_eos=True,
        row_timeout=0.2,
        home=world.home.path,
    )
    assert job.wait(60) == 3
    table = job.results()
    assert table["status"].to_pylist() == ["ok", "error", "ok", "error"]
    assert table["error_code"].to_pylist() == [None, "timeout", None, "timeout"]
    assert "--row-timeout is 0.2 s" in table["error_message"].to_pylist()[1]


def read_with_pyarrow(folder: Path) -> list[int]:
    table = ds.dataset(folder, format="parquet").to_table(columns=["row_index"])
    return table["row_index"].to_pylist()


def read_with_duckdb(folder: Path) -> list[int]:
    query = f"SELECT row_index FROM read_parquet('{folder}/*.parquet')"
    return [row for (row,) in duckdb.connect().execute(query).fetchall()]


def read_with_polars(folder: Path) -> list[int]:
    return pl.scan_parquet(folder).select("row_index").collect()["row_index"].to_list()


class Reader(threading.Thread):
    """Reads a results folder again and again; keeps what is wrong with what it saw."""

    def __init__(self, folder: Path, read: Callable[[Path], list[int]]) -> None:
        super().__init__()
        self._folder = folder
        self._read = read
        self._stop_reading = threading.Event()
        self.problems: list[str] = []
        self.counts: list[int] = []

    def run(self) -> None:
        while not self._stop_reading.wait(0.1):
            if self._folder.exists() and os.listdir(self._folder):
                self._look()
        self._look()

    def _look(self) -> None:
        try:
            rows = self._read(self._folder)
        except Exception as error:
            self.problems.append(f"{self._read.__name__}: {error!r}")
            return
        times = Counter(rows)
        self.problems += [f"row {row} is there {n} times" for row, n in times.items() if n > 1]
        self.counts.append(len(rows))

    def finish(self) -> None:
        self._stop_reading.set()
        self.join()


@contextmanager
def reading(folder: Path) -> Iterator[list[Reader]]:
    reads = (read_with_pyarrow, read_with_duckdb, read_with_polars)
    readers = [Reader(folder, read) for read in reads]
    for reader in readers:
        reader.start()
    try:
        yield readers
    finally:
        for reader in readers:
            reader.finish()


def test_a_job_killed_at_60_percent_goes_on_with_the_rest(world: World) -> None:
    """Case 2: `resume` after kill -9 of the runner runs the remaining rows only.

    Case 16: whoever reads the results folder meanwhile, also across the kill, sees whole files.
    """
    num_rows = 5000
    job = world.queue("kill", num_rows, max_tokens=24, shard_rows=100, part_nbytes=30_000)
    folder = Path(job.results_dir)
    with reading(folder) as readers:
        wait_rows(world, job, num_rows * 6 // 10)
        wait_until(lambda: any(folder.glob("part-*")))
        pid = runner_status(world.home).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: runner_status(world.home).state == "absent")
        kept = world.rows(job)
        before = world.store.job(job.id)
        assert before.num_ok == kept.num_rows < num_rows, "the job was too short to be killed"
        published = ds.dataset(folder, format="parquet").to_table()
        assert 0 < published.num_rows <= kept.num_rows

        ran = run_process(world.home.path, "resume", job.id)
        assert ran.err.strip() == f"job {job.id} was interrupted, and goes on by itself"
        done = wait_over(world.store, job)
    assert (done.state, done.num_ok, done.attempt) == ("completed", num_rows, 2)
    # Each row is charged once: what was finished did not run again.
    assert done.completion_tokens == num_rows * 24
    table = world.rows(job)
    assert table["row_index"].to_pylist() == list(range(num_rows))
    texts = dict(zip(table["row_index"].to_pylist(), table["generated_text"], strict=True))
    for row, text in zip(kept["row_index"].to_pylist(), kept["generated_text"], strict=True):
        assert texts[row] == text
    for reader in readers:
        assert reader.problems == []
        assert reader.counts == sorted(reader.counts), "rows went away"
        assert len(set(reader.counts)) > 2
        assert reader.counts[-1] == num_rows
    assert {path.suffix for path in folder.iterdir()} == {".parquet"}


WATCH = """
import sys, threading
from ntx_batch import client
from ntx_batch.status import status_record
done = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
polls = 0
while not done.is_set():
    for handle in client.list_jobs():
        shown = handle.status()
        parts = [shown[name] for name in ("ok", "error", "cancelled", "remaining")]
        assert sum(parts) == shown["total"], shown
        polls += 1
print(polls)
"""


@contextmanager
def watchers(home: Home, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that read the status of all jobs, again and again, until their input ends."""
    pipe = subprocess.PIPE
    environment = os.environ | {"NTX_HOME": str(home.path), "PYTHONPATH": str(ROOT)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WATCH],
            env=environment,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for _ in range(count)
    ]
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.communicate()


@contextmanager
def submitting(home: Home, paths: list[Path]) -> Iterator[list[subprocess.Popen[str]]]:
    arguments = ("--model", MODEL, "--max-tokens", "100", "--ignore-eos")
    with ExitStack() as stack:
        yield [
            stack.enter_context(started_process(home.path, "submit", path, *arguments))
            for path in paths
        ]


def test_many_submits_and_readers_at_once(world: World) -> None:
    """Case 92: 8 submits, 4 status loops, a cancel, and a pause with a resume, all at once.

    Every job runs once, "database is locked" never appears, and in each poll the counts add up.
    """
    sizes = [1000, *[40] * 7]
    paths = [
        write_prompts(world.folder / f"many{n}.parquet", [f"{n} {row}" for row in range(size)])
        for n, size in enumerate(sizes)
    ]

    def find(path: Path) -> Job | None:
        jobs = world.store.list_jobs()
        return next((job for job in jobs if job.spec.input == str(path)), None)

    def is_running(path: Path) -> bool:
        job = find(path)
        return job is not None and job.state == "running" and "device" in job.record

    with watchers(world.home, 4) as loops, submitting(world.home, paths) as submits:
        wait_until(lambda: find(paths[-1]))
        last = find(paths[-1])
        assert last is not None
        assert "cancelled; its" in world.handle(last).cancel()
        wait_until(lambda: is_running(paths[0]))
        first = find(paths[0])
        assert first is not None
        assert "paused; its" in world.handle(first).pause()
        assert "queued again" in world.handle(first).resume()
        answers = [submit.communicate(timeout=120) for submit in submits]
        ended = [wait_over(world.store, find(path) or last, 180) for path in paths]
        polls = [loop.communicate(input="", timeout=60) for loop in loops]

    assert [submit.returncode for submit in submits] == [0] * 8, answers
    assert [out.strip() for out, _ in answers] == [job.id for job in ended]
    assert [loop.returncode for loop in loops] == [0] * 4, polls
    assert all(int(out) > 20 for out, _ in polls)
    said = " ".join(text for pair in (*answers, *polls) for text in pair)
    assert "locked" not in said + world.home.log_path.read_text()
    assert [job.state for job in ended] == [*["completed"] * 7, "cancelled"]
    assert [job.attempt for job in ended[:-1]] == [2, *[1] * 6]
    for job, size in zip(ended[:-1], sizes, strict=False):
        assert (job.num_ok, job.num_error) == (size, 0)
        assert world.rows(job)["row_index"].to_pylist() == list(range(size))
