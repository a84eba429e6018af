"""Processes that a runner may have left behind: how they are known, found and ended.

A pid alone names nothing, since pids are reused: a process is its pid and its start time. All
processes below a runner inherit a marker in their environment, so the next runner finds them
even where no list of pids was written.
"""

from __future__ import annotations

import json
import os
import sys
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


def marked_processes(prefix: str) -> list[ProcessId]:
    """Processes whose NTX_INSTANCE begins with `prefix`, this one left out.

    Processes of other users cannot be read and are passed over: they are not ours.
    """
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            marker = process.environ().get(INSTANCE_VARIABLE, "")
        except (psutil.Error, OSError):
            continue
        if marker.startswith(prefix) and (known := ProcessId.of(process.pid)):
            found.append(known)
    return found


def kill_all(processes: Iterable[ProcessId], *, timeout_s: float = 10.0) -> list[ProcessId]:
    """SIGKILL each and wait until they are gone; returns those that are still there."""
    doomed = [process for process in processes if process.is_running()]
    handles = []
    for process in doomed:
        try:
            handle = psutil.Process(process.pid)
            if process.is_running():
                handle.kill()
                handles.append(handle)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(handles, timeout=timeout_s)
    return [process for process in doomed if process.is_running()]


def kill_instance(
    prefix: str, known: Iterable[ProcessId] = (), *, timeout_s: float = 10.0
) -> list[ProcessId]:
    """End all processes marked with `prefix` and those `known`, children born meanwhile too.

    Returns those that would not end.
    """
    known = list(known)
    for _ in range(3):
        doomed = {*marked_processes(prefix), *known}
        left = kill_all(doomed, timeout_s=timeout_s)
        if left or not marked_processes(prefix):
            return left
    return marked_processes(prefix)


def write_instance(path: Path, processes: Iterable[ProcessId]) -> None:
    """Note the processes of a driver, so that the next runner can end what is left of them."""
    facts = {"boot_id": boot_id(), "processes": [asdict(process) for process in processes]}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(facts))
    new.replace(path)


def read_instance(path: Path) -> list[ProcessId]:
    """What `write_instance` noted; empty where nothing usable is there or the machine rebooted."""
    try:
        facts = json.loads(path.read_text())
        if facts["boot_id"] != boot_id():
            return []
        return [ProcessId(**process) for process in facts["processes"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
