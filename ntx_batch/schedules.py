"""Schedules in Python: the same words as `ntx-batch schedule`.

from ntx_batch import schedules

schedules.add("0 2 * * *", "nightly.toml", tz="Europe/Madrid", new_only=True)
schedules.list()[0]["next"]
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from jobs import control
from jobs.home import Home
from jobs.records import (
    JobNotFoundError,
    JobSpec,
    NoInputError,
    ScheduleNotFoundError,
    SpecError,
    StoreError,
)
from jobs.schedule import iso_wall, parse_duration, parse_zone
from jobs.schedule_store import Schedule, ScheduleRun, ScheduleSpec, ScheduleStore, Settlement
from jobs.store import JobStore
from jobs.uris import names_store
from ntx_batch.client import JobHandle
from ntx_batch.status import iso_time

OVERLAPS = ("skip", "queue", "allow")
NUM_NEXT = 3
LOCAL_ZONE_LINK = Path("/etc/localtime")
Record: TypeAlias = dict[str, Any]
Place: TypeAlias = str | Path | None


def add(
    cron: str,
    job_file: str | Path,
    *,
    tz: str | None = None,
    name: str | None = None,
    overlap: str = "skip",
    catch_up: bool = True,
    new_only: bool = False,
    id_column: str | None = None,
    keep_runs: int | None = None,
    window: str | None = None,
    max_runtime: str | float | None = None,
    home: Place = None,
    say: Callable[[str], None] = lambda _: None,
) -> Record:
    """Run a job file again and again, and see to it that a runner is there for it.

    cron: five fields, or @daily and its like
    job_file: read anew for each run; its input, output and prompt template may have {date}, of
        the occurrence in its zone, and {run}, the number of the run
    tz: the zone of the clock that `cron` and `window` are read on; None takes this machine's
    name: None takes the job file's
    overlap, catch_up, new_only, id_column, keep_runs, window: as in `ScheduleSpec`
    max_runtime: seconds, or text like "6h"
    say: gets each note about what was found

    Returns what `ntx-batch schedule list --json` says of it.

    Raises SpecError, DatasetError, OutputError, EngineError: the job could not run as asked.
    Raises RunnerError: no runner could be started; the schedule waits for one.
    """
    spec = ScheduleSpec(
        cron=cron,
        tz=local_zone_name() if tz is None else tz,
        job_file=os.path.abspath(job_file),
        overlap=_overlap(overlap),
        catch_up=catch_up,
        new_only=new_only,
        id_column=id_column,
        keep_runs=keep_runs,
        window=window,
        max_runtime_s=None if max_runtime is None else parse_duration(max_runtime),
    )
    spec.parse()
    _refuse_contradictions(spec)
    with _opened(home) as (place, store):
        first = _check_first_run(store, spec, say)
        stores = names_store(first.input, first.output)
        control.check_environment(control.runner_status(place), os.environ, stores=stores)
        environment = control.environment_of(os.environ, stores=stores)
        schedule = store.add(_name(name or Path(job_file).stem), spec, environment)
        control.ensure_runner(place)
        return _record(store, schedule, time.time())


def _overlap(text: str) -> Any:
    if text not in OVERLAPS:
        raise SpecError(f"overlap is one of {', '.join(OVERLAPS)}, not {text!r}")
    return text


def _name(text: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", text):
        raise SpecError(
            f"schedule name {text!r} is not of letters, digits, '-', '_' and '.' alone: give "
            "another with --name"
        )
    return text


def _refuse_contradictions(spec: ScheduleSpec) -> None:
    if spec.id_column is not None and not spec.new_only:
        raise SpecError(
            f"id_column {spec.id_column!r} says which rows are new: give new_only with it"
        )
    if spec.keep_runs is not None and spec.keep_runs < 1:
        raise SpecError(f"keep_runs is at least 1, not {spec.keep_runs}")


def _check_first_run(
    store: ScheduleStore, spec: ScheduleSpec, say: Callable[[str], None]
) -> JobSpec:
    """Check the job as its first run would, as far as its input is there; takes no folder.

    Returns what it would be.
    """
    from jobs.dataset import read_schema
    from ntx_batch.chaining import check_chained, resolve_after
    from ntx_batch.preflight import check_job
    from ntx_batch.schedule_runs import read_run

    cron, _ = spec.parse()
    submission = read_run(spec, date=cron.date(time.time()), run=1)
    job = replace(submission.spec, output=None)
    try:
        if job.after is None:
            checked = check_job(job)
        else:
            checked = check_chained(store.jobs, resolve_after(store.jobs, job))
    except ScheduleNotFoundError:
        raise
    except (NoInputError, JobNotFoundError) as error:
        say(f"{error}; runs that find no input have nothing to do")
        return submission.spec
    for note in checked.notes:
        say(note)
    if spec.id_column is None:
        return submission.spec
    names = read_schema(checked.manifest).names
    if spec.id_column not in names:
        raise SpecError(
            f"id_column {spec.id_column!r} is no column of {submission.spec.input}; it has "
            f"{', '.join(names)}"
        )
    return submission.spec


def run(name: str, *, home: Place = None) -> Record:
    """Make a run of a schedule now, whatever its time and whether another is on its way.

    Its job runs in the schedule's window, where it has one.

    Returns `state`, `reason` and `job`, an id; None where there is nothing to do.

    Raises SpecError: the job could not be made; the history has the reason too.
    """
    from ntx_batch.schedule_runs import ScheduleServer

    with _opened(home) as (place, store):
        control.check_environment(control.runner_status(place), os.environ)
        server = ScheduleServer(place, store, time.time)
        outcome = server.make_run(store.get(name), Settlement(), time.time())
    if outcome.state == "refused":
        raise SpecError(f"schedule {name}: {outcome.reason}")
    if outcome.state == "taken":
        raise StoreError(f"schedule {name}: {outcome.reason}; say it again for one more")
    if outcome.job is not None:
        control.ensure_runner(place)
    job_id = None if outcome.job is None else outcome.job.id
    return {"state": outcome.state, "reason": outcome.reason, "job": job_id}


def job_of(record: Record, *, home: Place = None) -> JobHandle | None:
    """The job of what `run` or `history` says, if there is one."""
    return None if record["job"] is None else JobHandle(record["job"], Home.open(home))


def history(name: str, *, home: Place = None, limit: int = -1) -> tuple[Record, ...]:
    """What became of a schedule's occurrences, the newest first."""
    with _opened(home) as (_, store):
        schedule = store.get(name)
        return tuple(_run_record(schedule, run) for run in store.history(schedule, limit=limit))


