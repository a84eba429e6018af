"""A job's failed rows once more, as a job of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from jobs.records import FINAL_STATES, INPUT_ERROR_CODES, FinishedRows, Job, SpecError
from jobs.results import Results
from jobs.store import JobStore


def create_retry(
    store: JobStore, job_id: str, environment: Mapping[str, str], *, hopeless: bool = False
) -> Job:
    """Queue a job of the rows that failed, those left out that an earlier retry finished.

    It has the priority and the hooks of the job.

    environment: variables that the job needs in its runner
    hopeless: rows too that their input alone makes fail

    Raises SpecError: the job or a retry of it is not over, or it has no such rows.
    """
    job = store.job(job_id)
    if job.state not in FINAL_STATES:
        raise SpecError(f"job {job_id} is {job.state}: retry it when it is over")
    for other in store.retries(job_id):
        if other.state not in FINAL_STATES:
            raise SpecError(f"job {other.id} retries job {job_id} already and is {other.state}")
    finished = store.finished(job_id)
    keys = failed_keys(finished, hopeless=hopeless)
    if not len(keys):
        raise SpecError(f"job {job_id} has no failed rows to retry{_all_hopeless(finished)}")
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


def _all_hopeless(finished: FinishedRows) -> str:
    """What to say where no failed row may do better."""
    num_failed = len(failed_keys(finished, hopeless=True))
    if not num_failed:
        return ""
    return (
        f": all {num_failed} that did failed for reasons in their input; correct it and submit it "
        "anew, or run them all the same with --all"
    )


def failed_keys(finished: FinishedRows, *, hopeless: bool) -> npt.NDArray[np.int64]:
    """(n, 2) row and sample indices of results that are errors, ascending.

    hopeless: those too whose code says that their input alone makes them fail
    """
    prefix = finished.job.spec.output_prefix
    names = (prefix + "row_index", prefix + "sample_index")
    keys = [np.empty((0, 2), np.int64)]
    for table in Results(finished).tables(errors=True):
        codes = table.column(prefix + "error_code").to_pylist()
        wanted = np.array([hopeless or code not in INPUT_ERROR_CODES for code in codes])
        keys.append(np.stack([table.column(name).to_numpy() for name in names], axis=1)[wanted])
    return np.concatenate(keys, dtype=np.int64)
