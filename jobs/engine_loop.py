"""The loop around an engine: commands in, rows through the engine, batches of results out.

It runs in a thread of the engine actor and knows nothing of Ray. Shards queue up here, so the
engine never drains between them; rows are read and prepared ahead of it, in slices between sweeps.
"""

from __future__ import annotations

import contextlib
import queue
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from engine import Engine, EngineError, FinishedRow, Request, SamplingParams
from jobs.achieved import achieved, of_all_engines
from jobs.board import Board
from jobs.energy import EnergyMeter, open_meter
from jobs.isolation import RowLoss
from jobs.kv_sample import APPROXIMATE, KvSample
from jobs.messages import (
    AddShard,
    BatchDone,
    Command,
    EndJob,
    Event,
    JobEnded,
    JobFailed,
    JobReady,
    Progress,
    RowsFailed,
    StartJob,
)
from jobs.records import JobError, StorageError, UnreachableError
from jobs.row_clock import RowClock
from jobs.row_source import RowSource
from jobs.workload import sample_workload

FLUSH_INTERVAL_S = 1.0
FLUSH_ROWS = 4096
MIN_WAITING = 256  # some more than the engine may pass over while others compute their prefix
READ_TIME_S = 0.1  # of rows, between two sweeps
STALLED_PAUSE_S = 0.05
MAX_STALL_S = 30.0  # then the runner takes the job back, and others may run
FIRST_READ_TIME_S = 0.5  # before any row is on board: what is known then orders the first rows

MakeEngine = Callable[[StartJob], tuple[Engine, Mapping[str, Any]]]
MakeSource = Callable[[StartJob, Engine], RowSource]


