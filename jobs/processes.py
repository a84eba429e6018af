"""Processes that a runner may have left behind: how they are known, found and ended.

A pid alone names nothing, since pids are reused: a process is its pid and its start time. All
processes of a driver are in its session and inherit a marker in their environment. Either would
nearly do: a process that sets its title (some of Ray's do) wipes its environment, and a session is
known only by its leader.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

INSTANCE_VARIABLE = "NTX_INSTANCE"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that cannot be mistaken for a later one of the same pid.

    start_time: clock ticks since boot on Linux, Unix seconds elsewhere
    """

    pid: int
    start_time: float

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this pid now; None where there is none."""
        start_time = _start_time(pid)
        return None if start_time is None else cls(pid, start_time)

    @classmethod
    def current(cls) -> ProcessId:
        me = cls.of(os.getpid())
        assert me is not None
        return me

    def is_running(self) -> bool:
        """Whether it exists and is not a zombie."""
        if _start_time(self.pid) != self.start_time:
            return False
        try:
            return bool(psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


def boot_id() -> str:
    """Names this boot of this machine: pids and start times mean nothing after it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"boot-{psutil.boot_time():.0f}"


def _start_time(pid: int) -> float | None:
    if sys.platform == "linux":
        # psutil turns the ticks into Unix seconds, which move when the clock is set.
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return None
        return float(stat.rpartition(b")")[2].split()[19])
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def find_instance(prefix: str, leaders: Iterable[ProcessId] = ()) -> set[ProcessId]:
    """Processes of drivers, this process left out.

    prefix: what their NTX_INSTANCE begins with
    leaders: drivers whose sessions they may be in; these may be dead
    """
    # While a session has members its number is no pid's; a later process of that pid ends it.
    sessions = {
        leader.pid for leader in leaders if _start_time(leader.pid) in (None, leader.start_time)
    }
    found = set()
    for pid in psutil.pids():
        if pid != os.getpid() and (_session(pid) in sessions or _marker(pid).startswith(prefix)):
            found.add(ProcessId.of(pid))
    return {process for process in found if process is not None and process.is_running()}


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _marker(pid: int) -> str:
    # Processes of other users cannot be read, and are not ours.
    try:
        return str(psutil.Process(pid).environ().get(INSTANCE_VARIABLE, ""))
    except (psutil.Error, OSError):
        return ""


def kill_all(processes: Iterable[ProcessId], *, timeout_s: float = 10.0) -> list[ProcessId]:
    """SIGKILL each and wait until they are gone; returns those that are still there."""
    doomed = [process for process in processes if process.is_running()]
    for process in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    # Not psutil.wait_procs: where nobody reaps a zombie, it waits for that.
    deadline = time.monotonic() + timeout_s
    while any(process.is_running() for process in doomed) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [process for process in doomed if process.is_running()]


def kill_instance(
    prefix: str, leaders: Iterable[ProcessId] = (), *, timeout_s: float = 10.0
) -> list[ProcessId]:
    """End what `find_instance` finds, children born meanwhile too; returns what would not end."""
    leaders = list(leaders)
    for _ in range(3):
        doomed = find_instance(prefix, leaders)
        left = kill_all(doomed, timeout_s=timeout_s)
        if left or not doomed:
            return left
    return list(find_instance(prefix, leaders))


def write_leader(path: Path, leader: ProcessId) -> None:
    """Note a driver, so that the next runner can end what is left of its session."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"boot_id": boot_id(), **asdict(leader)}))
    new.replace(path)


def read_leader(path: Path) -> ProcessId | None:
    """Whom `write_leader` noted; None where nothing usable is there or the machine rebooted."""
    try:
        facts = json.loads(path.read_text())
        same_boot = facts["boot_id"] == boot_id()
        return ProcessId(facts["pid"], facts["start_time"]) if same_boot else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
