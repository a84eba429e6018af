"""What people do to a job that is there: each says what it did, and may be said twice."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from jobs import control
from jobs.home import Home
from jobs.hook_store import HookStore
from jobs.records import (
    FINAL_STATES,
    INPUT_ERROR_CODES,
    FinishedRows,
    Job,
    JobRequest,
    JobState,
    RunnerError,
    StoreError,
)
from jobs.store import JobStore
from jobs.uris import names_store

STOP_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.05
_DONE: dict[JobRequest, JobState] = {"cancel": "cancelled", "pause": "paused"}


def current_job(store: JobStore, home: Home, job_id: str) -> Job:
    """The job as it is; one whose runner was killed is interrupted, which nobody has noted yet."""
    job = store.job(job_id)
    if job.state == "running":
        with control.runner_kept_away(home) as away:
            if away:
                store.mark_interrupted()
                job = store.job(job_id)
    return job


def cancel(home: Home, job_id: str) -> str:
    """End a job for good; its finished rows are kept. A running one ends after its sweep."""
    return _stop(home, job_id, "cancel")


def pause(home: Home, job_id: str, *, wait: bool = True) -> str:
    """Make a job wait for `resume`; its finished rows are kept.

    wait: until it is paused; else a running one is so after its sweep
    """
    return _stop(home, job_id, "pause", wait=wait)


def _stop(home: Home, job_id: str, request: JobRequest, *, wait: bool = True) -> str:
    wanted = _DONE[request]
    hint = f"; go on with `ntx-batch resume {job_id}`" if request == "pause" else ""
    with JobStore(home.state_path) as store:
        before = current_job(store, home, job_id)
        if before.state == wanted:
            return f"job {job_id} was already {wanted}"
        if before.state in FINAL_STATES:
            return f"job {job_id} had already {_past(before.state)}"
        after = _ask(store, home, job_id, request, timeout_s=STOP_TIMEOUT_S if wait else 0.0)
        has_hooks = HookStore(store).are_open()
    if has_hooks:
        # The job is over either way; the next runner tells those who are to know.
        with contextlib.suppress(RunnerError):
            control.ensure_runner(home)
    if after.state == wanted:
        return f"job {job_id} {wanted}; its {_rows(after)} kept{hint}"
    if after.state in FINAL_STATES:
        return f"job {job_id} {_past(after.state)} before it could be {wanted}"
    return f"job {job_id} will be {wanted} when its sweep ends{hint}"


def _ask(store: JobStore, home: Home, job_id: str, request: JobRequest, *, timeout_s: float) -> Job:
    """Ask, and wait until the runner has done so or the job has ended otherwise."""
    deadline = time.monotonic() + timeout_s
    while True:
        job = current_job(store, home, job_id)
        if job.state in (_DONE[request], *FINAL_STATES):
            return job
        if job.request != request:
            store.set_request(job_id, request)
        elif time.monotonic() > deadline:
            return job
        else:
            time.sleep(POLL_INTERVAL_S)


def _past(state: Literal["completed", "failed", "cancelled"] | str) -> str:
    return "been cancelled" if state == "cancelled" else state


def _rows(job: Job) -> str:
    finished = job.num_ok + job.num_error
    return "1 finished row is" if finished == 1 else f"{finished} finished rows are"


def resume(home: Home, job_id: str) -> str:
    """Put a paused, cancelled or failed job back into the queue, and start a runner.

    Raises ChangedError: its input, its model or the program has changed.
    Raises RunnerError: no runner could be started; the job waits for one.
    """
    with JobStore(home.state_path) as store:
        job = _settled(store, home, job_id)
        said = _why_not(job)
        if said is None:
            said = _queue_again(store, home, job)
    if job.state != "completed":
        control.ensure_runner(home)
    return said


def _settled(store: JobStore, home: Home, job_id: str) -> Job:
    """The job, once what was asked of its runner is done."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while (job := current_job(store, home, job_id)).request and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    return job


