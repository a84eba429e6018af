"""Jobs on several engines, through Ray: the same texts as from one, whatever happens to one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from engine import EngineConfig, SamplingParams
from engine.machine import usable_cores
from jobs.control import ensure_runner, stop_runner
from jobs.driver_process import clear_leftovers
from jobs.home import Home
from jobs.processes import ProcessId, read_leader
from jobs.records import Job
from jobs.results import read_results
from jobs.store import JobStore
from ntx_batch.status import status_record
from scripts.chaos import instance
from tests.runner_helpers import SMALL_ENGINE, make_home, queue_job, wait_over, wait_until

ONE_CORE = replace(SMALL_ENGINE, num_threads=1)
TWO_CORES = replace(SMALL_ENGINE, num_threads=2)
PAGE_TEXT = " ".join(str(number) for number in range(60))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(usable_cores() < 2, reason="two engines on CPUs need two cores"),
]


@dataclass
class World:
    home: Home
    store: JobStore
    inputs: Path
    count: int = 0

    def queue(self, prompts: list[str], **spec: Any) -> Job:
        self.count += 1
        return queue_job(self.store, self.inputs / f"{self.count}.parquet", list(prompts), **spec)

    def run(self, prompts: list[str], **spec: Any) -> Job:
        job = self.queue(prompts, **spec)
        ensure_runner(self.home)
        return wait_over(self.store, job, 240)

    def results(self, job: Job) -> pa.Table:
        return read_results(self.store.finished(job.id))

    def actors(self) -> list[ProcessId]:
        """Engine actors, the oldest first."""
        return sorted(
            (p for p in instance(self.home) if b"EngineActor" in name_of(p)),
            key=lambda process: process.start_time,
        )


def name_of(process: ProcessId) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    home = make_home(folder / "home")
    with JobStore(home.state_path) as store:
        yield World(home, store, folder)
    stop_runner(home)
    clear_leftovers(home)


def test_two_engines_give_the_bytes_of_one_in_input_order(world: World) -> None:
    """Cases 11 and 32: unequal lengths, a seed for some rows, on one engine and on two."""
    prompts = [f"{row * 7919} " + "long " * (row % 40) for row in range(500)]
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9)
    tables, jobs = [], []
    for engines, config in ((1, ONE_CORE), (2, TWO_CORES)):
        job = world.run(prompts, engines=engines, engine=config, params=params, samples=2)
        assert (job.state, job.num_ok) == ("completed", 2 * len(prompts)), job.reason
        tables.append(world.results(job))
        jobs.append(job)
    one, two = tables
    assert two["row_index"].to_pylist() == [row for row in range(500) for _ in range(2)]
    for column in ("id", "row_index", "sample_index", "generated_text", "finish_reason"):
        assert one[column].equals(two[column]), column
    record = status_record(jobs[1], 0.0)["record"]
    assert [engine["num_threads"] for engine in record["engines"]] == [1, 1]
    assert all(engine["tokens_per_s"] > 0 for engine in record["engines"])
    assert record["achieved"]["tokens_per_s"] == pytest.approx(
        sum(engine["tokens_per_s"] for engine in record["engines"]), rel=1e-3
    )
    assert record["progress"]["completion_tokens"] == 2 * 500 * 12
    assert len(jobs[0].record["engines"]) == 1


def test_what_prompts_share_is_computed_at_most_once_on_each_engine(world: World) -> None:
    """Four templates, 50 rows of each, shuffled."""
    prompts = [f"{row % 4} {PAGE_TEXT} is the text of {row}" for row in range(200)]
    computed = {}
    for engines, config in ((1, ONE_CORE), (2, TWO_CORES)):
        job = world.run(prompts, engines=engines, engine=config, max_tokens=4)
        assert job.num_ok == 200
        computed[engines] = job.prompt_tokens - job.reused_tokens
        longest = max(world.results(job)["prompt_tokens"].to_pylist())
    assert computed[2] <= computed[1] + 4 * longest
    assert computed[2] < job.prompt_tokens / 3, "and nothing like all of it"


def test_a_killed_engine_comes_back_while_the_other_works_on(world: World) -> None:
    """Cases 17 and 73: each row once, with the text of a job that nobody disturbed."""
    prompts = [f"prompt number {row}" for row in range(1200)]
    spec = {"engines": 2, "engine": TWO_CORES, "max_tokens": 120}
    job = world.queue(prompts, **spec)
    ensure_runner(world.home)
    store = world.store
    wait_until(lambda: store.job(job.id).num_ok > 50, 120)
    driver, (first, second) = read_leader(world.home.driver_path), world.actors()
    os.kill(first.pid, signal.SIGKILL)
    num_ok = store.job(job.id).num_ok
    wait_until(lambda: store.job(job.id).num_ok > num_ok + 64, 60)
    assert second.is_running(), "it never noticed"
    again = wait_until(lambda: [a for a in world.actors() if a != second], 60)[0]
    num_ok = store.job(job.id).num_ok
    wait_until(lambda: store.job(job.id).num_ok > num_ok + 64, 60)
    assert store.job(job.id).state == "running", "the job is too short for this test"
    os.kill(second.pid, signal.SIGKILL)
    done = wait_over(store, job, 240)
    assert (done.state, done.num_ok) == ("completed", len(prompts))
    assert read_leader(world.home.driver_path) == driver, "Ray was not started anew"
    assert again != first
    assert [engine["num_lost"] for engine in done.record["engines"]] == [1, 1]
    table = world.results(done)
    assert table["row_index"].to_pylist() == list(range(len(prompts)))
    undisturbed = world.results(world.run(prompts, **spec))
    assert table["generated_text"].equals(undisturbed["generated_text"])
    log = world.home.job_log_path(job.id).read_text()
    assert "lost its engine 0" in log and "lost its engine 1" in log


def test_more_engines_than_cores_are_refused(world: World) -> None:
    """Case 77, in the driver: what a submit on another machine could not know."""
    job = world.run(["a"], engines=usable_cores() + 1, engine=EngineConfig())
    assert job.state == "failed"
    assert f"--engines {usable_cores() + 1} asks for as many cores" in (job.reason or "")
