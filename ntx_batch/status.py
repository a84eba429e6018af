"""A job's numbers at one moment, as plain values: counts, rates, the time left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jobs.hooks import shown_target
from jobs.records import Hook, Job


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Averages since the job's first row was admitted; None before there is anything to measure.

    Copies and failed rows count for nothing.

    tokens_per_s: generated tokens, those of rows on board among them while the job runs
    prompt_tokens_per_s: prompt tokens, likewise, without those that were reused
    eta_s: seconds until the last row, at the rate of the rows so far
    """

    tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    eta_s: float | None = None


def rates_of(job: Job, now: float) -> Rates:
    """Rates of a job at the Unix time `now`."""
    elapsed_s = _working_s(job, now)
    progress = job.record.get("progress") or {}
    completion_tokens = max(job.completion_tokens, progress.get("completion_tokens", 0))
    prompt_tokens = max(job.prompt_tokens, progress.get("prompt_tokens", 0))
    if elapsed_s <= 0 or not completion_tokens + prompt_tokens:
        return Rates()
    done, left = job.num_ok + job.num_error, job.num_remaining
    counts_down = job.state == "running" and done > 0 and left is not None
    return Rates(
        tokens_per_s=completion_tokens / elapsed_s,
        prompt_tokens_per_s=max(0, prompt_tokens - job.reused_tokens) / elapsed_s,
        eta_s=elapsed_s / done * (left or 0) if counts_down else None,
    )


def reused_share(job: Job) -> float:
    """The share of the prompt tokens of finished rows that were not computed again."""
    return job.reused_tokens / job.prompt_tokens if job.prompt_tokens else 0.0


def took_s(job: Job, now: float) -> float | None:
    """Seconds from a job's start to its end, or to `now` while it runs; None in other states."""
    end = now if job.state == "running" else job.finished_at
    return None if job.started_at is None or end is None else end - job.started_at


def _working_s(job: Job, now: float) -> float:
    """Seconds from the first admission of a row to the last commit, or to `now` while running.

    Those in which nothing but the KV cache's accuracy was measured are left out.
    """
    started = job.record.get("first_admission_at")
    if started is None:
        return 0.0
    end = now if job.state == "running" else job.record.get("last_commit_at", now)
    measured_s = (job.record.get("kv_accuracy") or {}).get("measure_s", 0.0)
    return max(0.0, float(end - started - measured_s))


def status_record(job: Job, now: float) -> dict[str, Any]:
    """What `ntx-batch status --json` prints. Times are ISO 8601 in UTC; unknown values None."""
    rates = rates_of(job, now)
    return {
        "job": job.id,
        "state": job.state,
        "total": job.total,
        "ok": job.num_ok,
        "error": job.num_error,
        "cancelled": job.num_cancelled,
        "remaining": job.num_remaining,
        "tokens_per_s": _rounded(rates.tokens_per_s),
        "prompt_tokens_per_s": _rounded(rates.prompt_tokens_per_s),
        "eta_s": _rounded(rates.eta_s),
        "exit_code": job.exit_code,
        "created_at": iso_time(job.created_at),
        "started_at": iso_time(job.started_at),
        "finished_at": iso_time(job.finished_at),
        "reason": job.reason,
        "prompt_tokens": job.prompt_tokens,
        "reused_tokens": job.reused_tokens,
        "completion_tokens": job.completion_tokens,
        "copied": job.num_copied,
        "attempt": job.attempt,
        "key": job.key,
        "retry_of": job.retry_of,
        "schedule": job.schedule,
        "run": job.run,
        "after": job.spec.after,
        "priority": job.priority,
        "hooks": [hook_record(hook) for hook in job.hooks],
        "input": job.spec.input,
        "model": job.spec.model,
        "results": job.results_dir,
        "warnings": list(input_warnings(job)),
        "record": plain(job.record),
    }


def hook_record(hook: Hook) -> dict[str, Any]:
    """Who is told of a job's end, without secrets, and how far that is."""
    return {
        "event": hook.event,
        "target": shown_target(hook.target),
        "state": hook.state,
        "attempts": hook.num_attempts,
        "exit_status": hook.exit_status,
        "error": hook.error,
        "tried_at": iso_time(hook.tried_at),
    }


def input_warnings(job: Job) -> Iterator[str]:
    """What the input's owner may not expect; known once the rows are counted."""
    facts = job.record.get("input") or {}
    if count := facts.get("duplicate_ids"):
        rows = "row repeats" if count == 1 else "rows repeat"
        yield f"{count} {rows} an id that came before; all rows run"
    if count := facts.get("null_ids"):
        rows = "row has" if count == 1 else "rows have"
        yield f"{count} {rows} no id; row_index tells rows apart"


def iso_time(unix_s: float | None) -> str | None:
    if unix_s is None:
        return None
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")


def plain(value: Any) -> Any:
    """The same value out of JSON's types alone."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
