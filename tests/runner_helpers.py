"""State folders, jobs and stand-in drivers for tests of the runner."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import platformdirs

from engine import EngineConfig, FinishedRow, SamplingParams
from jobs.dataset import build_manifest
from jobs.driver_process import DriverLostError
from jobs.home import Home
from jobs.messages import (
    AddShard,
    BatchDone,
    Command,
    EndJob,
    EnginesPlaced,
    Event,
    JobEnded,
    JobFailed,
    JobReady,
    PlaceEngines,
    Progress,
    StartJob,
)
from jobs.records import Job, JobSpec, Shard
from jobs.store import JobStore
from tests.golden import GOLDEN
from tests.job_factories import finish_rows, ok_row, write_input

MODEL = GOLDEN / "llama-q4_0.gguf"
SMALL_ENGINE = EngineConfig(kv_memory_nbytes=64 << 20, sweep_tokens=64)


def make_home(folder: Path) -> Home:
    """A state folder that shares compiled kernels with all other tests."""
    home = Home.open(folder)
    compiled = Path(platformdirs.user_cache_dir("ntx-batch")) / "numba"
    compiled.mkdir(parents=True, exist_ok=True)
    (home.path / "numba").symlink_to(compiled)
    return home


def queue_job(
    store: JobStore,
    path: Path,
    prompts: Sequence[str | None],
    *,
    max_tokens: int = 4,
    environment: dict[str, str] | None = None,
    **spec: Any,
) -> Job:
    """A job over a new input file with an id column beside the prompts."""
    write_input(path, {"id": [f"row {n}" for n in range(len(prompts))], "prompt": prompts})
    values = {
        "model": str(MODEL),
        "params": SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        "engine": SMALL_ENGINE,
    }
    job = JobSpec(input=str(path), **values | spec)
    return store.create_job(job, build_manifest(path), environment or {})


def wait_until(condition: Callable[[], Any], timeout_s: float = 90.0) -> Any:
    """The first true value of `condition`; fails after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not so after {timeout_s:.0f} s"
        time.sleep(0.02)
    return value


def wait_over(store: JobStore, job: Job, timeout_s: float = 90.0) -> Job:
    wait_until(lambda: store.job(job.id).exit_code is not None, timeout_s)
    return store.job(job.id)


class ScriptedDriver:
    """A driver whose engine answers a shard at each `wait`, without Ray.

    answer: the outcome of a row
    lost_after: the engine is lost when it has answered this many shards
    fail: the reason for which no job can start
    """

    def __init__(
        self,
        store: JobStore,
        *,
        answer: Callable[[int], FinishedRow] = ok_row,
        lost_after: int | None = None,
        fail: str | None = None,
    ) -> None:
        self.shards: list[Shard] = []
        self.is_closed = False
        self._store = store
        self._answer = answer
        self._lost_after = lost_after
        self._fail = fail
        self._events: list[Event] = []

    def send(self, command: Command) -> None:
        match command:
            case PlaceEngines(attempt=attempt):
                self._events.append(EnginesPlaced(attempt, ("here",)))
            case StartJob(attempt=attempt, spec=spec):
                self._job = next(job for job in self._store.list_jobs() if job.spec == spec)
                failed = JobFailed(attempt, self._fail or "")
                self._events.append(failed if self._fail else JobReady(attempt, {"device": "none"}))
            case AddShard(attempt=attempt, shard=shard):
                self.shards.append(shard)
                self._events.append(self.answer_to(attempt, shard))
            case EndJob(attempt=attempt):
                # As an engine that hands over what is finished and drops its other rows.
                self._events = [*self._events[:1], JobEnded(attempt)]

    def answer_to(self, attempt: int, shard: Shard) -> BatchDone:
        rows = sorted(set(range(shard.begin, shard.end)) - set(shard.done))
        batch = finish_rows(self._job, [self._answer(row) for row in rows])
        return BatchDone(attempt, batch, (shard.number,), Progress(0, 0, 1, 2, 3, time.time()))

    def wait(self, timeout_s: float, others: Sequence[int] = ()) -> list[Event]:
        if self._lost_after is not None and len(self.shards) > self._lost_after:
            raise DriverLostError("a process of Ray (pid 1) is gone")
        events, self._events = self._events[:1], self._events[1:]
        return events

    def close(self) -> None:
        self.is_closed = True