class EngineLoop:
    """Runs jobs, one at a time, through one engine that the first of them loads.

    make_engine: loads the engine of a job, and says what each of its jobs should record of it
    make_source: opens a job's rows for an engine
    """

    def __init__(self, make_engine: MakeEngine, make_source: MakeSource = RowSource.open) -> None:
        self._make_engine = make_engine
        self._make_source = make_source
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._facts: Mapping[str, Any] = {}
        self._job: _RunningJob | None = None
        self._attempt = self._number = 0  # of the last job; the engine's among those that share it

    # ---- from other threads --------------------------------------------------------------

    def send(self, command: Command) -> None:
        """Take a command; it is obeyed between two sweeps."""
        self._commands.put(command)

    def poll(self, timeout_s: float) -> list[Event]:
        """All events not yet handed over; waits for the first at most `timeout_s`."""
        events: list[Event] = []
        with contextlib.suppress(queue.Empty):
            events.append(self._events.get(timeout=timeout_s))
            while True:
                events.append(self._events.get_nowait())
        return events

    # ---- the engine's thread -------------------------------------------------------------

    def run(self) -> None:
        """Obey commands and sweep, forever. What fails ends the job, not the loop."""
        while True:
            try:
                self._obey_commands()
                if self._job is not None:
                    self._step(self._job)
            except Exception as error:
                self._fail(error)

    def _obey_commands(self) -> None:
        busy = self._job is not None and not self._job.is_idle
        while True:
            try:
                command = self._commands.get(block=not busy)
            except queue.Empty:
                return
            self._obey(command)
            busy = True

    def _obey(self, command: Command) -> None:
        if isinstance(command, StartJob):
            self._start(command)
        elif self._job is None or command.attempt != self._job.attempt:
            return
        elif isinstance(command, AddShard):
            self._job.source.add_shard(command.shard, command.failed)
        elif isinstance(command, EndJob):
            self._end(self._job)

    def _start(self, command: StartJob) -> None:
        started = time.monotonic()
        self._drop_job()
        self._attempt, self._number = command.attempt, command.engine
        phases: dict[str, Any] = {}
        if self._engine is None:
            self._engine, self._facts = self._make_engine(command)
            loaded = time.monotonic()
            warm_up(self._engine)
            phases["load_s"] = round(loaded - started, 3)
            phases["compile_s"] = round(time.monotonic() - loaded, 3)
        source = self._make_source(command, self._engine)
        engine_facts = {**self._engine.record(), **self._facts}
        meter = open_meter(engine_facts["device"], counts_machine=command.counts_machine)
        self._job = _RunningJob(command, self._engine, source, meter)
        record = {
            **engine_facts,
            "energy": meter.facts(),
            "device_reason": command.device_reason,
            **phases,
            "predicted": self._predict(command),
        }
        self._events.put(JobReady(command.attempt, record, self._number))

    def _predict(self, command: StartJob) -> dict[str, Any] | None:
        engine = self._engine
        if engine is None or engine.rates is None:
            return None
        predicted = engine.predict(sample_workload(command, engine))
        return predicted and of_all_engines(predicted, command.num_engines)

    def _step(self, job: _RunningJob) -> None:
        job.fill()
        if job.waits_for_store():
            time.sleep(STALLED_PAUSE_S)
        try:
            job.sweep()
        except Exception as error:
            self._fail_rows(job, error)
            return
        if job.is_flush_due():
            self._events.put(job.flush())

    def _fail_rows(self, job: _RunningJob, error: Exception) -> None:
        """A sweep failed, so one of its rows may be bad: the runner finds out which."""
        rows, detail = job.rows_on_board(), traceback.format_exc()
        if not rows:
            raise error
        # What the failed sweep holds may be all the memory there is, and the rest needs some.
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, MemoryError):
            loss = RowLoss("out_of_memory", f"the engine ran out of memory: {error}")
        else:
            loss = RowLoss("internal_error", f"{type(error).__name__}: {error}")
        self._flush_all(job)
        self._drop_job()
        self._events.put(RowsFailed(job.attempt, rows, loss, detail, self._number))

    def _end(self, job: _RunningJob) -> None:
        self._flush_all(job)
        self._drop_job()
        self._events.put(JobEnded(job.attempt, self._number))

    def _flush_all(self, job: _RunningJob) -> None:
        while job.source.num_finished:
            self._events.put(job.flush())

    def _drop_job(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.close()

    def _fail(self, error: Exception) -> None:
        known = isinstance(error, EngineError | JobError | OSError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        store, detail = store_fault(error), traceback.format_exc()
        self._events.put(JobFailed(self._attempt, reason, detail, store, self._number))
        self._drop_job()


class _RunningJob:
    """One job inside the loop."""

    def __init__(
        self, command: StartJob, engine: Engine, source: RowSource, meter: EnergyMeter
    ) -> None:
        self.attempt = command.attempt
        self._number = command.engine
        self.engine = engine
        self.source = source
        self._max_rows = command.max_rows
        self._board = None if command.board is None else Board(command.board, command.attempt)
        self._clock = RowClock(command.spec.row_timeout_s)
        self._base = asdict(engine.totals)
        self._sweeps_before = engine.sweeps.totals.copy()
        self._meter = meter
        self._joules_before = meter.joules()
        # One sample is enough for all engines.
        is_measured = engine.config.kv_type in APPROXIMATE and command.engine == 0
        self._kv_sample = KvSample() if is_measured else None
        self._kv_accuracy: dict[str, Any] | None = None
        self._measure_s = 0.0
        self._first_admission_at: float | None = None
        self._began_s = 0.0  # the same moment, on a clock that is never set
        self._flushed_at = time.monotonic()
        self._sweeps_told = engine.sweeps.totals.num_sweeps

    @property
    def is_idle(self) -> bool:
        """Nothing can happen before the next command."""
        return not (self._has_rows or self.source.has_news)

    def waits_for_store(self) -> bool:
        """Whether nothing can be computed before the input's store answers again.

        Raises UnreachableError: it has not for long, and all that was read is finished.
        """
        stall, source = self.source.stall, self.source
        if stall is None or self.engine.has_work or source.num_ready or source.has_news:
            return False
        if stall.age_s > MAX_STALL_S:
            raise stall.error
        return True

    @property
    def _has_rows(self) -> bool:
        return self.engine.has_work or self.source.num_ready > 0 or self.source.has_unread

    def fill(self) -> None:
        """Read ahead, and let as many outputs wait in the engine as it may admit soon."""
        engine, source = self.engine, self.source
        target = max(MIN_WAITING, 2 * engine.num_running)
        self._read_ahead(target)
        if self._max_rows is not None:
            target = min(target, self._max_rows - engine.num_running)
        while engine.num_waiting < target and (request := source.next_request()) is not None:
            engine.add(request)
            if self._kv_sample is not None:
                self._kv_sample.add(request)

    def _read_ahead(self, num_wanted: int) -> None:
        """Prepare rows while the window has room, until time is up."""
        source = self.source
        begun = self._first_admission_at is not None
        deadline = time.monotonic() + (READ_TIME_S if begun else FIRST_READ_TIME_S)
        while source.wants_row(num_wanted):
            if self._board is not None:
                self._board.begin((source.next_row,))
            source.prepare_row()
            has_more = self.engine.has_work or source.num_ready or source.num_finished
            if has_more and time.monotonic() > deadline:
                break
        if self._board is not None:
            self._board.clear()

    def sweep(self) -> None:
        if not self.engine.has_work:
            return
        if self._first_admission_at is None:
            self._first_admission_at = time.time()
            self._began_s = time.monotonic()
        self.engine.admit()
        if self._board is not None:
            self._board.begin(self.rows_on_board())
        for row in self.engine.sweep():
            self._finish(row)
        if self._board is not None:
            self._board.end()
        for (row_index, sample_index), error in self._clock.late_rows(self.engine.rows_on_board()):
            self._finish(self.engine.cancel_row(row_index, sample_index, error))
        self._measure_kv()

    def _finish(self, row: FinishedRow) -> None:
        self.source.finish(row)
        if self._kv_sample is not None:
            self._kv_sample.finish(row)

    def _measure_kv(self) -> None:
        """Once, when the first rows are through; before they are told of, so that it is known."""
        sample, kv_type = self._kv_sample, self.engine.config.kv_type
        if sample is None or not sample.is_complete(no_more=not self._has_rows):
            return
        assert kv_type is not None
        started = time.monotonic()
        self._kv_accuracy, self._kv_sample = sample.measure(self.engine, kv_type), None
        self._measure_s = time.monotonic() - started
        self._kv_accuracy["measure_s"] = round(self._measure_s, 3)

    def rows_on_board(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(row for row, _ in self.engine.rows_on_board()))

    def close(self) -> None:
        self.engine.cancel_all()
        self.source.close()
        if self._board is not None:
            self._board.clear()
            self._board.close()

    def is_flush_due(self) -> bool:
        """Once a second, or when much has come together; at once when the engine runs dry.

        Sweeps without a finished row are news too: those of a large model take long.
        """
        late = time.monotonic() - self._flushed_at >= FLUSH_INTERVAL_S
        if not self.source.has_news:
            return late and self.engine.sweeps.totals.num_sweeps > self._sweeps_told
        return not self._has_rows or late or self.source.num_finished >= FLUSH_ROWS

    def flush(self) -> BatchDone:
        self._flushed_at = time.monotonic()
        self._sweeps_told = self.engine.sweeps.totals.num_sweeps
        batch, shards = self.source.take_finished(FLUSH_ROWS)
        return BatchDone(self.attempt, batch, shards, self._progress(), self._number)

    def _progress(self) -> Progress:
        totals: Mapping[str, Any] = asdict(self.engine.totals)
        sweeps = self.engine.sweeps.totals - self._sweeps_before
        completion_tokens = totals["completion_tokens"] - self._base["completion_tokens"]
        rates, began_at = self.engine.rates, self._first_admission_at
        worked_s = time.monotonic() - self._began_s - self._measure_s
        joules, before = self._meter.joules(), self._joules_before
        return Progress(
            rows_on_board=self.engine.num_running,
            rows_waiting=self.engine.num_waiting + self.source.num_ready,
            num_sweeps=sweeps.num_sweeps,
            prompt_tokens=totals["prompt_tokens"] - self._base["prompt_tokens"],
            completion_tokens=completion_tokens,
            first_admission_at=began_at,
            achieved=achieved(
                sweeps,
                job_s=0.0 if began_at is None else worked_s,
                completion_tokens=completion_tokens,
                probed_nbytes_per_s=rates.disk_nbytes_per_s if rates else None,
            ),
            kv_accuracy=self._kv_accuracy,
            num_preempted=totals["num_preempted"] - self._base["num_preempted"],
            reused_tokens=totals["reused_tokens"] - self._base["reused_tokens"],
            energy_j=None if joules is None or before is None else joules - before,
        )


def store_fault(error: Exception) -> Literal["refused", "unreachable"] | None:
    """What a store did that ended a job."""
    if isinstance(error, UnreachableError):
        return "unreachable"
    return "refused" if isinstance(error, StorageError) else None


def warm_up(engine: Engine) -> None:
    """Run one tiny row, so that everything compiled on first use is compiled."""
    token_ids = np.zeros(2, np.int32)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.add(Request(row_index=0, token_ids=token_ids, params=params))
    while engine.has_work:
        engine.sweep()
