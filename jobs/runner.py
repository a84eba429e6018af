"""The runner: the one process of a state folder that claims jobs and writes what comes of them.

`python -m jobs.runner --home DIR`. It holds the lock, runs one job after the other through its
driver, and ends when it has been idle for a while or is told to (SIGTERM, SIGINT). It imports no
Ray, so nothing that Ray does can take it down.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from jobs.control import RunnerLock, ensure_runner, environment_of
from jobs.driver_process import DriverProcess, EngineLostError, clear_leftovers
from jobs.home import Home
from jobs.job_run import JobRun, Publisher
from jobs.messages import (
    AddShard,
    BatchDone,
    DriverFailed,
    DriverReady,
    EndJob,
    Event,
    JobEnded,
    JobFailed,
    JobReady,
    StartJob,
)
from jobs.processes import ProcessId, boot_id
from jobs.publish import publish_part
from jobs.records import Job, JobError, JobRequest, RunnerError, Shard
from jobs.store import JobStore

__all__ = ["Runner", "ensure_runner", "main"]

IDLE_EXIT_S = 600.0
POLL_INTERVAL_S = 0.25
HEARTBEAT_INTERVAL_S = 5.0
EVENT_TIMEOUT_S = 1.0
STOP_TIMEOUT_S = 10.0
MIN_SHARDS_OUTSTANDING = 2
MAX_FRUITLESS_RESTARTS = 3

log = logging.getLogger("jobs.runner")


class StopSignal:
    """SIGTERM and SIGINT as a flag, and as a descriptor that becomes readable."""

    def __init__(self) -> None:
        self.is_set = False
        self._is_installed = False
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)

    def install(self) -> Self:
        """From here to the end of this process; main thread only."""
        self._is_installed = True
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.set())
        return self

    def set(self) -> None:
        self.is_set = True

    def fileno(self) -> int:
        return self._read.fileno()

    def wait(self, timeout_s: float) -> None:
        self._read.settimeout(timeout_s)
        with contextlib.suppress(TimeoutError):
            self._read.recv(64)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_installed:
            signal.set_wakeup_fd(-1)
        self._read.close()
        self._write.close()


class Runner:
    """Runs the jobs of a state folder; the caller holds its lock.

    stop: makes `run` return soon, its job interrupted
    publish: makes part files
    start_driver: starts the process that talks to Ray
    clock: Unix seconds
    """

    def __init__(
        self,
        home: Home,
        lock: RunnerLock,
        *,
        store: JobStore,
        stop: StopSignal,
        publish: Publisher = publish_part,
        start_driver: Callable[[Home], DriverProcess] = DriverProcess,
        idle_exit_s: float = IDLE_EXIT_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._home = home
        self._lock = lock
        self._store = store
        self._publish = publish
        self._start_driver = start_driver
        self._idle_exit_s = idle_exit_s
        self._clock = clock
        self._driver: DriverProcess | None = None
        self._attempt = 0
        self._heartbeat_at = 0.0
        self._stop = stop

    def run(self) -> None:
        """Clear up after the dead, then run jobs until told to stop or idle for too long."""
        self._take_over()
        idle_since = time.monotonic()
        try:
            while not self._stop.is_set:
                job = self._store.claim_job()
                if job is not None:
                    self._run_job(job)
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > self._idle_exit_s and self._may_leave():
                    break
                else:
                    self._idle()
        finally:
            self._lock.note("stopping")
            self._discard_driver()
            self._store.clear_runner(os.getpid())

    # ---- the runner itself ---------------------------------------------------------------

    def _take_over(self) -> None:
        left = clear_leftovers(self._home)
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            raise RunnerError(
                f"processes of an earlier runner would not end (pids {pids}); end them with "
                f"`kill -9 {pids.replace(',', '')}` and start again"
            )
        for job_id in self._store.mark_interrupted():
            log.info("job %s was interrupted and goes on", job_id)
        me = ProcessId.current()
        self._store.set_runner(
            pid=me.pid,
            pid_start_time=me.start_time,
            boot_id=boot_id(),
            host=socket.gethostname(),
            environment=environment_of(os.environ),
        )
        log.info("runner %d takes %s", me.pid, self._home.path)

    def _may_leave(self) -> bool:
        # A submit writes its job first and reads the note after: it sees us stopping, or we
        # see its job.
        self._lock.note("stopping")
        if self._store.stop_if_idle():
            log.info("idle for %.0f s: the runner ends", self._idle_exit_s)
            return True
        self._lock.note("running")
        return False

    def _idle(self) -> None:
        self._beat()
        try:
            if self._driver is not None:
                self._driver.wait(0)
        except EngineLostError as error:
            log.warning("the idle engine is gone: %s", error)
            self._discard_driver()
        self._stop.wait(POLL_INTERVAL_S)

    def _beat(self) -> None:
        if time.monotonic() - self._heartbeat_at > HEARTBEAT_INTERVAL_S:
            self._heartbeat_at = time.monotonic()
            self._store.set_heartbeat(os.getpid())

    def _discard_driver(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()

    # ---- one job -------------------------------------------------------------------------

    def _run_job(self, job: Job) -> None:
        run = JobRun(self._store, job, self._publish, clock=self._clock)
        with job_log(self._home.job_log_path(job.id)):
            log.info("job %s starts (attempt %d)", job.id, job.attempt)
            try:
                check_job_environment(job)
                run.open()
                self._work(run)
            except (JobError, OSError) as error:
                log.exception("job %s cannot go on", job.id)
                run.stop("failed", str(error))

    def _work(self, run: JobRun) -> None:
        fruitless = 0
        while not run.is_complete:
            before = run.num_done
            try:
                if self._drive(run):
                    return
            except EngineLostError as error:
                fruitless = 0 if run.num_done > before else fruitless + 1
                log.warning("job %s lost its engine: %s", run.job.id, error)
                self._discard_driver()
                if fruitless > MAX_FRUITLESS_RESTARTS:
                    reason = f"the engine was lost {fruitless} times without a finished row"
                    raise JobError(f"{reason}; the last time: {error}") from error
        state = run.finish()
        log.info("job %s is %s: %d rows", run.job.id, state, run.num_done)

    def _drive(self, run: JobRun) -> bool:
        """Run what is left of a job; returns whether it was stopped before its end."""
        if self._driver is None:
            self._driver = self._start_driver(self._home)
        self._attempt += 1
        dispatch = Dispatch(self._attempt, run, self._driver)
        while not run.is_complete:
            self._beat()
            request = self._store.job(run.job.id).request
            if self._stop.is_set or request is not None:
                self._stop_job(dispatch, request)
                return True
            for event in self._driver.wait(EVENT_TIMEOUT_S, [self._stop.fileno()]):
                dispatch.take(event)
            run.cut_part_if_due()
        dispatch.end()
        return False

    def _stop_job(self, dispatch: Dispatch, request: JobRequest | None) -> None:
        run = dispatch.run
        try:
            dispatch.end()
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while not dispatch.is_over and time.monotonic() < deadline:
                for event in dispatch.driver.wait(EVENT_TIMEOUT_S):
                    dispatch.take(event)
        except EngineLostError as error:
            log.warning("job %s lost its engine while it stopped: %s", run.job.id, error)
            self._discard_driver()
        if not dispatch.is_over:
            self._discard_driver()
        if run.is_complete:
            run.finish()
            return
        match request:
            case "cancel":
                run.stop("cancelled")
            case "pause":
                run.stop("paused")
            case None:
                run.stop("interrupted", "its runner was stopped")
        log.info("job %s stopped: %s", run.job.id, request or "the runner ends")


class Dispatch:
    """One attempt at a job: shards go out as the engine needs them, batches come in."""

    def __init__(self, attempt: int, run: JobRun, driver: DriverProcess) -> None:
        self.run = run
        self.driver = driver
        self.is_over = False
        self._attempt = attempt
        self._shards: Iterator[Shard] = run.shards()
        self._outstanding: set[int] = set()
        job = run.job
        driver.send(StartJob(attempt, job.spec, job.manifest, job.created_at))

    def take(self, event: Event) -> None:
        """Act on an event. One of another attempt is stale and is dropped.

        Raises EngineLostError, JobError: the job cannot go on as it is.
        """
        if isinstance(event, DriverFailed):
            raise EngineLostError(event.reason)
        if isinstance(event, DriverReady):
            self.run.note({"ray_s": event.ray_s})
        elif event.attempt == self._attempt:
            self._take_own(event)

    def _take_own(self, event: Event) -> None:
        match event:
            case JobReady(record=record):
                self.run.note(record)
                self._top_up()
            case BatchDone():
                self.run.commit(event)
                self._outstanding.difference_update(event.shards_done)
                self._top_up()
            case JobFailed(reason=reason, detail=detail):
                log.error("the engine actor reports:\n%s", detail)
                raise JobError(reason)
            case JobEnded():
                self.is_over = True

    def end(self) -> None:
        """Tell the actor that no more rows of this attempt are wanted."""
        self.driver.send(EndJob(self._attempt))

    def _top_up(self) -> None:
        while len(self._outstanding) < MIN_SHARDS_OUTSTANDING:
            shard = next(self._shards, None)
            if shard is None:
                return
            self._outstanding.add(shard.number)
            self.driver.send(AddShard(self._attempt, shard))


def check_job_environment(job: Job) -> None:
    """Raises RunnerError: the job wants another environment than this runner has."""
    for key, wanted in job.environment.items():
        have = os.environ.get(key)
        if wanted != have:
            raise RunnerError(
                f"the job was submitted with {key}={wanted!r}, its runner has {have!r}"
            )


class job_log:
    """Within it, what is logged goes into the job's own file too."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._handler = logging.FileHandler(path)
        self._handler.setFormatter(logging.Formatter(LOG_FORMAT))

    def __enter__(self) -> None:
        logging.getLogger("jobs").addHandler(self._handler)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("jobs").removeHandler(self._handler)
        self._handler.close()


LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def main() -> int:
    """Run the runner of a state folder; the exit status is 1 where there is one already."""
    parser = argparse.ArgumentParser(prog="python -m jobs.runner")
    parser.add_argument("--home", type=Path)
    parser.add_argument("--idle-exit-s", type=float, default=IDLE_EXIT_S)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    home = Home.open(options.home)
    try:
        # Signals first: whoever sees the lock held may send one.
        with (
            StopSignal().install() as stop,
            RunnerLock(home) as lock,
            JobStore(home.state_path) as store,
        ):
            Runner(home, lock, store=store, stop=stop, idle_exit_s=options.idle_exit_s).run()
    except JobError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
