"""The loop around the engine: shards in, batches out, on a real engine and input, without Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Engine
from jobs.engine_loop import EngineLoop, MakeEngine
from jobs.messages import (
    AddShard,
    BatchDone,
    EndJob,
    Event,
    JobEnded,
    JobFailed,
    JobReady,
    RowsFailed,
    StartJob,
)
from jobs.records import Job, Shard
from jobs.results import blob_table
from jobs.store import JobStore
from tests.runner_helpers import MODEL, SMALL_ENGINE, make_home, queue_job

NUM_ROWS = 60


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(MODEL, SMALL_ENGINE) as engine:
        yield engine


class Loop:
    """An EngineLoop in its thread, and all that it has said."""

    def __init__(self, make_engine: MakeEngine) -> None:
        self._loop = EngineLoop(make_engine)
        self.events: list[Event] = []
        self.send = self._loop.send
        self.poll = self._loop.poll
        threading.Thread(target=self._loop.run, daemon=True).start()

    def until(self, kind: type[Event], count: int = 1) -> list[Any]:
        """Wait until `count` events of a kind have come; returns them."""
        while len(found := [event for event in self.events if isinstance(event, kind)]) < count:
            events = self._loop.poll(30.0)
            assert events, f"only {self.events} after 30 s"
            failed = [event for event in events if isinstance(event, RowsFailed)]
            assert not failed, failed
            self.events += events
        return found

    def until_shards(self, count: int) -> list[BatchDone]:
        while True:
            batches = [event for event in self.events if isinstance(event, BatchDone)]
            if sum(len(batch.shards_done) for batch in batches) >= count:
                return batches
            self.until(BatchDone, len(batches) + 1)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    prompts: list[str | None] = [f"prompt {row}" for row in range(NUM_ROWS)]
    prompts[7] = None
    with JobStore(make_home(tmp_path / "home").state_path) as store:
        return queue_job(store, tmp_path / "in.parquet", prompts)


def start(job: Job, attempt: int) -> StartJob:
    return StartJob(attempt, job.spec, job.manifest, job.created_at)


def row_indices(batches: list[BatchDone]) -> list[int]:
    return [row for event in batches if event.batch for row in event.batch.row_indices]


def test_each_row_of_the_shards_comes_back_once(engine: Engine, job: Job) -> None:
    loop = Loop(lambda command: (engine, {}))
    loop.send(start(job, 1))
    (ready,) = loop.until(JobReady)
    assert {"load_s", "compile_s", "num_threads"} <= set(ready.record)
    done = tuple(range(20, 30))
    loop.send(AddShard(1, Shard(number=0, begin=0, end=20)))
    loop.send(AddShard(1, Shard(number=1, begin=20, end=NUM_ROWS, done=done)))
    batches = loop.until_shards(2)
    assert sorted(row_indices(batches)) == [*range(20), *range(30, NUM_ROWS)]
    assert sorted(number for batch in batches for number in batch.shards_done) == [0, 1]
    assert sum(event.batch.num_error for event in batches if event.batch) == 1
    last = batches[-1]
    assert last.batch is not None
    assert blob_table(last.batch.ipc).num_rows == len(last.batch.row_indices)
    assert last.progress.rows_on_board == 0
    assert last.progress.completion_tokens == 4 * 49
    assert last.progress.first_admission_at is not None


def test_sweeps_are_told_before_any_row_is_finished(
    engine: Engine, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.engine_loop.FLUSH_INTERVAL_S", 0.0)
    loop = Loop(lambda command: (engine, {}))
    loop.send(start(job, 1))
    loop.send(AddShard(1, Shard(number=0, begin=0, end=5)))
    first, *_, last = loop.until_shards(1)
    assert first.batch is None
    assert first.progress.num_sweeps == 1
    assert first.progress.achieved["num_sweeps"] == 1
    assert last.progress.achieved["tokens_per_s"] > 0
    assert "predicted" in loop.until(JobReady)[0].record


def test_shards_of_another_attempt_are_not_run(engine: Engine, job: Job) -> None:
    loop = Loop(lambda command: (engine, {}))
    loop.send(start(job, 2))
    loop.send(AddShard(1, Shard(number=0, begin=0, end=20)))
    loop.send(AddShard(2, Shard(number=5, begin=20, end=30)))
    batches = loop.until_shards(1)
    assert sorted(row_indices(batches)) == list(range(20, 30))
    assert {batch.attempt for batch in batches} == {2}


def test_a_job_that_ends_drops_its_rows_and_leaves_the_engine_free(
    engine: Engine, job: Job
) -> None:
    loop = Loop(lambda command: (engine, {}))
    loop.send(start(job, 1))
    loop.send(AddShard(1, Shard(number=0, begin=0, end=NUM_ROWS)))
    loop.send(EndJob(1))
    loop.until(JobEnded)
    assert not engine.has_work
    loop.send(start(job, 2))
    loop.send(AddShard(2, Shard(number=0, begin=40, end=NUM_ROWS)))
    loop.until(JobReady, 2)
    seen = len(loop.events)
    loop.until_shards(1)
    later = [event for event in loop.events[seen:] if isinstance(event, BatchDone)]
    assert sorted(row_indices(later)) == list(range(40, NUM_ROWS))


def test_an_engine_that_does_not_load_fails_the_job(job: Job) -> None:
    def make(command: StartJob) -> tuple[Engine, dict[str, Any]]:
        return Engine("/nowhere/model.gguf", command.spec.engine), {}

    loop = Loop(make)
    loop.send(start(job, 3))
    (failed,) = loop.until(JobFailed)
    assert failed.attempt == 3
    assert "/nowhere/model.gguf" in failed.reason
    assert "Traceback" in failed.detail


def test_an_input_that_changed_fails_the_job_before_any_row(engine: Engine, job: Job) -> None:
    path = Path(job.spec.input)
    path.write_bytes(path.read_bytes() + b" ")
    loop = Loop(lambda command: (engine, {}))
    loop.send(start(job, 1))
    (failed,) = loop.until(JobFailed)
    assert "in.parquet" in failed.reason
    assert not any(isinstance(event, BatchDone) for event in loop.events)
