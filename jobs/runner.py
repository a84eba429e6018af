"""The runner: the one process of a state folder that claims jobs and writes what comes of them.

`python -m jobs.runner --home DIR`. It holds the lock, runs one job after the other through its
driver, and ends when it has been idle for a while or is told to (SIGTERM, SIGINT). It imports no
Ray, so nothing that Ray does can take it down.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jobs.control import RunnerLock, ensure_runner, environment_of
from jobs.disk_space import is_disk_full, keep_spare, release_spare
from jobs.dispatch import MAX_FRUITLESS_RESTARTS, Dispatch
from jobs.driver_process import DriverLostError, DriverProcess, clear_leftovers
from jobs.home import Home
from jobs.hook_watch import HookWatch, StartDelivery, start_delivery
from jobs.job_log import LOG_FORMAT, cap_log, job_log
from jobs.job_run import JobRun, Publisher
from jobs.processes import ProcessId, boot_id
from jobs.publish import publish_part
from jobs.records import (
    DiskFullError,
    Job,
    JobError,
    JobRequest,
    JobState,
    RunnerError,
    StorageError,
    UnreachableError,
)
from jobs.schedule_watch import ScheduleWatch, StartServer, start_server
from jobs.stop_signal import StopSignal
from jobs.store import JobStore
from jobs.temp_folder import space_warnings

__all__ = ["Runner", "ensure_runner", "main"]

IDLE_EXIT_S = 600.0
UNLOAD_AFTER_S = 300.0
STORE_RETRY_S = 30.0
POLL_INTERVAL_S = 0.25
HEARTBEAT_INTERVAL_S = 5.0
EVENT_TIMEOUT_S = 1.0
STOP_TIMEOUT_S = 4.0
DISK_RETRY_S = 1.0

log = logging.getLogger("jobs.runner")


class CountingStoppedError(Exception):
    """The job is not wanted any more while its rows are still being counted."""


class Runner:
    """Runs the jobs of a state folder; the caller holds its lock.

    stop: makes `run` return soon, its job interrupted
    publish: makes part files
    start_driver: starts the process that talks to Ray
    idle_exit_s: the runner ends after this long without a job
    unload_after_s: the engine ends, and its memory is free, after this long without a job
    store_retry_s: a job whose store does not answer tries again after this long
    clock: Unix seconds
    start_schedules: starts the process that makes the jobs of schedules
    start_hook: starts a process that tells of a job's end
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
        unload_after_s: float = UNLOAD_AFTER_S,
        store_retry_s: float = STORE_RETRY_S,
        clock: Callable[[], float] = time.time,
        start_schedules: StartServer = start_server,
        start_hook: StartDelivery = start_delivery,
    ) -> None:
        self._home = home
        self._lock = lock
        self._store = store
        self._publish = publish
        self._start_driver = start_driver
        self._idle_exit_s = idle_exit_s
        self._unload_after_s = unload_after_s
        self._clock = clock
        self._driver: DriverProcess | None = None
        self._attempts = itertools.count(1)
        self._heartbeat_at = 0.0
        self._store_retry_s = store_retry_s
        self._waits_for_store: dict[str, float] = {}  # job, and when it may try again
        self._stop = stop
        self._schedules = ScheduleWatch(home, store, clock=clock, start=start_schedules)
        self._hooks = HookWatch(home, store, clock=clock, start=start_hook)

    def run(self) -> None:
        """Clear up after the dead, then run jobs until told to stop or idle for too long."""
        self._take_over()
        idle_since = time.monotonic()
        try:
            while not self._stop.is_set:
                self._schedules.hold_back()
                job = self._claim_job()
                if job is not None:
                    self._run_job(job)
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > self._idle_exit_s and self._may_leave():
                    break
                else:
                    self._idle(time.monotonic() - idle_since)
        finally:
            self._lock.note("stopping")
            self._discard_driver()
            with contextlib.suppress(DiskFullError):
                self._store.clear_runner(os.getpid())

    # ---- the runner itself ---------------------------------------------------------------

    def _take_over(self) -> None:
        cap_log(self._home.log_path)
        keep_spare(self._home.spare_path)
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

    def _claim_job(self) -> Job | None:
        try:
            now = time.monotonic()
            self._waits_for_store = {
                job_id: until for job_id, until in self._waits_for_store.items() if until > now
            }
            return self._store.claim_job(self._waits_for_store.keys())
        except DiskFullError as error:
            log.error("no job can start: %s", error)
            self._stop.wait(DISK_RETRY_S)
            return None

    def _may_leave(self) -> bool:
        # A submit writes its job first and reads the note after: it sees us stopping, or we
        # see its job.
        self._lock.note("stopping")
        with contextlib.suppress(DiskFullError):
            if self._store.stop_if_idle():
                log.info("idle for %.0f s: the runner ends", self._idle_exit_s)
                return True
        self._lock.note("running")
        return False

    def _idle(self, idle_s: float) -> None:
        self._beat()
        if self._driver is not None and idle_s > self._unload_after_s:
            log.info("idle for %.0f s: the engine ends", idle_s)
            self._discard_driver()
        try:
            if self._driver is not None:
                self._driver.wait(0)
        except DriverLostError as error:
            log.warning("the idle engines are gone: %s", error)
            self._discard_driver()
        self._stop.wait(POLL_INTERVAL_S)

    def _beat(self) -> None:
        self._hooks.serve()
        if time.monotonic() - self._heartbeat_at > HEARTBEAT_INTERVAL_S:
            self._heartbeat_at = time.monotonic()
            cap_log(self._home.log_path)
            with contextlib.suppress(DiskFullError):
                self._store.set_heartbeat(os.getpid())
                self._schedules.serve()

    def _discard_driver(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()

    # ---- one job -------------------------------------------------------------------------

    def _run_job(self, job: Job) -> None:
        run = JobRun(self._store, job, self._publish, clock=self._clock)
        with job_log(self._home.job_log_path(job.id)):
            log.info("job %s starts (attempt %d)", job.id, job.attempt)
            self._schedules.begin()
            try:
                check_job_environment(job)
                run.open(lambda _: self._check_counting(job))
                self._work(run)
            except CountingStoppedError:
                self._leave_job(run, self._store.job(job.id).request)
            except UnreachableError as error:
                log.warning("job %s waits for a store: %s", job.id, error)
                self._waits_for_store[job.id] = time.monotonic() + self._store_retry_s
                hint = "; its finished rows are kept, and it goes on by itself when that answers"
                self._stop_surely(run, "interrupted", f"{error}{hint}")
            except Exception as error:
                known = isinstance(error, JobError | OSError)
                trace = None if isinstance(error, JobError) else error
                log.error("job %s cannot go on: %s", job.id, error, exc_info=trace)
                reason = str(error) if known else f"{type(error).__name__}: {error}"
                if is_disk_full(error):
                    hint = f"; make room and go on with `ntx-batch resume {job.id}`"
                    self._stop_surely(run, "paused", reason + hint)
                elif isinstance(error, StorageError):
                    hint = f"; finished rows are kept, go on with `ntx-batch resume {job.id}`"
                    self._stop_surely(run, "paused", reason + hint)
                else:
                    self._stop_surely(run, "failed", reason)

    def _stop_surely(self, run: JobRun, state: JobState, reason: str) -> None:
        """Write down how a job stopped: on a full disk in the room kept for that, or later."""
        while not self._stop.is_set:
            try:
                run.stop(state, reason)
                return
            except DiskFullError as error:
                log.error("job %s: its state cannot be written: %s", run.job.id, error)
                release_spare(self._home.spare_path)
                self._stop.wait(DISK_RETRY_S)

    def _work(self, run: JobRun) -> None:
        fruitless = 0
        while not run.is_complete:
            before = run.num_done
            try:
                if self._drive(run):
                    return
            except DriverLostError as error:
                log.warning("job %s lost its engines: %s", run.job.id, error)
                self._discard_driver()
                fruitless = 0 if run.num_done > before else fruitless + 1
                if fruitless > MAX_FRUITLESS_RESTARTS:
                    reason = f"all engines were lost {fruitless} times without a finished row"
                    raise JobError(f"{reason}; the last time: {error}") from error
        state = run.finish()
        log.info("job %s is %s: %d rows", run.job.id, state, run.num_done)

    def _drive(self, run: JobRun) -> bool:
        """Run the rows that are left. Returns whether the job was stopped before its end."""
        if self._driver is None:
            for warning in space_warnings(os.environ):
                log.warning("%s", warning)
            self._driver = self._start_driver(self._home)
        dispatch = Dispatch(self._attempts, run, self._driver)
        try:
            while not run.is_complete:
                self._beat()
                request = self._store.job(run.job.id).request
                is_held = self._schedules.why_not(run.job) is not None
                if self._stop.is_set or request or run.too_many_errors() or is_held:
                    self._stop_job(dispatch, request)
                    return True
                for event in self._driver.wait(EVENT_TIMEOUT_S, [self._stop.fileno()]):
                    dispatch.take(event)
                run.cut_part_if_due()
        finally:
            # Also after a failure: the engines must not work on for nobody.
            with contextlib.suppress(DriverLostError):
                dispatch.end()
        return False

    def _stop_job(self, dispatch: Dispatch, request: JobRequest | None) -> None:
        run = dispatch.run
        try:
            dispatch.drain(STOP_TIMEOUT_S)
        except DriverLostError as error:
            log.warning("job %s lost its engines while it stopped: %s", run.job.id, error)
            self._discard_driver()
        if run.is_complete:
            run.finish()
            return
        self._leave_job(run, request)

    def _check_counting(self, job: Job) -> None:
        """While the rows of a text file are counted, which may take minutes."""
        self._beat()
        if self._stop.is_set or self._store.job(job.id).request is not None:
            raise CountingStoppedError

    def _leave_job(self, run: JobRun, request: JobRequest | None) -> None:
        match request:
            case "cancel":
                run.stop("cancelled")
            case "pause":
                run.stop("paused")
            case None if reason := run.too_many_errors():
                run.excuse_errors()
                run.stop("paused", reason)
            case None if refusal := self._schedules.why_not(run.job):
                self._schedules.note_held(run.job, refusal[0])
                run.stop("paused", refusal[1])
            case None:
                run.stop("interrupted", "its runner was stopped")
        log.info("job %s is %s", run.job.id, self._store.job(run.job.id).state)


def check_job_environment(job: Job) -> None:
    """Raises RunnerError: the job wants another environment than this runner has."""
    environment = environment_of(os.environ)
    for key, wanted in job.environment.items():
        have = environment.get(key)
        if wanted != have:
            raise RunnerError(
                f"the job was submitted with {key}={wanted!r}, its runner has {have!r}"
            )


def main() -> int:
    """Run the runner of a state folder; the exit status is 1 where there is one already."""
    parser = argparse.ArgumentParser(prog="python -m jobs.runner")
    parser.add_argument("--home", type=Path)
    parser.add_argument("--idle-exit-s", type=float, default=IDLE_EXIT_S)
    parser.add_argument("--unload-after-s", type=float, default=UNLOAD_AFTER_S)
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
            Runner(
                home,
                lock,
                store=store,
                stop=stop,
                idle_exit_s=options.idle_exit_s,
                unload_after_s=options.unload_after_s,
            ).run()
    except JobError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
