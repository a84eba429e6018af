"""Schedules in the state database: what they are, what became of their occurrences, what was done.

An occurrence is decided on in one transaction: its row, the job that is made, and how far the
schedule has looked. So whatever is killed in between, it is decided on once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from jobs.database import ConflictError, Row
from jobs.records import Job, ScheduleNotFoundError, SpecError, StoreError
from jobs.schedule import (
    Cron,
    Overlap,
    Window,
    duration_text,
    parse_cron,
    parse_window,
)
from jobs.store import JobStore

Held = Literal["window", "max_runtime"]
# Of those of which no job was made: a week of one each minute. A clock set back further than they
# reach finds what is due anew.
MAX_OCCURRENCES = 10_000
# Of a run; sql/schema.sql says what they mean.
OVER_STATES = ("skipped", "missed", "nothing", "refused", "completed", "failed", "cancelled")


class TakenError(StoreError):
    """Another process has decided on an occurrence first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSpec:
    """What a schedule does, and when.

    cron, tz: as `parse_cron` takes them
    job_file: absolute path of a job file; it is read anew for each run
    overlap: what becomes of an occurrence while the run before it is not over
    catch_up: run once for occurrences at which no runner was there
    new_only: run only input files that no run has done; with `id_column`, only rows whose value
        there no run has done
    keep_runs: so many of the last runs keep their jobs; None keeps all
    window: jobs run in this part of the day, like "22:00-07:00"
    max_runtime_s: a job is paused after this long, until the next occurrence
    """

    cron: str
    tz: str
    job_file: str
    overlap: Overlap = "skip"
    catch_up: bool = True
    new_only: bool = False
    id_column: str | None = None
    keep_runs: int | None = None
    window: str | None = None
    max_runtime_s: float | None = None

    def parse(self) -> tuple[Cron, Window | None]:
        window = None if self.window is None else parse_window(self.window)
        return parse_cron(self.cron, self.tz), window


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A schedule as the store knows it. Times are Unix seconds.

    environment: variables that its jobs need in their runner
    looked_at: occurrences up to here are decided on
    next_at: the first occurrence after that; None where there is none
    """

    id: int
    name: str
    spec: ScheduleSpec
    environment: Mapping[str, str]
    created_at: float
    paused_at: float | None
    looked_at: float
    next_at: float | None
    num_runs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRun:
    """What became of an occurrence, or of a run by hand. Its states are in sql/schema.sql.

    scheduled_at: the occurrence; None for a run by hand and for what was missed
    number: of the run, where a job was made
    num_missed: earlier occurrences that it stands for
    held: why its schedule has paused its job
    ran_s: seconds that its job ran since it was last queued
    """

    id: int
    schedule_id: int
    scheduled_at: float | None
    decided_at: float
    number: int | None
    state: str
    reason: str | None
    num_missed: int
    job_id: str | None
    held: Held | None
    ran_s: float

    @property
    def is_over(self) -> bool:
        return self.state in OVER_STATES


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedRun:
    """A run's job and what its schedule says about when it may run. Fields as in `ScheduleRun`."""

    job_id: str
    state: str
    held: Held | None
    ran_s: float
    spec: ScheduleSpec = field(repr=False)

    def why_not(self, now: float) -> tuple[Held, str] | None:
        """Why the job may not run now: the kind of bound, and words for people."""
        longest = self.spec.max_runtime_s
        if longest is not None and self.ran_s >= longest:
            ran = duration_text(longest)
            return "max_runtime", f"it ran for {ran} (--max-runtime); goes on at the next run"
        if closed := self.why_closed(now):
            return "window", closed
        return None

    def why_closed(self, now: float) -> str | None:
        """Why the job may not run now, if that is its window."""
        cron, window = self.spec.parse()
        if window is None or window.is_open(cron.wall(now)):
            return None
        return f"outside its window {window} {self.spec.tz}; goes on at {window.start:%H:%M}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settlement:
    """How an occurrence, or the turn of a waiting one, is decided on.

    at: the occurrence that is thereby decided on; None for none
    looked_at: occurrences up to here are; None leaves that as it was
    waiting: the row of a run that waited, to be settled in place of a new one
    """

    at: float | None = None
    num_missed: int = 0
    looked_at: float | None = None
    waiting: int | None = None


