"""The runner's eye on hooks: it starts a process for each that is due, and sees to its end.

The process is the leader of a group of its own, so that its end is the end of all that it started.
It bounds its own time; the runner does so once more, from outside.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jobs.control import child_environment
from jobs.home import HOME_VARIABLE, Home
from jobs.hook_store import Attempt, HookStore, Outcome
from jobs.hooks import shown_target, timeout_s
from jobs.processes import ProcessId
from jobs.records import DiskFullError
from jobs.store import JobStore

# Tells of the end; it knows what a job's JSON is, which is above this package.
DELIVERY_MODULE = "ntx_batch.hook_delivery"
LOOK_INTERVAL_S = 1.0
MAX_AT_ONCE = 4
GRACE_S = 30.0  # more than a process allows itself

log = logging.getLogger("jobs.hooks")


class Delivery(Protocol):
    """A process that makes one attempt, the leader of its group."""

    pid: int

    def poll(self) -> int | None: ...


StartDelivery = Callable[[Home, Attempt], Delivery]


def start_delivery(home: Home, attempt: Attempt) -> Delivery:
    """Start it; what it logs goes where this process logs."""
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", DELIVERY_MODULE),
            *("--home", str(home.path), "--hook", str(attempt.hook_id)),
        ],
        env=child_environment() | {HOME_VARIABLE: str(home.path)},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


@dataclass(slots=True)
class _Watched:
    attempt: Attempt
    delivery: Delivery
    kill_at: float  # monotonic


class HookWatch:
    """Has the hooks of a state folder done, for its runner.

    clock: Unix seconds
    start: starts a delivery
    """

    def __init__(
        self,
        home: Home,
        store: JobStore,
        *,
        clock: Callable[[], float] = time.time,
        start: StartDelivery = start_delivery,
        look_interval_s: float = LOOK_INTERVAL_S,
    ) -> None:
        self._home = home
        self._store = HookStore(store, clock)
        self._start = start
        self._look_interval_s = look_interval_s
        self._looked_at = -look_interval_s
        self._watched: dict[int, _Watched] = {}

    def serve(self) -> None:
        """See to it that what is due is done; returns at once."""
        if time.monotonic() - self._looked_at < self._look_interval_s:
            return
        self._looked_at = time.monotonic()
        with contextlib.suppress(DiskFullError):
            self._see_ends()
            num_running = self._give_up_lost()
            for hook_id in self._store.due()[: max(0, MAX_AT_ONCE - num_running)]:
                self._begin(hook_id)

    def _begin(self, hook_id: int) -> None:
        if hook_id in self._watched:
            return  # still at an end that the job had before
        attempt = self._store.begin(hook_id)
        if attempt is None:
            return
        target = shown_target(attempt.target)
        log.info("job %s: tells %s (attempt %d)", attempt.job_id, target, attempt.number)
        try:
            delivery = self._start(self._home, attempt)
        except OSError as error:
            self._store.end(attempt, Outcome(error=f"cannot be started: {error}", may_retry=True))
            return
        kill_at = time.monotonic() + timeout_s(attempt.target) + GRACE_S
        self._watched[hook_id] = _Watched(attempt, delivery, kill_at)
        if (process := ProcessId.of(delivery.pid)) is not None:
            self._store.set_process(attempt, process)

    def _see_ends(self) -> None:
        for hook_id, watched in list(self._watched.items()):
            status = watched.delivery.poll()
            if status is None and time.monotonic() < watched.kill_at:
                continue
            if status is None or status < 0:
                kill_group(watched.delivery.pid)
            if status is not None:
                del self._watched[hook_id]

    def _give_up_lost(self) -> int:
        """End attempts whose process is gone without a word; returns how many are being made."""
        num_running = 0
        for attempt in self._store.running():
            watched = self._watched.get(attempt.hook_id)
            is_ours = watched is not None and watched.attempt.number == attempt.number
            if is_ours or (attempt.process is not None and attempt.process.is_running()):
                num_running += 1
                continue
            if attempt.process is not None and ProcessId.of(attempt.process.pid) is None:
                # Nobody has its pid, so a group of that number is what it left.
                kill_group(attempt.process.pid)
            error = "its process ended before it could say how it went"
            self._store.end(attempt, Outcome(error=error, may_retry=True))
            log.warning("job %s: %s: %s", attempt.job_id, shown_target(attempt.target), error)
        return num_running


def kill_group(leader: int) -> None:
    """Kill a process and all that it started, as far as they are there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
