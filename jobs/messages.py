"""What runner, driver and engine actor say to each other.

Commands go down (runner, driver, actor), events come up. Each names the attempt it belongs to: a
number that the runner never uses twice, so that what an abandoned attempt still says is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jobs.isolation import RowLoss
from jobs.processes import ProcessId
from jobs.records import JobSpec, Manifest, RowBatch, Shard

WINDOW_OUTPUTS = 65_536  # most that an actor has been given and has not handed back, about


@dataclass(frozen=True, slots=True)
class StartJob:
    """Make an engine for the job's model ready, or reuse the one that is.

    created_at: of the job, Unix seconds; templates that print a date print this one
    max_rows: most rows on board; None leaves it to the engine
    board: file in which the actor notes the rows on board; None where nobody would read it
    device_reason: why the engine computes where the spec says; empty while that is not settled
    """

    attempt: int
    spec: JobSpec
    manifest: Manifest
    created_at: float
    max_rows: int | None = None
    board: str | None = None
    device_reason: str = ""


@dataclass(frozen=True, slots=True)
class AddShard:
    """Run these rows after those added before.

    failed: rows among them that only get an error result
    """

    attempt: int
    shard: Shard
    failed: Mapping[int, RowLoss] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EndJob:
    """Stop the job: rows on board and waiting are dropped, finished ones are handed over."""

    attempt: int


Command = StartJob | AddShard | EndJob


@dataclass(frozen=True, slots=True)
class DriverReady:
    """Ray is up. ray_s: seconds that took; processes: those of Ray"""

    ray_s: float
    processes: tuple[ProcessId, ...]


@dataclass(frozen=True, slots=True)
class ActorStarted:
    """The process of the engine actor that has the job, new or reused; it may still be loading."""

    attempt: int
    process: ProcessId


@dataclass(frozen=True, slots=True)
class JobReady:
    """The engine can take rows.

    record: what the engine says of itself; `load_s` and `compile_s` in it where it was loaded now
    """

    attempt: int
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the engine stands. Counts are of this attempt; first_admission_at is Unix time.

    rows_waiting: read and prepared, and not on board
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


@dataclass(frozen=True, slots=True)
class BatchDone:
    """Finished rows, and the shards whose last row is in this batch or an earlier one."""

    attempt: int
    batch: RowBatch | None
    shards_done: tuple[int, ...]
    progress: Progress


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The answer to EndJob: nothing more comes from this attempt."""

    attempt: int


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The job cannot run or cannot go on.

    reason: one line; detail: for the log
    store: what a store of its input did, where that is the reason
    """

    attempt: int
    reason: str
    detail: str = ""
    store: Literal["refused", "unreachable"] | None = None


@dataclass(frozen=True, slots=True)
class RowsFailed:
    """A sweep with these rows on board failed; the attempt is over, its other rows are well."""

    attempt: int
    rows: tuple[int, ...]
    loss: RowLoss
    detail: str


@dataclass(frozen=True, slots=True)
class DriverFailed:
    """Ray or the actor is gone or would not start.

    engine_died: the actor, while it had a job
    is_final: to try again would not help
    """

    reason: str
    engine_died: bool = False
    is_final: bool = False


Event = (
    DriverReady
    | ActorStarted
    | JobReady
    | BatchDone
    | JobEnded
    | JobFailed
    | RowsFailed
    | DriverFailed
)
