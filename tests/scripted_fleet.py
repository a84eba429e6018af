"""A driver with several engines for tests of the dispatch, without Ray and without threads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from jobs.driver_process import DriverLostError
from jobs.isolation import RowLoss
from jobs.messages import (
    AddShard,
    BatchDone,
    Command,
    EndJob,
    EngineLost,
    EnginesPlaced,
    Event,
    JobEnded,
    JobFailed,
    JobReady,
    PlaceEngines,
    Progress,
    RowsFailed,
    StartJob,
)
from jobs.records import Job
from jobs.shard_pool import rows_to_run
from jobs.store import JobStore
from tests.job_factories import bad_row, finish_rows, ok_row

MOST_ON_BOARD = 8


class Engine:
    """Finishes at most `speed` rows, those longest on board, at each step.

    deadly: it is lost in a step with one of these rows on board
    breaks: its sweep fails with one of these rows on board
    """

    def __init__(self, number: int, speed: int, deadly: set[int], breaks: set[int]) -> None:
        self.number = number
        self.speed = speed
        self.deadly = deadly
        self.breaks = breaks
        self.starts: list[StartJob] = []
        self.loads = True
        self.boards: list[list[int]] = []
        self._ready = False
        self._job: Job | None = None
        self._drop()

    def _drop(self) -> None:
        self._waiting: list[int] = []
        self._shards: dict[int, set[int]] = {}
        self._failed: dict[int, RowLoss] = {}

    def start(self, command: StartJob, job: Job) -> None:
        self.starts.append(command)
        self._ready, self._job = False, job
        self._drop()

    def add(self, command: AddShard) -> None:
        rows = rows_to_run(command.shard, 1)
        self._waiting += rows
        self._shards[command.shard.number] = set(rows)
        self._failed |= command.failed

    def step(self) -> Iterator[Event]:
        if not self.starts:
            return
        start = self.starts[-1]
        attempt = start.attempt
        if not self._ready:
            self._ready = True
            if not self.loads:
                yield JobFailed(attempt, f"engine {self.number} does not load", engine=self.number)
                return
            yield JobReady(attempt, {"device": "none"}, self.number)
            return
        board = self._waiting[: start.max_rows or MOST_ON_BOARD]
        alive = [row for row in board if row not in self._failed]
        if board:
            self.boards.append(board)
        if self.deadly & set(alive):
            self._drop()
            yield EngineLost(attempt, "its process is gone", rows=tuple(alive), engine=self.number)
            return
        if self.breaks & set(alive):
            self._drop()
            loss = RowLoss("internal_error", "ValueError: no")
            yield RowsFailed(attempt, tuple(alive), loss, "", self.number)
            return
        done = board[: self.speed]
        if not done:
            return
        self._waiting = self._waiting[len(done) :]
        for rows in self._shards.values():
            rows -= set(done)
        over = tuple(number for number, rows in self._shards.items() if not rows)
        for number in over:
            del self._shards[number]
        assert self._job is not None
        results = [
            bad_row(row, self._failed[row].code, self._failed[row].reason)
            if row in self._failed
            else ok_row(row)
            for row in done
        ]
        progress = Progress(len(alive), len(self._waiting), 1, 2, 3, time.time())
        batch = finish_rows(self._job, results)
        yield BatchDone(attempt, batch, over, progress, self.number)


class ScriptedFleet:
    """See `Engine`. lost_after: the driver is lost at so many calls of `wait`"""

    def __init__(
        self,
        store: JobStore,
        speeds: Sequence[int],
        *,
        deadly: Sequence[int] = (),
        breaks: Sequence[int] = (),
        lost_after: int | None = None,
    ) -> None:
        self.engines = [
            Engine(number, speed, set(deadly), set(breaks)) for number, speed in enumerate(speeds)
        ]
        self._store = store
        self._events: list[Event] = []
        self._lost_after = lost_after
        self._num_waits = 0

    def send(self, command: Command) -> None:
        match command:
            case PlaceEngines(attempt=attempt):
                names = tuple(f"node {engine.number}" for engine in self.engines)
                self._events.append(EnginesPlaced(attempt, names, "asked for"))
            case StartJob(engine=engine):
                (job,) = self._store.list_jobs()
                self.engines[engine].start(command, job)
            case AddShard(engine=engine):
                self.engines[engine].add(command)
            case EndJob(attempt=attempt, engine=engine):
                self._events.append(JobEnded(attempt, engine))

    def wait(self, timeout_s: float, others: Sequence[int] = ()) -> list[Event]:
        self._num_waits += 1
        if self._num_waits == self._lost_after:
            raise DriverLostError("a process of Ray is gone")
        events, self._events = self._events, []
        for engine in self.engines:
            events += engine.step()
        return events

    def close(self) -> None:
        pass
