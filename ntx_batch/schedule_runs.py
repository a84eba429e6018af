"""Runs of schedules: from an occurrence that has come, or a run by hand, to a job in the queue.

`python -m ntx_batch.schedule_runs --home DIR` serves all schedules once and ends; the runner starts
it when one has something to be served. It is a process of its own, so that an input that cannot
be read, or takes long to look at, is nothing to the job that runs.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine import EngineError
from jobs.dataset import build_manifest
from jobs.files import names_in
from jobs.home import Home
from jobs.job_log import LOG_FORMAT
from jobs.output_folder import remove_own_files
from jobs.records import (
    DatasetError,
    Job,
    JobError,
    JobNotFoundError,
    NoInputError,
    SpecError,
    StoreError,
    UnreachableError,
)
from jobs.schedule import Due, choose_action, fill_in, find_due, has_placeholder, iso_wall
from jobs.schedule_items import file_items, find_new_rows, manifest_items
from jobs.schedule_store import Schedule, ScheduleRun, ScheduleSpec, ScheduleStore, Settlement
from jobs.store import JobStore
from ntx_batch import actions
from ntx_batch.chaining import SCHEDULE_PREFIX, check_chained, resolve_after
from ntx_batch.preflight import Checked, check_job
from ntx_batch.submission import Submission, read_submission

log = logging.getLogger("ntx_batch.schedules")


class NothingToDoError(Exception):
    """A run has no input, or all of it is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """A run whose job can be made. selection: as in `JobStore.create_job`"""

    submission: Submission
    checked: Checked
    items: Sequence[str] = ()
    selection: Any = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run. job: where one was made; reason: where none was"""

    state: str
    reason: str | None = None
    job: Job | None = None


class ScheduleServer:
    """Makes the jobs of schedules. clock: Unix seconds"""

    def __init__(self, home: Home, store: ScheduleStore, clock: Callable[[], float]) -> None:
        self._home = home
        self._store = store
        self._clock = clock

    def serve_all(self) -> bool:
        """Decide on all occurrences that have come; False where that failed for a schedule."""
        well = True
        for schedule in self._store.to_serve():
            try:
                self.serve(schedule)
            except JobError as error:
                log.error("schedule %s cannot be served: %s", schedule.name, error)
                well = False
        return well

    def serve(self, schedule: Schedule) -> None:
        """Decide on what has come of one schedule."""
        open_runs = self._store.open_runs(schedule)
        if [run.state for run in open_runs] == ["waiting"]:
            waiting = open_runs[0]
            settlement = Settlement(at=waiting.scheduled_at, waiting=waiting.id)
            self.make_run(schedule, settlement, waiting.scheduled_at or self._clock())
            schedule = self._store.get(schedule.name)
        now = self._clock()
        cron, _ = schedule.spec.parse()
        settled = self._store.settled(schedule, min(schedule.looked_at, now))
        due = find_due(cron, schedule.looked_at, now, settled)
        if due is None:
            self._store.set_looked(schedule, now)
        else:
            self._decide(schedule, due, now)

    def _decide(self, schedule: Schedule, due: Due, now: float) -> None:
        open_runs = self._store.open_runs(schedule)
        action = choose_action(
            due,
            overlap=schedule.spec.overlap,
            catch_up=schedule.spec.catch_up,
            is_busy=any(run.state != "waiting" for run in open_runs),
            is_waiting=any(run.state == "waiting" for run in open_runs),
        )
        settlement = Settlement(at=due.at, num_missed=due.num_missed, looked_at=now)
        if action == "miss":
            cron, _ = schedule.spec.parse()
            # No occurrence is claimed: if the clock was wrong, it is still to come.
            settlement = Settlement(num_missed=due.num_missed + 1, looked_at=now)
            reason = f"no runner was there at {iso_wall(cron, due.at)}"
            self._settle(schedule, settlement, "missed", reason)
            return
        resumed = [run for run in open_runs if self._store.go_on(run)]
        if action == "run":
            self.make_run(schedule, settlement, due.at)
        else:
            state = "waiting" if action == "wait" else "skipped"
            goes_on = ", and goes on" if resumed else ""
            self._settle(schedule, settlement, state, f"{_named(open_runs[0])}{goes_on}")

    def make_run(self, schedule: Schedule, settlement: Settlement, at: float) -> Outcome:
        """Make the job of a run, or note why there is none.

        at: the instant that {date} is of

        Raises UnreachableError: a store does not answer; nothing is noted.
        """
        try:
            current = self._past_taken_folders(schedule, at)
            job = None if current is None else self._make_job(current, settlement, at)
        except (NothingToDoError, NoInputError) as error:
            return self._settle(schedule, settlement, "nothing", str(error))
        except UnreachableError:
            # The occurrence stays undecided, and is served again.
            raise
        except (JobError, EngineError, OSError) as error:
            return self._settle(schedule, settlement, "refused", str(error))
        except Exception as error:
            # What is in the input tonight must not keep other nights and schedules from running.
            log.exception("schedule %s: a run cannot be made", schedule.name)
            reason = f"{type(error).__name__}: {error}"
            return self._settle(schedule, settlement, "refused", reason)
        if job is None:
            return Outcome("taken", "another run of it was made at the same time")
        log.info("schedule %s: run %d is job %s", schedule.name, job.run, job.id)
        self._remove_old(schedule)
        return Outcome(job.state, job.reason, job)

    def _make_job(self, schedule: Schedule, settlement: Settlement, at: float) -> Job | None:
        plan = self._plan(schedule, at)
        return self._store.begin_run(
            schedule, settlement, lambda: self._create_job(schedule, plan), plan.items
        )

    def _past_taken_folders(self, schedule: Schedule, at: float) -> Schedule | None:
        """The schedule, past the numbers whose folder another's results are in.

        None where another process made a run meanwhile.
        """
        while _is_taken(*(_read(schedule, at, ahead) for ahead in (1, 2))):
            log.info("schedule %s: run %d's folder is taken", schedule.name, schedule.num_runs + 1)
            if not self._store.pass_over_run(schedule):
                return None
            schedule = self._store.get(schedule.name)
        return schedule

    def _settle(
        self, schedule: Schedule, settlement: Settlement, state: str, reason: str
    ) -> Outcome:
        self._store.settle(schedule, settlement, state, reason)
        log.info("schedule %s: %s: %s", schedule.name, state, reason)
        return Outcome(state, reason)

    def _plan(self, schedule: Schedule, at: float) -> PlannedRun:
        submission = _read(schedule, at)
        spec = submission.spec
        if spec.after is not None:
            return self._plan_chained(schedule, submission)
        if not schedule.spec.new_only:
            checked = check_job(spec, overwrite=submission.overwrite)
            return PlannedRun(submission=submission, checked=checked)
        if schedule.spec.id_column is not None:
            return self._plan_new_rows(schedule, submission, schedule.spec.id_column)
        items = file_items(spec.input)
        new = self._store.new_items(schedule, list(items))
        if not new:
            raise NothingToDoError(f"all {len(items)} files of {spec.input} are done")
        paths = {items[item] for item in new}
        checked = check_job(spec, overwrite=submission.overwrite, only=paths)
        return PlannedRun(
            submission=submission, checked=checked, items=manifest_items(checked.manifest)
        )

    def _plan_chained(self, schedule: Schedule, submission: Submission) -> PlannedRun:
        try:
            spec = resolve_after(self._store.jobs, submission.spec)
        except JobNotFoundError as error:
            raise NothingToDoError(str(error)) from error
        if reader := self._reader_of(schedule, str(spec.after)):
            raise NothingToDoError(f"{reader} reads the results of job {spec.after} already")
        checked = check_chained(self._store.jobs, spec, overwrite=submission.overwrite)
        return PlannedRun(submission=replace(submission, spec=spec), checked=checked)

    def _reader_of(self, schedule: Schedule, job_id: str) -> str | None:
        """The run of a schedule that reads, or has read, the results of a job."""
        for run in self._store.history(schedule):
            if run.job_id is None or run.state in ("failed", "cancelled"):
                continue
            if self._store.jobs.job(run.job_id).spec.after == job_id:
                return f"run {run.number}"
        return None

    def _plan_new_rows(self, schedule: Schedule, submission: Submission, column: str) -> PlannedRun:
        spec = submission.spec
        # First what is new: the check takes the results folder.
        manifest = build_manifest(
            spec.input,
            encoding=spec.encoding,
            delimiter=spec.delimiter,
            on_bad_utf8=spec.on_bad_utf8,
        )
        found = find_new_rows(
            manifest,
            column,
            lambda items: self._store.new_items(schedule, items),
            on_bad_utf8=spec.on_bad_utf8,
            limit=spec.limit,
        )
        if not found.rows:
            raise NothingToDoError(f"all {found.num_rows} rows of {spec.input} are done")
        checked = check_job(spec, overwrite=submission.overwrite)
        if manifest_items(checked.manifest) != manifest_items(manifest):
            raise DatasetError(f"the input {spec.input} changed while its ids were read")
        # The limit is of new rows, which the selection names.
        return PlannedRun(
            submission=replace(submission, spec=replace(spec, limit=None)),
            checked=checked,
            items=list(found.items),
            selection=found.keys(spec.samples),
        )

    def _create_job(self, schedule: Schedule, plan: PlannedRun) -> Job:
        remove_own_files(self._store.jobs, plan.checked.overwrites)
        return self._store.jobs.create_job(
            plan.submission.spec,
            plan.checked.manifest,
            schedule.environment,
            selection=plan.selection,
            fingerprint=plan.checked.fingerprint,
            overwrite=plan.submission.overwrite,
            priority=plan.submission.priority,
            hooks=plan.submission.hooks,
        )

    def _remove_old(self, schedule: Schedule) -> None:
        for job_id in self._store.old_jobs(schedule):
            try:
                said = actions.remove(self._home, job_id)
            except StoreError as error:
                said = str(error)  # the next run tries again
            log.info("schedule %s: %s", schedule.name, said)


def _read(schedule: Schedule, at: float, ahead: int = 1) -> Submission:
    """What the next run submits, or one further ahead."""
    cron, _ = schedule.spec.parse()
    return read_run(schedule.spec, date=cron.date(at), run=schedule.num_runs + ahead)


def _is_taken(submission: Submission, after: Submission) -> bool:
    """Whether a run's own folder has something in it. after: what the run after it submits"""
    output = submission.spec.output
    if output is None or submission.overwrite or output == after.spec.output:
        return False
    return bool(names_in(output))