class ScheduleStore:
    """The schedules in a job store's database.

    clock: Unix seconds
    """

    def __init__(self, jobs: JobStore, clock: Callable[[], float] = time.time) -> None:
        self.jobs = jobs
        self._db = jobs.database
        self._clock = clock

    # ---- schedules -----------------------------------------------------------------------

    def add(self, name: str, spec: ScheduleSpec, environment: Mapping[str, str]) -> Schedule:
        """Keep a schedule; it looks from now on. Raises SpecError: the name is taken."""
        cron, _ = spec.parse()
        now = self._clock()
        try:
            with self._db.atomic():
                self._db.insert(
                    "insert_schedule",
                    name=name,
                    spec=json.dumps(asdict(spec)),
                    environment=json.dumps(dict(environment), sort_keys=True),
                    now=now,
                    next_at=next(cron.after(now), None),
                )
        except ConflictError:
            raise SpecError(
                f"there is a schedule {name!r} already: give this one another name with --name, "
                f"or remove that one with `ntx-batch schedule rm {name}`"
            ) from None
        return self.get(name)

    def get(self, name: str) -> Schedule:
        """The schedule of this name. Raises ScheduleNotFoundError."""
        row = self._db.row("select_schedule", name=name)
        if row is None:
            known = ", ".join(schedule.name for schedule in self.list_schedules())
            hint = f"there are {known}" if known else "`ntx-batch schedule add` makes one"
            raise ScheduleNotFoundError(f"there is no schedule {name!r}; {hint}")
        return _schedule(row)

    def list_schedules(self) -> list[Schedule]:
        return [_schedule(row) for row in self._db.rows("select_schedules")]

    def to_serve(self) -> list[Schedule]:
        """Schedules that have something to be decided on now."""
        rows = self._db.rows("select_schedules_to_serve", now=self._clock())
        return [_schedule(row) for row in rows]

    def remove(self, schedule: Schedule) -> None:
        """Forget a schedule and its history; its jobs stay."""
        with self._db.atomic():
            self._db.run("delete_schedule", id=schedule.id)

    def set_paused(self, schedule: Schedule, *, paused: bool) -> None:
        """Pause a schedule, or let it go on; occurrences between the two are not missed."""
        now = self._clock()
        with self._db.atomic():
            self._db.run("set_schedule_paused", id=schedule.id, paused_at=now if paused else None)
            if not paused:
                self.set_looked(schedule, now)

    def set_looked(self, schedule: Schedule, looked_at: float) -> None:
        """Occurrences up to `looked_at` are decided on, and those after it are not."""
        cron, _ = schedule.spec.parse()
        next_at = next(cron.after(looked_at), None)
        with self._db.atomic():
            self._db.run(
                "set_schedule_looked", id=schedule.id, looked_at=looked_at, next_at=next_at
            )

    # ---- runs ----------------------------------------------------------------------------

    def history(self, schedule: Schedule, *, limit: int = -1) -> list[ScheduleRun]:
        """What became of its occurrences, the newest first."""
        rows = self._db.rows("select_schedule_runs", schedule_id=schedule.id, limit=limit)
        return [ScheduleRun(**dict(row)) for row in rows]

    def open_runs(self, schedule: Schedule) -> list[ScheduleRun]:
        """Runs that are not over, waiting ones among them, oldest first."""
        rows = self._db.rows("select_open_runs", schedule_id=schedule.id)
        return [ScheduleRun(**dict(row)) for row in rows]

    def settled(self, schedule: Schedule, since: float) -> set[float]:
        """Occurrences after an instant that are decided on."""
        rows = self._db.rows("select_settled", schedule_id=schedule.id, since=since)
        return {row["scheduled_at"] for row in rows}

    def settle(
        self, schedule: Schedule, settlement: Settlement, state: str, reason: str | None = None
    ) -> bool:
        """Note what became of an occurrence of which no job is made, or none yet.

        Returns False where another process decided on it first.
        """
        try:
            with self._db.atomic():
                self._settle(schedule, settlement, state, reason)
        except TakenError:
            return False
        return True

    def pass_over_run(self, schedule: Schedule) -> bool:
        """Give the number of the next run to none; False: another process gave it out."""
        number = schedule.num_runs + 1
        with self._db.atomic():
            return self._db.row("take_run_number", id=schedule.id, number=number) is not None

    def begin_run(
        self,
        schedule: Schedule,
        settlement: Settlement,
        create_job: Callable[[], Job],
        items: Iterable[str] = (),
    ) -> Job | None:
        """Make the job of the schedule's next run, number `num_runs + 1`, and all that notes it.

        items: what the run takes of the schedule's new input

        Returns None where another process decided on the occurrence, or made a run, first.
        """
        number = schedule.num_runs + 1
        try:
            with self._db.atomic():
                if self._db.row("take_run_number", id=schedule.id, number=number) is None:
                    raise TakenError(f"schedule {schedule.name} is at another run")
                run_id = self._settle(schedule, settlement, "queued", None)
                job = create_job()
                self._db.run("set_job_run", id=job.id, schedule=schedule.name, run=number)
                self._db.run("set_run_job", id=run_id, number=number, job_id=job.id)
                self._db.run(
                    "insert_items",
                    schedule_id=schedule.id,
                    run_id=run_id,
                    items=json.dumps(list(items)),
                )
                self.hold_back(self._clock())
                return self.jobs.job(job.id)
        except TakenError:
            return None

    def _settle(
        self, schedule: Schedule, settlement: Settlement, state: str, reason: str | None
    ) -> int:
        if settlement.looked_at is not None:
            self.set_looked(schedule, settlement.looked_at)
        if settlement.waiting is None:
            return self._insert_run(schedule, settlement, state, reason)
        row = self._db.row(
            "settle_waiting_run",
            id=settlement.waiting,
            state=state,
            reason=reason,
            now=self._clock(),
        )
        if row is None:
            raise TakenError(f"schedule {schedule.name}: the run does not wait any more")
        return settlement.waiting

    def _insert_run(
        self, schedule: Schedule, settlement: Settlement, state: str, reason: str | None
    ) -> int:
        self._db.run("forget_old_occurrences", schedule_id=schedule.id, num_kept=MAX_OCCURRENCES)
        try:
            return self._db.insert(
                "insert_schedule_run",
                schedule_id=schedule.id,
                scheduled_at=settlement.at,
                now=self._clock(),
                state=state,
                reason=reason,
                num_missed=settlement.num_missed,
            )
        except ConflictError:
            raise TakenError(f"schedule {schedule.name}: the occurrence is decided on") from None

    def old_jobs(self, schedule: Schedule) -> list[str]:
        """Jobs that are over and not of the runs that `keep_runs` keeps, oldest first."""
        if schedule.spec.keep_runs is None:
            return []
        rows = self._db.rows(
            "select_old_jobs", schedule_id=schedule.id, num_kept=schedule.spec.keep_runs
        )
        return [row["job_id"] for row in rows]

    # ---- what was done -------------------------------------------------------------------

    def new_items(self, schedule: Schedule, items: list[str]) -> set[str]:
        """Those of these items that no run has done or is about to do."""
        rows = self._db.rows("select_taken_items", schedule_id=schedule.id, items=json.dumps(items))
        return set(items).difference(row["item"] for row in rows)

    # ---- when jobs run -------------------------------------------------------------------

    def hold_back(self, now: float) -> None:
        """Pause waiting jobs whose window is closed; queue those again whose window has opened."""
        if any(_is_to_move(run, now) for run in self._bounded_runs()):
            with self._db.atomic():
                for run in self._bounded_runs():
                    if _is_to_move(run, now):
                        self._move(run, now)

    def _bounded_runs(self) -> list[BoundedRun]:
        return [_bounded(row) for row in self._db.rows("select_bounded_runs")]

    def _move(self, run: BoundedRun, now: float) -> None:
        refusal = run.why_not(now)
        if run.state == "paused" or refusal is None:
            self.jobs.set_state(run.job_id, "queued")
        else:
            held, reason = refusal
            self.set_held(run.job_id, held)
            self.jobs.set_state(run.job_id, "paused", reason=reason)

    def go_on(self, run: ScheduleRun) -> bool:
        """Queue a run's job again where it was paused since it had run for long enough."""
        if run.held != "max_runtime" or run.job_id is None:
            return False
        self.jobs.set_state(run.job_id, "queued")
        return True

    def bounds(self, job_id: str) -> BoundedRun | None:
        """How its schedule bounds a job; None for a job of none."""
        row = self._db.row("select_run_of_job", job_id=job_id)
        return None if row is None else _bounded(row)

    def set_held(self, job_id: str, held: Held) -> None:
        """Note why a job is about to be paused; it is forgotten when that is not what happens."""
        with self._db.atomic():
            self._db.run("set_held", job_id=job_id, held=held)

    def add_run_time(self, job_id: str, seconds: float) -> None:
        """A job ran for this long."""
        with self._db.atomic():
            self._db.run("add_run_time", job_id=job_id, seconds=seconds)


def _schedule(row: Row) -> Schedule:
    values: dict[str, Any] = dict(row)
    return Schedule(
        **values
        | {
            "spec": ScheduleSpec(**json.loads(row["spec"])),
            "environment": json.loads(row["environment"]),
        }
    )


def _is_to_move(run: BoundedRun, now: float) -> bool:
    """Whether a job that does not run is to be paused, or queued again."""
    if run.state == "paused":
        return run.held == "window" and run.why_closed(now) is None
    return run.why_not(now) is not None


def _bounded(row: Row) -> BoundedRun:
    return BoundedRun(**{**dict(row), "spec": ScheduleSpec(**json.loads(row["spec"]))})
