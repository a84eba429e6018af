"""What this process may use: memory that is free, and cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
RESERVE_SHARE = 10  # one part in so many of what is free is left to others


def _own_cgroups(root: Path, membership: Path) -> Iterator[Path]:
    """Folders of this process's control group and of those around it; their limits add up."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    own = next((line[3:] for line in lines if line.startswith("0::")), "/").strip("/")
    folder = root / own
    while True:
        yield folder
        if folder == root or root not in folder.parents:
            return
        folder = folder.parent


def cgroup_free_nbytes(root: Path = _CGROUPS, membership: Path | None = None) -> int | None:
    """What the tightest limit leaves, None without one; page cache is free: it can be dropped.

    root: where control groups are mounted; membership: a file that names the own one
    """
    free: list[int] = []
    for folder in _own_cgroups(root, membership or Path("/proc/self/cgroup")):
        try:
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit != "max":
            cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
            free.append(max(0, int(limit) - used + cached))
    return min(free, default=None)


def cgroup_limit_nbytes(root: Path = _CGROUPS, membership: Path | None = None) -> int | None:
    """The tightest limit itself; None without one. Arguments as above."""
    limits = []
    for folder in _own_cgroups(root, membership or Path("/proc/self/cgroup")):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((folder / "memory.max").read_text()))
    return min(limits, default=None)


def all_memory_nbytes() -> int:
    """Memory of this machine, or of the control group if that is less; used or not."""
    total = int(psutil.virtual_memory().total)
    limit = cgroup_limit_nbytes()
    return total if limit is None else min(total, limit)


def free_memory_nbytes(limit_nbytes: int | None = None) -> int:
    """Memory that can be taken without swapping: the system's, or the control group's if less.

    limit_nbytes: what was asked for; None takes all but a reserve
    """
    available = int(psutil.virtual_memory().available)
    limited = cgroup_free_nbytes()
    if limited is not None:
        available = min(available, limited)
    if limit_nbytes is not None:
        return min(available, limit_nbytes)
    return available - available // RESERVE_SHARE


def usable_cores() -> int:
    """Cores that the scheduler lets this process run on."""
    return len(os.sched_getaffinity(0))
