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

    It has the priority and the hooks of the job.

    environment: variables that the job needs in its runner

    Raises SpecError: the job or a retry of it is not over, or no row has failed.
    """
    job = store.job(job_id)
    if job.state not in FINAL_STATES:
        raise SpecError(f"job {job_id} is {job.state}: retry it when it is over")
    for other in store.retries(job_id):
        if other.state not in FINAL_STATES:
            raise SpecError(f"job {other.id} retries job {job_id} already and is {other.state}")
    keys = failed_keys(store.finished(job_id))
    if not len(keys):
        raise SpecError(f"job {job_id} has no failed rows to retry")
    return store.create_job(
        replace(job.spec, output=None),
        job.manifest,
        environment,
        retry_of=job_id,
        selection=keys,
        fingerprint=job.fingerprint,
        priority=job.priority,
        hooks={hook.event: hook.target for hook in job.hooks},
    )


def failed_keys(finished: FinishedRows) -> npt.NDArray[np.int64]:
    """(n, 2) row and sample indices of results that are errors, ascending."""
    prefix = finished.job.spec.output_prefix
    names = (prefix + "row_index", prefix + "sample_index")
    keys = [np.empty((0, 2), np.int64)]
    for table in Results(finished).tables(errors=True):
        keys.append(np.stack([table.column(name).to_numpy() for name in names], axis=1))
    return np.concatenate(keys, dtype=np.int64)