def _why_not(job: Job) -> str | None:
    match job.state:
        case "completed":
            hint = f"; `ntx-batch retry {job.id}` runs failed rows again" if job.num_error else ""
            return f"job {job.id} had already completed{hint}"
        case "queued" | "running":
            return f"job {job.id} was already {job.state}"
        case "interrupted":
            return f"job {job.id} was interrupted, and goes on by itself"
        case "failed" if job.waits and job.after:
            return (
                f"job {job.id} has failed with job {job.after}, whose results it is to read, and "
                f"goes on with that one: {job.reason}"
            )
    if job.total and job.num_ok + job.num_error == job.total:
        return (
            f"job {job.id} has finished all its rows; `ntx-batch retry {job.id}` runs the failed "
            "ones again"
        )
    return None


def _queue_again(store: JobStore, home: Home, job: Job) -> str:
    from jobs.chain_input import refuse_orphan
    from jobs.resume_check import check_unchanged_job, new_input_files

    refuse_orphan(job)
    check_unchanged_job(job, store.parts(job.id))
    stores = names_store(job.spec.input, job.results_dir)
    control.check_environment(control.runner_status(home), os.environ, stores=stores)
    try:
        store.set_state(job.id, "queued")
    except StoreError:
        if store.job(job.id).state == job.state:
            raise
        return f"job {job.id} was already {store.job(job.id).state}"
    lines = [f"job {job.id} is queued again; its {_rows(job)} kept"]
    lines += [f"{path} came after the submit and is not read" for path in new_input_files(job)]
    return "\n".join(lines)


def set_priority(home: Home, job_id: str, priority: int) -> str:
    """Let a job that waits run before those of lower priority; a running one runs on."""
    with JobStore(home.state_path) as store:
        if store.set_priority(job_id, priority):
            return f"job {job_id} has priority {priority}"
        return f"job {job_id} had already {_past(store.job(job_id).state)}"


def retry(home: Home, job_id: str, *, hopeless: bool = False) -> Job:
    """Queue a job of the failed rows, and start a runner. The new job.

    hopeless: those too that their input alone makes fail

    Raises SpecError: there are none, or the job or a retry of it is not over.
    Raises RunnerError: no runner could be started; the new job waits for one.
    """
    from jobs.retry import create_retry

    control.check_environment(control.runner_status(home), os.environ)
    with JobStore(home.state_path) as store:
        current_job(store, home, job_id)
        stores = names_store(store.job(job_id).spec.input)
        environment = control.environment_of(os.environ, stores=stores)
        job = create_retry(store, job_id, environment, hopeless=hopeless)
    control.ensure_runner(home)
    return job


def error_codes(finished: FinishedRows) -> Counter[str]:
    """How many of a job's failed rows, less those that a retry finished, have each code."""
    from jobs.results import Results

    column = finished.job.spec.output_prefix + "error_code"
    codes: Counter[str] = Counter()
    for table in Results(finished).tables(errors=True):
        codes.update(table.column(column).to_pylist())
    return codes


def hopeless_rows(codes: Mapping[str, int], *, run: bool) -> str | None:
    """What to know of failed rows where the input itself is to blame for some.

    run: whether those run again too
    """
    hopeless = {code: count for code, count in codes.items() if code in INPUT_ERROR_CODES}
    if not hopeless:
        return None
    reasons = ", ".join(f"{count} {code}" for code, count in sorted(hopeless.items()))
    which = "will fail again" if run else "are left out"
    return (
        f"{sum(hopeless.values())} of {sum(codes.values())} rows failed for reasons in their input "
        f"and {which} ({reasons}): correct the input and submit it anew"
    )


def remove(home: Home, job_id: str) -> str:
    """Forget a job, and delete its log and its results, unless those are in a folder of `-o`.

    Raises StoreError: it is running, or another job has yet to read its results.
    """
    with JobStore(home.state_path) as store:
        job = current_job(store, home, job_id)
        store.remove_job(job_id)
    folder = home.job_dir(job_id)
    shutil.rmtree(folder, ignore_errors=True)
    if Path(job.results_dir).is_relative_to(folder):
        return f"job {job_id} removed with its results"
    return f"job {job_id} removed; its results stay in {job.results_dir}"
