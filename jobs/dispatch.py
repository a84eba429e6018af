"""A job on the engines of a driver: shards go out to them, batches come in to the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from jobs.driver_process import DriverLostError, DriverProcess
from jobs.handout import outputs_to_give
from jobs.isolation import Isolation, RowLoss
from jobs.job_run import JobRun
from jobs.messages import (
    AddShard,
    BatchDone,
    DriverFailed,
    DriverReady,
    EndJob,
    EngineLost,
    EnginesPlaced,
    Event,
    JobEnded,
    JobFailed,
    JobReady,
    PlaceEngines,
    RowsFailed,
    StartJob,
)
from jobs.records import JobError, Shard, StorageError, UnreachableError
from jobs.shard_pool import ShardPool, rows_to_run

MAX_FRUITLESS_RESTARTS = 3
MAX_ROWS_LOST_IN_SERIES = 8
_STORE_ERRORS = {"refused": StorageError, "unreachable": UnreachableError}

log = logging.getLogger("jobs.dispatch")


def place_command(attempt: int, run: JobRun) -> PlaceEngines:
    """What places a job's engines: where rows are finished, on the device that they came from."""
    spec, reason = run.job.spec, ""
    began_on = run.began_on
    if began_on is not None and spec.engine.device == "auto":
        spec = replace(spec, engine=replace(spec.engine, device=began_on))
        reason = f"the job's first rows were computed on a {began_on.upper()}"
    return PlaceEngines(attempt, spec, run.job.manifest, device_reason=reason)


@dataclass(slots=True)
class _Engine:
    """One of the engines that share a job, in its present attempt.

    isolation: rows suspected of having brought it down; it alone runs them, before all others
    suspects: those that this attempt is for; empty where it runs any
    shards: given to it, by number, with rows that are not finished
    held: outputs given to it and not finished; most_on_board: of them, at once
    fruitless: times that it was lost since a row of it was finished
    """

    number: int
    isolation: Isolation
    attempt: int = 0
    is_ready: bool = False
    is_over: bool = False
    suspects: frozenset[int] = frozenset()
    shards: dict[int, Shard] = field(default_factory=dict)
    held: int = 0
    most_on_board: int = 0
    fruitless: int = 0


