"""What one machine of a Ray has for engines, looked up on that machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.budget import most_host_nbytes
from engine.machine import free_memory_nbytes, usable_cores
from engine.revision import NUMERICS_REVISION
from jobs.processes import boot_id
from jobs.records import Manifest

_PID_SPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """machine: names the machine, or the container on it, as far as pids mean the same

    num_cores: that engines may use
    free_nbytes: of memory, less a reserve
    host_nbytes: most that may be pinned beside GPUs, an object store included
    problem: why a job cannot run there; empty where it can
    """

    machine: str
    num_cores: int
    free_nbytes: int
    host_nbytes: int
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a job needs of every machine.

    model, model_nbytes: the file, and its size where the job was submitted
    manifest: the input's files
    numerics_revision: of the program
    """

    model: str
    model_nbytes: int
    manifest: Manifest
    numerics_revision: int = NUMERICS_REVISION


def look_at_node(wanted: Wanted) -> NodeFacts:
    """The facts of the machine that this process is on."""
    return NodeFacts(
        machine=machine_id(),
        num_cores=usable_cores(),
        free_nbytes=free_memory_nbytes(),
        host_nbytes=most_host_nbytes(),
        problem=next(_problems(wanted), ""),
    )


def machine_id() -> str:
    """Equal for two processes where each sees the other by its pid."""
    try:
        return f"{boot_id()} {os.readlink(_PID_SPACE)}"
    except OSError:
        return boot_id()


def _problems(wanted: Wanted) -> Iterator[str]:
    if wanted.numerics_revision != NUMERICS_REVISION:
        yield (
            f"its ntx-batch computes by revision {NUMERICS_REVISION}, this one by "
            f"{wanted.numerics_revision}: install the same version on both"
        )
    files = [(wanted.model, wanted.model_nbytes)]
    # What is in an object store is the same from everywhere.
    files += [(f.path, f.nbytes) for f in wanted.manifest.files if "://" not in f.path]
    for path, nbytes in files:
        try:
            found = os.stat(path).st_size
        except OSError as error:
            yield f"{path}: {error.strerror}; every machine needs it at the same path"
            continue
        if found != nbytes:
            yield f"{path} has {found:,} bytes, and {nbytes:,} where the job was submitted"
