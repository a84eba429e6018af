"""The runner's eye on schedules: whether one wants to be served, and whether a job may run now."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Protocol

from jobs.control import child_environment
from jobs.home import HOME_VARIABLE, Home
from jobs.records import DiskFullError, Job
from jobs.schedule_store import Held, ScheduleStore
from jobs.store import JobStore

# Makes the jobs; it knows how to read a job file, which is above this package.
SERVER_MODULE = "ntx_batch.schedule_runs"
RETRY_S = 30.0
LOOK_INTERVAL_S = 1.0

log = logging.getLogger("jobs.schedules")


class Server(Protocol):
    """A process that serves all schedules once."""

    def poll(self) -> int | None: ...


StartServer = Callable[[Home], Server]


def start_server(home: Home) -> Server:
    """Start it; what it logs goes where this process logs."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", SERVER_MODULE, "--home", str(home.path)],
        env=child_environment() | {HOME_VARIABLE: str(home.path)},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


class ScheduleWatch:
    """Looks after the schedules of a state folder, for its runner.

    clock: Unix seconds
    start: starts a server
    """

    def __init__(
        self,
        home: Home,
        store: JobStore,
        *,
        clock: Callable[[], float] = time.time,
        start: StartServer = start_server,
    ) -> None:
        self._home = home
        self._store = ScheduleStore(store, clock)
        self._clock = clock
        self._start = start
        self._server: Server | None = None
        self._wait_until = 0.0
        self._looked_at = 0.0
        self._refusal: tuple[Held, str] | None = None

    # ---- occurrences ---------------------------------------------------------------------

    def serve(self) -> None:
        """See to it that what is due is served; returns at once."""
        if self._server is not None:
            status = self._server.poll()
            if status is None:
                return
            self._server = None
            if status:
                log.error("schedules were not served (exit status %d)", status)
                self._wait_until = time.monotonic() + RETRY_S
        if time.monotonic() >= self._wait_until and self._store.to_serve():
            self._server = self._start(self._home)

    # ---- when jobs run -------------------------------------------------------------------

    def hold_back(self) -> None:
        """Pause waiting jobs whose window is closed; queue those whose window has opened."""
        with contextlib.suppress(DiskFullError):
            self._store.hold_back(self._clock())

    def begin(self) -> None:
        """A job is about to run."""
        self._looked_at, self._refusal = time.monotonic(), None

    def why_not(self, job: Job) -> tuple[Held, str] | None:
        """Why the running job is to be paused by its schedule; asked for again and again.

        The time from `begin` or the call before counts as time that it ran.
        """
        now = time.monotonic()
        if job.schedule is None or self._refusal or now - self._looked_at < LOOK_INTERVAL_S:
            return self._refusal
        with contextlib.suppress(DiskFullError):
            self._store.add_run_time(job.id, now - self._looked_at)
        self._looked_at = now
        bounds = self._store.bounds(job.id)
        self._refusal = None if bounds is None else bounds.why_not(self._clock())
        return self._refusal

    def note_held(self, job: Job, held: Held) -> None:
        """The job is about to be paused for this."""
        self._store.set_held(job.id, held)
