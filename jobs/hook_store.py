"""Hooks in the job store: what is due, what is being done, how it went.

The transaction that ends a job makes its hooks due (a trigger). The runner notes each attempt
before it begins, and the process that makes it notes what came of it after. Whatever is killed in
between, the hook is tried again: at least once, and seldom twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from jobs.database import Row
from jobs.hooks import retry_delay_s
from jobs.processes import ProcessId, boot_id
from jobs.records import HookEvent, HookTarget
from jobs.specs import hook_target_from_json
from jobs.store import JobStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One try of a hook.

    num_ends: which end of the job it is about
    number: from 1, of this end
    process: who makes it; None where that is not known
    """

    hook_id: int
    job_id: str
    event: HookEvent
    target: HookTarget
    num_ends: int
    number: int
    process: ProcessId | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How an attempt went.

    exit_status: of the command, or the HTTP status
    error: why it was no delivery; None where it was
    may_retry: whether another attempt can help
    """

    exit_status: int | None = None
    error: str | None = None
    may_retry: bool = False


class HookStore:
    """The hooks in a job store's database. clock: Unix seconds"""

    def __init__(self, jobs: JobStore, clock: Callable[[], float] = time.time) -> None:
        self.jobs = jobs
        self._db = jobs.database
        self._clock = clock

    def due(self) -> list[int]:
        """Ids of hooks whose time has come, those that wait longest first."""
        return [row["id"] for row in self._db.rows("select_due_hooks", now=self._clock())]

    def are_open(self) -> bool:
        """Whether a runner is needed for a hook."""
        return bool(self._db.one("count_open_hooks"))

    def running(self) -> list[Attempt]:
        """Attempts that were begun and of which nothing is known yet."""
        return [_attempt(row) for row in self._db.rows("select_running_hooks")]

    def attempt(self, hook_id: int) -> Attempt | None:
        """The attempt of a hook that is being made; None where none is."""
        return next((one for one in self.running() if one.hook_id == hook_id), None)

    def begin(self, hook_id: int) -> Attempt | None:
        """Note that an attempt is about to be made; None where the hook is not due any more."""
        with self._db.atomic():
            row = self._db.row("begin_hook", id=hook_id, now=self._clock())
        return None if row is None else _attempt(row)

    def set_process(self, attempt: Attempt, process: ProcessId) -> None:
        """Note who makes an attempt, for a later runner."""
        with self._db.atomic():
            self._db.run(
                "set_hook_process",
                id=attempt.hook_id,
                num_ends=attempt.num_ends,
                number=attempt.number,
                pid=process.pid,
                pid_start_time=process.start_time,
                boot_id=boot_id(),
            )

    def end(self, attempt: Attempt, outcome: Outcome) -> None:
        """Note what came of an attempt; nothing where the job has ended anew since it began."""
        delay_s = retry_delay_s(attempt.number) if outcome.may_retry else None
        state = "delivered" if outcome.error is None else "failed"
        with self._db.atomic():
            self._db.run(
                "end_hook",
                id=attempt.hook_id,
                num_ends=attempt.num_ends,
                number=attempt.number,
                state=state if delay_s is None else "due",
                exit_status=outcome.exit_status,
                error=outcome.error,
                next_at=None if delay_s is None else self._clock() + delay_s,
            )


def _attempt(row: Row) -> Attempt:
    is_known = row["pid"] is not None and row["boot_id"] == boot_id()
    return Attempt(
        hook_id=row["id"],
        job_id=row["job_id"],
        event=row["event"],
        target=hook_target_from_json(row["target"]),
        num_ends=row["num_ends"],
        number=row["num_attempts"],
        process=ProcessId(row["pid"], row["pid_start_time"]) if is_known else None,
    )
