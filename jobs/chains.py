"""What becomes of a job that reads another's results: it waits, it may run, or its chain stops.

Policy alone: jobs in, decisions out. The store asks in each transaction that changes a job's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jobs.records import FINAL_STATES, Job, JobState

Outlook = Literal["waits", "ready", "stopped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """What changes of a job that comes after another. Fields are those of `Job`."""

    state: JobState
    waits: bool
    reason: str | None


def outlook(earlier: Job, retries: Sequence[Job]) -> Outlook:
    """Whether the results of a job can be read, or will be.

    retries: of it, and theirs; while one is not over, what it brings is waited for
    """
    if earlier.state not in FINAL_STATES:
        return "waits"
    if earlier.state != "completed" and not _wants_retry(earlier):
        return "stopped"
    if any(retry.state not in FINAL_STATES for retry in retries):
        return "waits"
    states = (earlier.state, *(retry.state for retry in retries))
    return "ready" if "completed" in states else "stopped"


def _wants_retry(job: Job) -> bool:
    """Whether a job has failed for its rows alone, so that there is nothing left to resume."""
    return job.state == "failed" and job.num_remaining == 0


def way_back(earlier: Job) -> str:
    """The command that gives a chain its results after all."""
    return f"`ntx-batch {'retry' if _wants_retry(earlier) else 'resume'} {earlier.id}`"


def next_move(job: Job, earlier: Job, retries: Sequence[Job]) -> Move | None:
    """What becomes of a job now that the one before it, or a retry of that, has changed.

    job: has yet to read the results of `earlier`, and is not running; one that has failed did so
        with `earlier`, and is put back once something of that is on its way again
    """
    now = outlook(earlier, retries)
    if job.state == "failed":
        if now != "waits":
            return None
        return Move(state="queued", waits=True, reason=waiting_reason(earlier, retries))
    if now == "stopped":
        return Move(state="failed", waits=True, reason=stopped_reason(earlier))
    waits = now == "waits"
    reason = job.reason
    if job.state == "queued":
        reason = waiting_reason(earlier, retries) if waits else None
    if (waits, reason) == (job.waits, job.reason):
        return None
    return Move(state=job.state, waits=waits, reason=reason)


def waiting_reason(earlier: Job, retries: Sequence[Job]) -> str:
    """What a job waits for: the one before it, or a retry of that."""
    if earlier.state not in FINAL_STATES:
        return f"waits for job {earlier.id}"
    retry = next(retry for retry in retries if retry.state not in FINAL_STATES)
    return f"waits for job {retry.id}, a retry of job {earlier.id}"


def stopped_reason(earlier: Job) -> str:
    """Why a chain has stopped: names the job that stopped it, however far before."""
    if earlier.state == "failed" and earlier.waits and earlier.reason:
        return earlier.reason
    what = "was cancelled" if earlier.state == "cancelled" else "failed"
    return f"its chain stopped: job {earlier.id} {what}; {way_back(earlier)} puts it back"
