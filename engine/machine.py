"""What this process may use: memory that is free, and cores."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def _cgroup_free_nbytes() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def free_memory_nbytes(limit_nbytes: int | None = None) -> int:
    """Memory that can be taken without swapping: the system's, or the control group's if less.

    limit_nbytes: of this process; what it has of its own counts against it
    """
    available = int(psutil.virtual_memory().available)
    limited = _cgroup_free_nbytes()
    if limited is not None:
        available = min(available, limited)
    if limit_nbytes is not None:
        memory = psutil.Process().memory_info()
        available = min(available, limit_nbytes - (memory.rss - memory.shared))
    return max(0, available)


def usable_cores() -> int:
    """Cores that the scheduler lets this process run on."""
    return len(os.sched_getaffinity(0))
