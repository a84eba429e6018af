"""One attempt at a job: shards go out to an engine, batches come in to the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace

from jobs.driver_process import DriverProcess, EngineLostError
from jobs.isolation import RowLoss
from jobs.job_run import JobRun
from jobs.messages import (
    WINDOW_OUTPUTS,
    AddShard,
    BatchDone,
    DriverFailed,
    DriverReady,
    EndJob,
    Event,
    JobEnded,
    JobFailed,
    JobReady,
    RowsFailed,
    StartJob,
)
from jobs.records import JobError, Shard, StorageError, UnreachableError

_STORE_ERRORS = {"refused": StorageError, "unreachable": UnreachableError}

log = logging.getLogger("jobs.dispatch")


class RowsFailedError(Exception):
    """A sweep with these rows on board failed; the driver is well."""

    def __init__(self, rows: tuple[int, ...], loss: RowLoss) -> None:
        super().__init__(loss.reason)
        self.rows = rows
        self.loss = loss


def start_command(attempt: int, run: JobRun) -> StartJob:
    """What starts an attempt: where rows are finished, on the device that they came from."""
    job, began_on, reason = run.job, run.began_on, ""
    spec = job.spec
    if began_on is not None and spec.engine.device == "auto":
        spec = replace(spec, engine=replace(spec.engine, device=began_on))
        reason = f"the job's first rows were computed on a {began_on.upper()}"
    max_rows = run.isolation.max_rows
    return StartJob(attempt, spec, job.manifest, job.created_at, max_rows, device_reason=reason)


class Dispatch:
    """One attempt, from its start to its end or the engine's.

    Where rows are suspected of having brought an engine down, it runs these alone.

    attempt: a number that no other attempt of this runner has
    """

    def __init__(self, attempt: int, run: JobRun, driver: DriverProcess) -> None:
        self.run = run
        self._driver = driver
        self._is_ready = False
        self._is_over = False
        self._attempt = attempt
        self._shards: Iterator[Shard] = run.shards()
        self._num_outputs = 0  # sent, and not come back
        self._suspects = frozenset(run.isolation.rows)
        driver.send(start_command(attempt, run))

    @property
    def is_through(self) -> bool:
        """Whether all its rows are finished."""
        if self._suspects:
            return self._suspects.isdisjoint(self.run.isolation.rows)
        return self.run.is_complete

    def take(self, event: Event) -> None:
        """Act on an event. One of another attempt is stale and is dropped.

        Raises RowsFailedError, JobError: the job cannot go on as it is.
        """
        if isinstance(event, DriverReady):
            self.run.note({"ray_s": event.ray_s})
        elif not isinstance(event, DriverFailed) and event.attempt == self._attempt:
            self._take_own(event)

    def _take_own(self, event: Event) -> None:
        match event:
            case JobReady(record=record):
                self._is_ready = True
                self.run.note(record)
                self._top_up()
            case BatchDone():
                self.run.commit(event)
                self._num_outputs -= len(event.batch.row_indices) if event.batch else 0
                self._top_up()
            case JobFailed(reason=reason, detail=detail, store=store):
                log.error("the engine actor reports:\n%s", detail)
                raise _STORE_ERRORS[store](reason) if store else JobError(reason)
            case RowsFailed(rows=rows, loss=loss, detail=detail):
                log.warning("a sweep with %d rows on board failed:\n%s", len(rows), detail)
                raise RowsFailedError(rows, loss)
            case JobEnded():
                self._is_over = True

    def end(self) -> None:
        """Tell the actor that no more rows of this attempt are wanted."""
        self._driver.send(EndJob(self._attempt))

    def drain(self, timeout_s: float) -> None:
        """End the attempt and take what its rows have still brought.

        Raises EngineLostError: the engine is gone, still loads, or has not answered after
            `timeout_s` seconds.
        """
        if not self._is_ready:
            raise EngineLostError("it was still loading")
        self.end()
        deadline = time.monotonic() + timeout_s
        while not self._is_over:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise EngineLostError(f"it did not stop within {timeout_s:.0f} s")
            for event in self._driver.wait(left_s):
                self.take(event)

    def _top_up(self) -> None:
        while self._num_outputs < WINDOW_OUTPUTS:
            shard = next(self._shards, None)
            if shard is None:
                return
            self._num_outputs += self.run.num_outputs(shard)
            failed = self.run.isolation.failed
            own = {row: failed[row] for row in failed if shard.begin <= row < shard.end}
            self._driver.send(AddShard(self._attempt, shard, own))
