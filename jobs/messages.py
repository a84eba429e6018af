"""What runner, driver and engine actor say to each other.

Commands go down (runner, driver, actor), events come up. Each names the engine that it concerns, by
a number from 0 on, and the attempt it belongs to: a number that the runner never uses twice, so
that what an abandoned attempt still says is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jobs.isolation import LossCode, RowLoss
from jobs.processes import ProcessId
from jobs.records import JobSpec, Manifest, RowBatch, Shard

WINDOW_OUTPUTS = 65_536  # most that all engines have been given and have not handed back, about


@dataclass(frozen=True, slots=True)
class PlaceEngines:
    """Settle which engines a job has, and where; answered by EnginesPlaced.

    device_reason: why the engines compute where the spec says; empty while that is not settled
    """

    attempt: int
    spec: JobSpec
    manifest: Manifest
    device_reason: str = ""


@dataclass(frozen=True, slots=True)
class StartJob:
    """Make one of the job's engines ready, or reuse it as it is.

    created_at: of the job, Unix seconds; templates that print a date print this one
    max_rows: most rows on board; None leaves it to the engine
    board: file in which the actor notes the rows on board; None where nobody would read it
    device_reason: why the engine computes where it does
    num_engines: that share the job
    counts_machine: whether the energy of its machine is counted here
    """

    attempt: int
    spec: JobSpec
    manifest: Manifest
    created_at: float
    max_rows: int | None = None
    board: str | None = None
    device_reason: str = ""
    engine: int = 0
    num_engines: int = 1
    counts_machine: bool = True


@dataclass(frozen=True, slots=True)
class AddShard:
    """Run these rows after those added before.

    failed: rows among them that only get an error result
    """

    attempt: int
    shard: Shard
    failed: Mapping[int, RowLoss] = field(default_factory=dict)
    engine: int = 0


@dataclass(frozen=True, slots=True)
class EndJob:
    """Stop the job: rows on board and waiting are dropped, finished ones are handed over."""

    attempt: int
    engine: int = 0


Command = PlaceEngines | StartJob | AddShard | EndJob


@dataclass(frozen=True, slots=True)
class DriverReady:
    """Ray is up. ray_s: seconds that took; processes: those of Ray"""

    ray_s: float
    processes: tuple[ProcessId, ...]


@dataclass(frozen=True, slots=True)
class EnginesPlaced:
    """Where the engines of a job are, by their numbers.

    nodes: names of machines
    device_reason: why they compute on their device
    """

    attempt: int
    nodes: tuple[str, ...]
    device_reason: str = ""


@dataclass(frozen=True, slots=True)
class ActorStarted:
    """The engine actor that has the job, new or reused, is there; it may still be loading.

    process: its own; None where it is on another machine
    """

    attempt: int
    process: ProcessId | None
    engine: int = 0


@dataclass(frozen=True, slots=True)
class JobReady:
    """The engine can take rows.

    record: what the engine says of itself; `load_s` and `compile_s` in it where it was loaded now
    """

    attempt: int
    record: Mapping[str, Any]
    engine: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the engine stands. Counts are of this attempt; first_admission_at is Unix time.

    rows_waiting: read and prepared, and not on board
    prompt_tokens: of all rows taken on board; reused_tokens: of these, not computed again
    achieved: as `jobs.achieved` has it
    energy_j: that the machine took; None where it has no counter to read
    kv_accuracy: as `jobs.kv_sample` has it, once it was measured
    num_preempted: times that a row gave its KV pages back, to be computed again
    """

    rows_on_board: int
    rows_waiting: int
    num_sweeps: int
    prompt_tokens: int
    completion_tokens: int
    first_admission_at: float | None
    achieved: Mapping[str, Any] = field(default_factory=dict)
    energy_j: float | None = None
    kv_accuracy: Mapping[str, Any] | None = None
    num_preempted: int = 0
    reused_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BatchDone:
    """Finished rows, and the shards whose last row is in this batch or an earlier one."""

    attempt: int
    batch: RowBatch | None
    shards_done: tuple[int, ...]
    progress: Progress
    engine: int = 0


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The answer to EndJob: nothing more comes from this attempt."""

    attempt: int
    engine: int = 0


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The job cannot run or cannot go on there.

    reason: one line; detail: for the log
    store: what a store of its input did, where that is the reason
    """

    attempt: int
    reason: str
    detail: str = ""
    store: Literal["refused", "unreachable"] | None = None
    engine: int = 0


@dataclass(frozen=True, slots=True)
class RowsFailed:
    """A sweep with these rows on board failed; the attempt is over, its other rows are well."""

    attempt: int
    rows: tuple[int, ...]
    loss: RowLoss
    detail: str
    engine: int = 0


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The process of an engine actor is gone, or was ended for what it did; the others are well.

    code: what that is for the rows on board
    rows: on board, or in preparation, when it last noted them
    detail: its last words, for the log
    """

    attempt: int
    reason: str
    code: LossCode = "worker_crashed"
    rows: tuple[int, ...] = ()
    detail: str = ""
    engine: int = 0


@dataclass(frozen=True, slots=True)
class DriverFailed:
    """Ray is gone or would not start. is_final: to try again would not help"""

    reason: str
    is_final: bool = False


Event = (
    DriverReady
    | EnginesPlaced
    | ActorStarted
    | JobReady
    | BatchDone
    | JobEnded
    | JobFailed
    | RowsFailed
    | EngineLost
    | DriverFailed
)