def read_run(spec: ScheduleSpec, *, date: str, run: int) -> Submission:
    """What a schedule's job file asks for, with {date} and {run} filled in.

    Raises SpecError: the file is no job file, or one that no schedule can run again and again.
    """
    submission = read_submission(spec.job_file, {})
    job = submission.spec
    _refuse_unrepeatable(spec, submission)
    filled: dict[str, Any] = {
        name: fill_in(text, date=date, run=run)
        for name in ("input", "output", "prompt_template")
        if (text := getattr(job, name)) is not None
    }
    return replace(submission, spec=replace(job, **filled))


def _refuse_unrepeatable(spec: ScheduleSpec, submission: Submission) -> None:
    job, file = submission.spec, spec.job_file
    if submission.key is not None:
        raise SpecError(f"{file}: key {submission.key!r} would make all runs one job: take it out")
    if job.output is not None and not submission.overwrite and not has_placeholder(job.output):
        raise SpecError(
            f"{file}: output {job.output} would be the folder of every run: put {{date}} or "
            "{run} into it, or `overwrite = true`"
        )
    if job.after is not None and not job.after.startswith(SCHEDULE_PREFIX):
        raise SpecError(
            f"{file}: after = {job.after!r} would have every run read the same results: name the "
            f'schedule whose newest run it is to read, after = "{SCHEDULE_PREFIX}NAME"'
        )
    if job.after is not None and spec.new_only:
        raise SpecError(
            f"{file}: each run reads the results of a job that no run has read before: --new-only "
            "is for input files"
        )
    if spec.new_only and spec.id_column is None and job.limit is not None:
        raise SpecError(
            f"{file}: limit = {job.limit} and --new-only: the rest of a file would count as done; "
            "take limit out, or name an --id-column"
        )


def _named(run: ScheduleRun) -> str:
    number = f"run {run.number}" if run.number is not None else "another run"
    return f"{number} is {run.state}" + (f" (job {run.job_id})" if run.job_id else "")


def main() -> int:
    """Serve all schedules of a state folder once."""
    parser = argparse.ArgumentParser(prog="python -m ntx_batch.schedule_runs")
    parser.add_argument("--home", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    home = Home.open(options.home)
    try:
        with JobStore(home.state_path) as jobs:
            well = ScheduleServer(home, ScheduleStore(jobs), time.time).serve_all()
    except JobError as error:
        log.error("%s", error)
        return 1
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
