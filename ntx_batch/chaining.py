"""A job that reads the results of another: which one, and whether it can.

It names a job by its id, or a schedule, `schedule:NAME`, for the job of that one's newest run.
"""

from __future__ import annotations

from dataclasses import replace

from jobs.chain_input import results_schema
from jobs.chains import outlook, way_back
from jobs.records import Job, JobNotFoundError, JobSpec, OutputError, SpecError
from jobs.schedule_store import ScheduleStore
from jobs.store import JobStore
from jobs.uris import is_within
from ntx_batch.preflight import Checked, check_job

SCHEDULE_PREFIX = "schedule:"


def resolve_after(store: JobStore, spec: JobSpec) -> JobSpec:
    """The spec with the job that it comes after by its whole id, and that job's results as input.

    Raises JobNotFoundError: none has the id, or several have; or no run of the schedule has a job.
    """
    if spec.after is None:
        return spec
    if spec.after.startswith(SCHEDULE_PREFIX):
        earlier = _newest_of(ScheduleStore(store), spec.after.removeprefix(SCHEDULE_PREFIX))
    else:
        earlier = store.find_job(spec.after)
    return replace(spec, after=earlier.id, input=earlier.results_dir)


def _newest_of(store: ScheduleStore, name: str) -> Job:
    for run in store.history(store.get(name)):
        if run.job_id is not None:
            return store.jobs.job(run.job_id)
    raise JobNotFoundError(f"no run of schedule {name} has a job yet")


def check_chained(store: JobStore, spec: JobSpec, *, overwrite: bool = False) -> Checked:
    """Check a job against the columns that the results of the one before it will have.

    Raises SpecError, OutputError, EngineError: as `check_job`; or the earlier one is over and has
        no results.
    """
    assert spec.after is not None
    earlier = store.job(spec.after)
    if outlook(earlier, store.retries(earlier.id)) == "stopped":
        raise SpecError(
            f"job {earlier.id} is {earlier.state}, so no job can read its results: "
            f"{way_back(earlier)} first"
        )
    _refuse_folder_of(earlier, spec)
    schema = results_schema(store, earlier)
    try:
        return check_job(spec, overwrite=overwrite, schema=schema)
    except SpecError:
        # The column may come after the first rows of a JSON lines file: look at all of them.
        whole = results_schema(store, earlier, reads_all=True)
        if whole.names == schema.names:
            raise
    return check_job(spec, overwrite=overwrite, schema=whole)


def _refuse_folder_of(earlier: Job, spec: JobSpec) -> None:
    if spec.output is not None and is_within(spec.output, earlier.results_dir):
        raise OutputError(
            f"results folder {spec.output} is in that of job {earlier.id}, whose results this job "
            "reads; name another with -o"
        )