class Dispatch:
    """A job from the placing of its engines to its end, or to the loss of the driver.

    An engine that is lost gets its rows on board back to itself, fewer at once, since they may be
    why; its other rows go to whoever is first to need some. The others do not notice.

    attempts: numbers that this runner has not used
    """

    def __init__(self, attempts: Iterator[int], run: JobRun, driver: DriverProcess) -> None:
        self.run = run
        self._attempts = attempts
        self._driver = driver
        self._engines: dict[int, _Engine] = {}
        self._pool = ShardPool((), run.num_samples)
        self._device_reason = ""
        self._is_ending = False
        self._placing = next(attempts)
        driver.send(place_command(self._placing, run))

    def take(self, event: Event) -> None:
        """Act on an event. One of another attempt is stale and is dropped.

        Raises JobError: the job cannot go on.
        Raises DriverLostError: an engine cannot be told what to do.
        """
        match event:
            case DriverReady(ray_s=ray_s):
                self.run.note({"ray_s": ray_s})
            case DriverFailed():
                pass
            case EnginesPlaced(attempt=self._placing):
                self._begin(event)
            case JobFailed(attempt=self._placing):
                raise JobError(event.reason)
            case EnginesPlaced():
                pass
            case _:
                engine = self._engines.get(event.engine)
                if engine is not None and engine.attempt == event.attempt:
                    self._take_own(engine, event)

    def _begin(self, placed: EnginesPlaced) -> None:
        """Start as many engines as there are outputs for."""
        run = self.run
        run.forget_engines()
        self._device_reason = placed.device_reason
        count = min(len(placed.nodes), run.total - run.num_done)
        for number in [n for n in run.isolations if n >= count]:
            del run.isolations[number]
        self._engines = {n: _Engine(n, run.isolations[n]) for n in range(count)}
        suspects = {row for each in self._engines.values() for row in each.isolation.all_rows}
        self._pool = ShardPool(run.shards(without=suspects), run.num_samples)
        for engine in self._engines.values():
            run.note_engine(engine.number, {"node": placed.nodes[engine.number]})
            self._start(engine)

    def _start(self, engine: _Engine) -> None:
        """A new attempt of an engine: at its suspects, or at whatever is left."""
        job, isolation = self.run.job, engine.isolation
        engine.attempt = next(self._attempts)
        engine.is_ready = engine.is_over = False
        engine.suspects = frozenset(isolation.rows)
        engine.shards, engine.held = {}, 0
        self._driver.send(
            StartJob(
                engine.attempt,
                job.spec,
                job.manifest,
                job.created_at,
                isolation.max_rows,
                device_reason=self._device_reason,
                engine=engine.number,
            )
        )

    def _take_own(self, engine: _Engine, event: Any) -> None:
        match event:
            case JobReady(record=record):
                engine.is_ready = True
                self.run.note_engine(engine.number, record)
                self._top_up()
            case BatchDone():
                self._take_batch(engine, event)
            case JobFailed(reason=reason, detail=detail, store=store):
                log.error("engine %d reports:\n%s", engine.number, detail)
                if store:
                    raise _STORE_ERRORS[store](reason)
                self._retire(engine, reason)
            case RowsFailed(rows=rows, loss=loss, detail=detail):
                log.warning("a sweep with %d rows on board failed:\n%s", len(rows), detail)
                self._lose(engine, rows, loss)
            case EngineLost():
                self._take_loss(engine, event)
            case JobEnded():
                engine.is_over = True

    def _take_batch(self, engine: _Engine, event: BatchDone) -> None:
        self.run.commit(event)
        engine.most_on_board = max(engine.most_on_board, event.progress.rows_on_board)
        for number in event.shards_done:
            engine.shards.pop(number, None)
        batch = event.batch
        if batch is not None and batch.row_indices:
            engine.held -= len(batch.row_indices)
            engine.fruitless = 0
            suspects = engine.isolation.rows
            rows = self.run.whole_rows(batch.row_indices) if suspects else batch.row_indices
            engine.isolation.settle(rows, batch.num_ok)
        if self._is_ending or self.run.is_complete:
            return
        if engine.suspects and engine.suspects.isdisjoint(engine.isolation.rows):
            self._end(engine)
            self._start(engine)
        self._top_up()

    # ---- rows out ------------------------------------------------------------------------

    def _top_up(self) -> None:
        """Give each engine that needs them more rows, as long as there are any."""
        for engine in self._engines.values():
            if not engine.is_ready or engine.is_over or self._is_ending:
                continue
            if engine.suspects:
                if not engine.shards:
                    pool = ShardPool(
                        self.run.shards_of(engine.isolation.rows), self.run.num_samples
                    )
                    self._give(engine, pool, self.run.total)
                continue
            more = outputs_to_give(
                left=self.run.total - self.run.num_done,
                held=engine.held,
                most_on_board=engine.most_on_board,
                num_engines=len(self._engines),
            )
            self._give(engine, self._pool, more)

    def _give(self, engine: _Engine, pool: ShardPool, num_outputs: int) -> None:
        while num_outputs > 0 and (shard := pool.take(num_outputs)) is not None:
            count = self.run.num_outputs(shard)
            num_outputs -= count
            engine.held += count
            engine.shards[shard.number] = shard
            failed = engine.isolation.failed
            own = {row: failed[row] for row in failed if shard.begin <= row < shard.end}
            self._driver.send(AddShard(engine.attempt, shard, own, engine.number))

    # ---- losses --------------------------------------------------------------------------

    def _take_loss(self, engine: _Engine, lost: EngineLost) -> None:
        log.warning("job %s lost its engine %d: %s", self.run.job.id, engine.number, lost.reason)
        if lost.detail:
            log.warning("the engine actor's last words:\n%s", lost.detail)
        self.run.note_loss(engine.number, lost.reason)
        self._lose(engine, lost.rows, RowLoss(lost.code, lost.reason))

    def _lose(self, engine: _Engine, rows: Iterable[int], loss: RowLoss) -> None:
        """What an engine was given is not finished there: share it out again, and start anew."""
        if self._is_ending:
            engine.is_over = True
            return
        num_samples = self.run.num_samples
        unfinished = {
            row for shard in self._rest(engine) for row in rows_to_run(shard, num_samples)
        }
        accused = [row for row in rows if row in unfinished]
        engine.fruitless = 0 if accused else engine.fruitless + 1
        if accused:
            accuse(self.run, engine.isolation, accused, loss)
        elif engine.fruitless > MAX_FRUITLESS_RESTARTS:
            reason = f"the engine was lost {engine.fruitless} times without a finished row"
            self._retire(engine, f"{reason}; the last time: {loss.reason}")
            return
        self._take_back(engine, without=engine.isolation.all_rows)
        self._start(engine)
        self._top_up()

    def _rest(self, engine: _Engine, without: Collection[int] = ()) -> list[Shard]:
        """What is not finished of that which an engine was given."""
        rest = [self.run.rest_of(shard, without) for shard in engine.shards.values()]
        return [shard for shard in rest if shard is not None]

    def _take_back(self, engine: _Engine, without: Collection[int] = ()) -> None:
        self._pool.give_back(self._rest(engine, without))
        engine.shards, engine.held = {}, 0

    def _retire(self, engine: _Engine, reason: str) -> None:
        """Do without an engine. Raises JobError: it was the last."""
        if len(self._engines) == 1:
            raise JobError(reason)
        del self._engines[engine.number]
        rows = sorted(engine.isolation.all_rows)
        self._take_back(engine, without=rows)
        self._pool.give_back(self.run.shards_of(rows))
        self.run.isolations.pop(engine.number, None)
        self.run.note_loss(engine.number, reason)
        log.error("job %s goes on without engine %d: %s", self.run.job.id, engine.number, reason)
        self._top_up()

    # ---- the end -------------------------------------------------------------------------

    def _end(self, engine: _Engine) -> None:
        self._driver.send(EndJob(engine.attempt, engine.number))

    def end(self) -> None:
        """Tell the engines that no more rows of this job are wanted."""
        self._is_ending = True
        for engine in self._engines.values():
            self._end(engine)

    def drain(self, timeout_s: float) -> None:
        """End the job and take what its rows have still brought.

        Raises DriverLostError: an engine still loads, or has not answered after `timeout_s`
            seconds, or the driver is gone.
        """
        loads = not self._engines
        for engine in self._engines.values():
            engine.is_over = engine.is_over or not engine.is_ready
            loads = loads or not engine.is_ready
        self.end()
        deadline = time.monotonic() + timeout_s
        while not all(engine.is_over for engine in self._engines.values()):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise DriverLostError(f"it did not stop within {timeout_s:.0f} s")
            for event in self._driver.wait(left_s):
                self.take(event)
        if loads:
            raise DriverLostError("an engine was still loading")


def accuse(run: JobRun, isolation: Isolation, rows: list[int], loss: RowLoss) -> None:
    """Run the rows of a loss again, fewer at once; a row that was alone once too often is given up.

    Raises JobError: row after row is given up, so the rows are not the cause.
    """
    isolation.accuse(rows, loss)
    log.warning(
        "job %s: %s, with %d on board; what was there runs again, at most %d at once%s",
        run.job.id,
        loss.reason,
        len(rows),
        isolation.max_rows,
        f"; row {rows[0]} is given up: {loss.code}" if rows[0] in isolation.failed else "",
    )
    if isolation.num_failed_in_series > MAX_ROWS_LOST_IN_SERIES:
        raise JobError(
            f"{isolation.num_failed_in_series} rows in succession failed alone, so the cause "
            f"is not in them; the last time: {loss.reason}"
        )
