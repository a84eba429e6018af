"""Jobs from the store to Parquet through the real runner, Ray and engine, on a tiny model.

One runner serves the module: a start of Ray takes seconds. Its jobs are of several kinds, and the
order of the tests is that of the file.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from engine import Engine, Request, SamplingParams
from jobs.control import ensure_runner, runner_status, stop_runner
from jobs.home import Home
from jobs.processes import ProcessId, find_instance, read_leader
from jobs.records import Job
from jobs.results import read_results
from jobs.store import JobStore
from tests.runner_helpers import (
    MODEL,
    SMALL_ENGINE,
    make_home,
    queue_job,
    wait_over,
    wait_until,
)

LONG_ROWS = 400
LONG_TOKENS = 200


@dataclass
class World:
    """A state folder with its store, and a folder for inputs."""

    home: Home
    store: JobStore
    inputs: Path
    count: int = 0

    def queue(self, prompts: list[str | None], **options: Any) -> Job:
        self.count += 1
        return queue_job(self.store, self.inputs / f"{self.count}.parquet", prompts, **options)

    def run(self, prompts: list[str | None], **options: Any) -> Job:
        job = self.queue(prompts, **options)
        ensure_runner(self.home)
        return wait_over(self.store, job)

    def results(self, job: Job) -> pa.Table:
        return read_results(self.store.finished(job.id))

    def run_until(self, job: Job, num_rows: int) -> None:
        ensure_runner(self.home)
        wait_until(lambda: self.store.job(job.id).num_ok >= num_rows)
        assert self.store.job(job.id).state == "running", "the job is too short for this test"

    def processes(self) -> set[ProcessId]:
        """All processes of the runner and below it."""
        pid, leader = runner_status(self.home).pid, read_leader(self.home.driver_path)
        assert pid is not None and leader is not None
        runner = ProcessId.of(pid)
        assert runner is not None
        return {runner, *find_instance(f"{self.home.key}-", [leader])}

    def role(self, title: str) -> ProcessId:
        """The one process of ours with this in its name."""
        (found,) = [p for p in self.processes() if title in psutil.Process(p.pid).name()]
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    home = make_home(folder / "home")
    with JobStore(home.state_path) as store:
        yield World(home, store, folder)
        stop_runner(home)


def alone(prompts: list[str], max_tokens: int) -> list[str]:
    """What the engine says without any of this."""
    texts: dict[int, str] = {}
    with Engine(MODEL, SMALL_ENGINE) as engine:
        for row, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            token_ids = pa.array(engine.tokenizer.encode(prompt), pa.int32()).to_numpy()
            engine.add(Request(row_index=row, token_ids=token_ids, params=params))
        while engine.has_work:
            texts |= {row.row_index: row.text for row in engine.sweep()}
    return [texts[row] for row in range(len(prompts))]


def test_every_row_has_one_result_and_bad_ones_say_why(world: World) -> None:
    """Cases 1, 7, 8 and 11: one bad row fails alone; the order and the ids are the input's."""
    prompts: list[str | None] = [f"number {row}" for row in range(1000)]
    wanted: dict[int, str] = {500: "context_length_exceeded"}
    prompts[500] = "x" * 200_000
    for row in range(100, 600, 100):
        prompts[row + 1], wanted[row + 1] = None, "invalid_prompt"
        prompts[row + 2], wanted[row + 2] = "", "empty_prompt"
    job = world.run(prompts, shard_rows=64)
    assert (job.state, job.exit_code, job.num_ok, job.num_error) == ("completed", 3, 989, 11)
    table = world.results(job)
    assert table["row_index"].to_pylist() == list(range(1000))
    assert table["id"].to_pylist() == [f"row {row}" for row in range(1000)]
    codes = {row: code for row, code in enumerate(table["error_code"].to_pylist()) if code}
    assert codes == wanted
    assert "200002 tokens" in table["error_message"][500].as_py()
    good = [row for row in range(1000) if row not in codes]
    assert {table["completion_tokens"][row].as_py() for row in good} == {4}
    assert job.record["num_threads"] >= 1
    assert {"ray_s", "load_s", "compile_s"} <= set(job.record)


