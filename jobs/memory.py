"""Memory of processes: what one takes, what it may take, and whether the kernel killed for it."""

from __future__ import annotations

import re
import resource
from pathlib import Path

_CGROUP_EVENTS = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
    Path("/proc/vmstat"),
)


def private_nbytes(pid: int) -> int:
    """Resident memory that is no file's; 0 where the process is gone or cannot be read."""
    return _status_nbytes(pid, "RssAnon") + _status_nbytes(pid, "RssShmem")


def limit_own_memory(nbytes: int) -> None:
    """Let this process take about `nbytes` more; beyond that, allocations fail.

    What counts is address space that can be written, stacks of threads included.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _status_nbytes("self", "VmData") + nbytes
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def num_oom_kills() -> int:
    """Kills for want of memory so far, in our control group and on this machine."""
    return sum(_counter(path) for path in _CGROUP_EVENTS)


def _counter(path: Path) -> int:
    try:
        found = re.search(r"^oom_kill (\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _status_nbytes(pid: int | str, key: str) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