def pause(name: str, *, home: Place = None) -> str:
    """Make no more runs until `resume`; a job that is there goes on. Says what it did."""
    with _opened(home) as (_, store):
        schedule = store.get(name)
        if schedule.paused_at is not None:
            return f"schedule {name} was already paused"
        store.set_paused(schedule, paused=True)
        return f"schedule {name} paused; go on with `ntx-batch schedule resume {name}`"


def resume(name: str, *, home: Place = None) -> str:
    """Go on with a paused schedule; what came up meanwhile is not caught up with."""
    with _opened(home) as (place, store):
        schedule = store.get(name)
        if schedule.paused_at is None:
            return f"schedule {name} was not paused"
        store.set_paused(schedule, paused=False)
        record = _record(store, store.get(name), time.time())
        control.ensure_runner(place)
        return f"schedule {name} goes on; next: {(record['next'] or ['never'])[0]}"


def rm(name: str, *, home: Place = None) -> str:
    """Forget a schedule and its history; its jobs and results stay. Says what it did."""
    with _opened(home) as (_, store):
        schedule = store.get(name)
        left = [run for run in store.open_runs(schedule) if run.job_id is not None]
        store.remove(schedule)
        said = [f"schedule {name} removed; its jobs and their results stay"]
        said += [
            f"job {run.job_id} was paused by it: go on with `ntx-batch resume {run.job_id}`"
            for run in left
            if run.held is not None
        ]
        return "\n".join(said)


def list(*, home: Place = None) -> tuple[Record, ...]:
    """Every schedule by name: what it does, its next runs, and its last one."""
    with _opened(home) as (_, store):
        now = time.time()
        return tuple(_record(store, schedule, now) for schedule in store.list_schedules())


def unserved(*, home: Place = None) -> int:
    """How many schedules wait for a runner while none is there."""
    with _opened(home) as (place, store):
        if control.runner_status(place).state != "absent":
            return 0
        return sum(schedule.paused_at is None for schedule in store.list_schedules())


@contextmanager
def _opened(home: Place) -> Iterator[tuple[Home, ScheduleStore]]:
    place = Home.open(home)
    with JobStore(place.state_path) as jobs:
        yield place, ScheduleStore(jobs)


def _record(store: ScheduleStore, schedule: Schedule, now: float) -> Record:
    cron, _ = schedule.spec.parse()
    is_paused = schedule.paused_at is not None
    num_next = 0 if is_paused else NUM_NEXT
    following = islice(cron.after(max(now, schedule.looked_at)), num_next)
    last = store.history(schedule, limit=1)
    return {
        "schedule": schedule.name,
        "state": "paused" if is_paused else "active",
        **asdict(schedule.spec),
        "next": [iso_wall(cron, instant) for instant in following],
        "runs": schedule.num_runs,
        "last": _run_record(schedule, last[0]) if last else None,
        "created_at": iso_time(schedule.created_at),
    }


def _run_record(schedule: Schedule, run: ScheduleRun) -> Record:
    cron, _ = schedule.spec.parse()
    return {
        "run": run.number,
        "state": run.state,
        "scheduled_at": None if run.scheduled_at is None else iso_wall(cron, run.scheduled_at),
        "decided_at": iso_wall(cron, run.decided_at),
        "missed": run.num_missed,
        "job": run.job_id,
        "reason": run.reason,
    }


def local_zone_name() -> str:
    """This machine's zone by its name in the tz database: of $TZ, of /etc/localtime, or UTC."""
    if name := os.environ.get("TZ", "").removeprefix(":"):
        return name
    _, found, name = os.path.realpath(LOCAL_ZONE_LINK).partition("zoneinfo/")
    if not found:
        return "UTC"
    parse_zone(name)
    return name