def test_the_next_job_finds_the_engine_loaded_and_says_what_the_engine_alone_says(
    world: World,
) -> None:
    actor = world.role("EngineActor")
    prompts: list[str | None] = [f"again {row}" for row in range(40)]
    job = world.run(prompts, max_tokens=12, seed=5)
    assert world.role("EngineActor") == actor
    assert "load_s" not in job.record
    texts = world.results(job)["generated_text"].to_pylist()
    assert texts == alone([prompt or "" for prompt in prompts], 12)


def test_a_model_that_does_not_load_fails_its_job_alone(world: World) -> None:
    """Case 14: the reason names the file; the runner goes on with the next job."""
    broken = world.inputs / "broken.gguf"
    broken.write_bytes(b"<!DOCTYPE html>")
    job = world.run(["hello"], model=str(broken))
    assert (job.state, job.exit_code) == ("failed", 1)
    assert "broken.gguf" in (job.reason or "")
    gone = world.run(["hello"], model=str(world.inputs / "gone.gguf"))
    assert "gone.gguf" in (gone.reason or "")
    assert world.run(["hello"]).exit_code == 0


def test_all_sockets_are_on_loopback_and_secrets_are_private(world: World) -> None:
    """Case 104: every listening socket of every process of ours, during a job."""
    job = world.queue(["busy"] * LONG_ROWS, max_tokens=LONG_TOKENS, shard_rows=32, dedupe=False)
    world.run_until(job, 1)
    processes = world.processes()
    names = {psutil.Process(process.pid).name() for process in processes}
    assert {"raylet", "gcs_server"} <= names
    assert not any("dashboard" in name.lower() and "agent" not in name.lower() for name in names)
    listening = [
        (process.pid, connection.laddr)
        for process in processes
        for connection in psutil.Process(process.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or not connection.raddr
    ]
    assert listening
    strays = [
        (pid, address)
        for pid, address in listening
        if address.ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")
    ]
    assert strays == []
    assert world.home.ray_token_path.stat().st_mode & 0o777 == 0o600
    driver = next(p for p in processes if "--temp-dir" in psutil.Process(p.pid).cmdline())
    command = psutil.Process(driver.pid).cmdline()
    ray_folder = Path(command[command.index("--temp-dir") + 1])
    assert ray_folder.parent.stat().st_mode & 0o777 == 0o700
    assert (world.home.path / "jobs").stat().st_mode & 0o777 == 0o700


def test_a_killed_engine_actor_costs_no_row(world: World) -> None:
    """The job of the test before goes on by itself in a new engine."""
    job = world.store.list_jobs()[-1]
    assert world.store.job(job.id).state == "running"
    os.kill(world.role("EngineActor").pid, signal.SIGKILL)
    done = wait_over(world.store, job)
    assert (done.state, done.num_ok) == ("completed", LONG_ROWS)
    table = world.results(done)
    assert table["row_index"].to_pylist() == list(range(LONG_ROWS))
    assert len(set(table["generated_text"].to_pylist())) == 1
    assert "lost its engine" in world.home.job_log_path(job.id).read_text()


def test_stopping_the_runner_leaves_nothing_and_the_job_goes_on_later(world: World) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    job = world.queue(
        [f"stop me {row}" for row in range(LONG_ROWS)], max_tokens=LONG_TOKENS, shard_rows=32
    )
    world.run_until(job, 1)
    processes = world.processes()
    assert stop_runner(world.home)
    assert not any(process.is_running() for process in processes)
    assert set(os.listdir("/dev/shm")) <= shared_memory
    assert not list(Path("/tmp").glob(f"ntx-{world.home.key}-*"))
    stopped = world.store.job(job.id)
    assert stopped.state == "interrupted"
    kept = world.results(stopped)
    assert kept.num_rows == stopped.num_ok
    ensure_runner(world.home)
    done = wait_over(world.store, job)
    assert (done.state, done.num_ok, done.attempt) == ("completed", LONG_ROWS, 2)
    assert world.results(done)["row_index"].to_pylist() == list(range(LONG_ROWS))
