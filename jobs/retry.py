"""A job's failed rows once more, as a job of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from jobs.records import FINAL_STATES, FinishedRows, Job, SpecError
from jobs.results import Results
from jobs.store import JobStore


def create_retry(store: JobStore, job_id: str, environment: Mapping[str, str]) -> Job:
    """Queue a job of the rows that failed, those left out that an earlier retry finished.

    environment: variables that the job needs in its runner

    Raises SpecError: the job or a retry of it is not over, or no row has failed.
    """
    job = store.job(job_id)
    if job.state not in FINAL_STATES:
        raise SpecError(f"job {job_id} is {job.state}: retry it when it is over")
    for other in store.retries(job_id):
        if other.state not in FINAL_STATES:
            raise SpecError(f"job {other.id} retries job {job_id} already and is {other.state}")
    rows = failed_rows(store.finished(job_id))
    if not len(rows):
        raise SpecError(f"job {job_id} has no failed rows to retry")
    return store.create_job(
        replace(job.spec, output=None),
        job.manifest,
        environment,
        retry_of=job_id,
        selection=rows,
        fingerprint=job.fingerprint,
    )


def failed_rows(finished: FinishedRows) -> npt.NDArray[np.int64]:
    """Indices of rows whose result is an error, ascending."""
    column = finished.job.spec.output_prefix + "row_index"
    tables = Results(finished).tables(errors=True)
    columns = [table.column(column).to_numpy() for table in tables]
    return np.unique(np.concatenate([np.empty(0, np.int64), *columns]))
