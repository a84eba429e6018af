"""The state of all jobs in SQLite: jobs, finished rows on their way to parts, parts, the runner.

Many processes read; clients write jobs and requests; the runner alone writes progress.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from jobs.chains import next_move
from jobs.database import BUSY_TIMEOUT_S, Database, Row
from jobs.progress_log import MAX_POINTS, ProgressPoint
from jobs.records import (
    FINAL_STATES,
    Fingerprint,
    FinishedRows,
    Hook,
    HookEvent,
    HookTarget,
    Job,
    JobNotFoundError,
    JobRequest,
    JobSpec,
    JobState,
    KeyTakenError,
    Manifest,
    OutputError,
    RunnerInfo,
    StoreError,
)
from jobs.row_keys import pack_keys, unpack_keys
from jobs.row_store import RowStore
from jobs.specs import (
    fingerprint_from_json,
    fingerprint_to_json,
    hook_target_from_json,
    hook_target_to_json,
    manifest_from_json,
    manifest_to_json,
    spec_from_json,
    spec_to_json,
)
from jobs.uris import resolved

# The states from which a job may come to each state; schema.sql says when.
FROM_STATES: Mapping[JobState, tuple[JobState, ...]] = {
    "queued": ("paused", "failed", "cancelled"),
    "running": ("queued", "interrupted"),
    "paused": ("queued", "running", "interrupted"),
    "interrupted": ("running",),
    "completed": ("running",),
    "failed": ("running",),
    "cancelled": ("queued", "running", "paused", "interrupted"),
}

_ID_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u


class JobStore(RowStore):
    """One connection to the state database, created or brought up to date where needed.

    Use it in the thread that made it; other threads and processes open their own.

    path: the database file; its folder must exist
    clock: Unix seconds

    Raises StoreError: the database cannot be opened or is of a later version.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(path)
        super().__init__(Database(self.path, busy_timeout_s=busy_timeout_s), clock)

    @property
    def database(self) -> Database:
        """The connection, for tables of others in the same file."""
        return self._db

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> JobStore:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Jobs

    def create_job(
        self,
        spec: JobSpec,
        manifest: Manifest,
        environment: Mapping[str, str],
        results_dir: str | Path | None = None,
        *,
        key: str | None = None,
        retry_of: str | None = None,
        selection: npt.NDArray[np.int64] | None = None,
        fingerprint: Fingerprint | None = None,
        overwrite: bool = False,
        priority: int = 0,
        hooks: Mapping[HookEvent, HookTarget] | None = None,
    ) -> Job:
        """Put a job at the end of the queue; its results folder is its own from here on.

        With `spec.after` and a manifest without files it waits for that job.

        environment: variables that the job needs in its runner
        results_dir: None takes the spec's output, else jobs/<id>/results beside the database
        key: no other job may have it
        retry_of: the job whose failed rows this one runs again
        selection: (n, 2) row and sample indices of what to run, ascending; None is all that the
            spec says
        overwrite: take the folder from a job that is over
        hooks: whom to tell of its end

        Raises KeyTakenError: a job has the key.
        Raises OutputError: the folder belongs to another job.
        """
        job_id = new_job_id(self._clock())
        chosen = results_dir or spec.output or self.job_dir(job_id) / "results"
        folder = resolved(chosen)
        total = _planned_rows(spec, manifest) if selection is None else len(selection)
        with self._db.atomic():
            if key is not None and (taken := self._db.row("select_job_by_key", key=key)):
                raise KeyTakenError(key, taken["id"])
            self._take_folder(folder, job_id, overwrite=overwrite)
            self._db.insert(
                "insert_job",
                id=job_id,
                spec=spec_to_json(spec),
                manifest=manifest_to_json(manifest),
                environment=json.dumps(dict(environment), sort_keys=True),
                results_dir=folder,
                now=self._clock(),
                total=total,
                key=key,
                retry_of=retry_of,
                fingerprint=None if fingerprint is None else fingerprint_to_json(fingerprint),
                after=None if manifest.files else spec.after,
                priority=priority,
            )
            if selection is not None:
                self._insert_selection(job_id, selection)
            for event, target in (hooks or {}).items():
                text = hook_target_to_json(target)
                self._db.insert("insert_hook", job_id=job_id, event=event, target=text)
            self._settle_chains()
            return self.job(job_id)

    def job_dir(self, job_id: str) -> Path:
        """Where files of a job are, beside the database."""
        return self.path.parent / "jobs" / job_id

    def job(self, job_id: str) -> Job:
        """The job of this whole id. Raises JobNotFoundError."""
        row = self._db.row("select_job", id=job_id)
        if row is None:
            raise JobNotFoundError(f"there is no job {job_id}; `ntx-batch list` shows all")
        return _job(row)

    def job_by_key(self, key: str) -> Job | None:
        """The job that was submitted with this key."""
        row = self._db.row("select_job_by_key", key=key)
        return None if row is None else _job(row)

    def find_job(self, id_prefix: str) -> Job:
        """The one job whose id begins with `id_prefix`, in either case of letters.

        Raises JobNotFoundError: none does, or several do; it lists them.
        """
        prefix = id_prefix.strip().lower()
        rows = self._db.rows("select_jobs_by_prefix", prefix=prefix) if prefix else []
        if len(rows) == 1:
            return _job(rows[0])
        if not rows:
            raise JobNotFoundError(f"there is no job {id_prefix!r}; `ntx-batch list` shows all")
        matches = ", ".join(row["id"] for row in rows[-10:])
        raise JobNotFoundError(f"{len(rows)} jobs begin with {id_prefix!r}, among them {matches}")

    def list_jobs(self) -> list[Job]:
        """Every job in the order of submission."""
        return [_job(row) for row in self._db.rows("select_jobs")]

    def retries(self, job_id: str) -> list[Job]:
        """Retries of a job, theirs, and so on, in the order of submission."""
        return [_job(row) for row in self._db.rows("select_retries", job_id=job_id)]

    def selection(self, job_id: str) -> npt.NDArray[np.int64] | None:
        """(n, 2) row and sample indices of a job's output rows; None: those of all its input."""
        row = self._db.row("select_selection", job_id=job_id)
        return None if row is None else unpack_keys(row["row_keys"])

    def remove_job(self, job_id: str) -> None:
        """Forget a job and its rows; files stay.

        Raises StoreError: a runner works on it, or another job has yet to read what it has.
        """
        with self._db.atomic():
            if readers := self._db.rows("select_readers", id=job_id):
                ids, first = ", ".join(row["id"] for row in readers), readers[0]
                end = "rm" if first["state"] == "failed" else "cancel"
                raise StoreError(
                    f"job {ids} has yet to read what job {job_id} has: wait for that, or end it "
                    f"with `ntx-batch {end} {first['id']}`"
                )
            if self._db.row("delete_job", id=job_id) is None:
                state = self.job(job_id).state
                raise StoreError(f"job {job_id} is {state}: cancel or pause it first")
            self._settle_chains()

    def claim_job(self, passed_over: Collection[str] = ()) -> Job | None:
        """Make a queued or interrupted job running, for the caller; None if none can run.

        Of those with the highest priority it is the oldest. Its attempt rises by one.

        passed_over: ids of jobs that cannot go on yet
        """
        with self._db.atomic():
            row = self._db.row(
                "claim_job", now=self._clock(), passed_over=json.dumps(sorted(passed_over))
            )
            return None if row is None else self.job(row["id"])

    def mark_interrupted(self) -> list[str]:
        """No runner is there: running jobs have lost theirs. Returns their ids.

        They become interrupted, or what a client had asked for and the runner did not do any more.
        The caller holds the lock, or keeps others from taking it.
        """
        with self._db.atomic():
            rows = self._db.rows("mark_interrupted", now=self._clock())
            self._settle_chains()
            return [row["id"] for row in rows]

    def set_state(self, job_id: str, state: JobState, *, reason: str | None = None) -> None:
        """Move a job to a state, with the reason for people; a request is thereby answered.

        One that is let go of while a client asks for its end is cancelled instead.

        Raises StoreError: no way leads there from the state it is in.
        """
        with self._db.atomic():
            moved = self._db.row(
                "set_state",
                id=job_id,
                state=state,
                reason=reason,
                final=state in FINAL_STATES,
                now=self._clock(),
                from_states=json.dumps(FROM_STATES[state]),
            )
            if moved is None:
                now_in = self.job(job_id).state
                raise StoreError(f"job {job_id} is {now_in} and cannot become {state}")
            self._settle_chains()

    def set_request(self, job_id: str, request: JobRequest) -> bool:
        """Ask the runner to pause or cancel a job; one that waits changes at once.

        Returns whether that could have an effect: False for a job that is over or is so already.
        """
        with self._db.atomic():
            changed = self._db.row("set_request", id=job_id, request=request, now=self._clock())
            self._settle_chains()
            return changed is not None or not self.job(job_id)

    def set_priority(self, job_id: str, priority: int) -> bool:
        """Let a job run before those of lower priority; False: it is over."""
        with self._db.atomic():
            changed = self._db.row("set_priority", id=job_id, priority=priority)
            return changed is not None or not self.job(job_id)

    def take_input(
        self,
        job_id: str,
        manifest: Manifest,
        record: Mapping[str, Any],
        selection: npt.NDArray[np.int64] | None,
    ) -> Job:
        """Give a job its copy of the results that it was to read; returns it as it is then.

        selection: as in `create_job`
        """
        with self._db.atomic():
            text = json.dumps(dict(record))
            self._must_change(
                "take_input", job_id, manifest=manifest_to_json(manifest), record=text
            )
            if selection is not None:
                self._insert_selection(job_id, selection)
            return self.job(job_id)

    def note_unreadable_input(self, job_id: str) -> None:
        """The job is about to fail for rows of the one before it, and is put back with a retry."""
        with self._db.atomic():
            self._must_change("set_waits", job_id)

    def set_total(self, job_id: str, total: int) -> None:
        """Set the number of result rows that the job will have."""
        with self._db.atomic():
            self._must_change("set_total", job_id, total=total)

    def set_manifest(self, job_id: str, manifest: Manifest) -> None:
        """Replace the job's manifest by one that knows more of the same files."""
        with self._db.atomic():
            self._must_change("set_manifest", job_id, manifest=manifest_to_json(manifest))

    def set_fingerprint(self, job_id: str, fingerprint: Fingerprint) -> None:
        """Keep what later starts of the job are compared with."""
        with self._db.atomic():
            text = fingerprint_to_json(fingerprint)
            self._must_change("set_fingerprint", job_id, fingerprint=text)

    def set_record(
        self, job_id: str, record: Mapping[str, Any], point: ProgressPoint | None = None
    ) -> None:
        """Replace the job's record, whose values must have a JSON form, and keep one more point."""
        with self._db.atomic():
            self._must_change("set_record", job_id, record=json.dumps(dict(record)))
            if point is not None:
                self._db.insert("insert_progress_point", job_id=job_id, **asdict(point))
                self._db.run("thin_progress_points", job_id=job_id, max_points=MAX_POINTS)

    def progress_points(self, job_id: str) -> list[ProgressPoint]:
        """What the job had done at some moments, in the order of time."""
        rows = self._db.rows("select_progress_points", job_id=job_id)
        return [ProgressPoint(**dict(row)) for row in rows]

    # Finished rows

    def finished(self, job_id: str) -> FinishedRows:
        """The job and its retries, and where their finished rows are, as of one instant."""
        with self._db.snapshot():
            retries = [self._finished(job) for job in self.retries(job_id)]
            begun = tuple(retry for retry in retries if retry.parts or retry.blobs)
            return replace(self._finished(self.job(job_id)), retries=begun)

    # The runner

    def set_runner(
        self,
        *,
        pid: int,
        pid_start_time: float,
        boot_id: str,
        host: str,
        environment: Mapping[str, str],
    ) -> None:
        """Say that this process, which holds the lock, is the runner, and is not stopping."""
        with self._db.atomic():
            self._db.run(
                "set_runner",
                pid=pid,
                pid_start_time=pid_start_time,
                boot_id=boot_id,
                host=host,
                environment=json.dumps(dict(environment), sort_keys=True),
                now=self._clock(),
            )

    def set_heartbeat(self, pid: int) -> None:
        """Say that the runner of this pid lives."""
        with self._db.atomic():
            self._db.run("set_heartbeat", pid=pid, now=self._clock())

    def runner(self) -> RunnerInfo | None:
        """The runner that last said it runs; it may be dead."""
        row = self._db.row("select_runner")
        if row is None:
            return None
        values = {name: row[name] for name in row.keys() if name != "id"}  # noqa: SIM118
        return RunnerInfo(**values | {"environment": json.loads(row["environment"])})

    def set_stopping(self) -> None:
        """The runner must not claim another job."""
        with self._db.atomic():
            self._db.run("set_stopping")

    def stop_if_idle(self) -> bool:
        """Find the queue empty and mark the runner stopping, as one step; False where it is not.

        A submit commits its job first and then looks for a runner. So either this sees the job,
        or the submit sees a runner that is stopping, and starts the next.
        """
        with self._db.atomic():
            return self._db.row("stop_if_idle") is not None

    def clear_runner(self, pid: int) -> None:
        """The runner of this pid ends in good order."""
        with self._db.atomic():
            self._db.run("delete_runner", pid=pid)

    # Steps of the above

    def _settle_chains(self) -> None:
        """Let jobs follow those whose results they are to read, in the transaction of a change."""
        for row in self._db.rows("select_chained"):
            job = self.job(row["id"])
            assert job.after is not None
            move = next_move(job, self.job(job.after), self.retries(job.after))
            if move is not None:
                self._db.run("move_chained", id=job.id, now=self._clock(), **asdict(move))

    def _take_folder(self, folder: str, job_id: str, *, overwrite: bool) -> None:
        owner = self._db.row("select_folder_owner", results_dir=folder)
        if owner is None:
            return
        if not overwrite:
            raise OutputError(
                f"results folder {folder} belongs to job {owner['id']}; name another with -o, or "
                "take it over with --overwrite"
            )
        released = self._db.row(
            "release_folder",
            id=owner["id"],
            new_dir=str(self.job_dir(owner["id"]) / "results"),
            reason=f"job {job_id} took over its results folder (--overwrite)",
        )
        if released is None:
            state = self.job(owner["id"]).state
            raise OutputError(
                f"results folder {folder} belongs to job {owner['id']}, which is {state}: cancel "
                "it first, or name another with -o"
            )

    def _insert_selection(self, job_id: str, keys: npt.NDArray[np.int64]) -> None:
        self._db.insert(
            "insert_selection", job_id=job_id, num_rows=len(keys), row_keys=pack_keys(keys)
        )

    def _finished(self, job: Job) -> FinishedRows:
        return FinishedRows(
            job=job,
            parts=tuple(part for part in self.parts(job.id) if part.state == "committed"),
            blobs=tuple(self.spool(job.id)),
            selection=self.selection(job.id),
        )

    def _must_change(self, query: str, job_id: str, **values: Any) -> None:
        if self._db.row(query, id=job_id, **values) is None:
            self.job(job_id)


def new_job_id(now: float) -> str:
    """An id of 12 letters and digits: milliseconds of creation, then chance. Sorts by time."""
    number = int(now * 1000) << 18 | secrets.randbits(18)
    return "".join(_ID_DIGITS[number >> shift & 31] for shift in range(55, -1, -5))


def _planned_rows(spec: JobSpec, manifest: Manifest) -> int | None:
    if manifest.num_rows is None or not manifest.files:
        return None
    num_rows = manifest.num_rows if spec.limit is None else min(spec.limit, manifest.num_rows)
    return num_rows * spec.samples


def _job(row: Row) -> Job:
    values = {name: row[name] for name in row.keys() if name != "num"}  # noqa: SIM118
    return Job(
        **values
        | {
            "spec": spec_from_json(row["spec"]),
            "manifest": manifest_from_json(row["manifest"]),
            "environment": json.loads(row["environment"]),
            "record": json.loads(row["record"]),
            "fingerprint": row["fingerprint"] and fingerprint_from_json(row["fingerprint"]),
            "waits": bool(row["waits"]),
            "hooks": _hooks(row["hooks"]),
        }
    )


def _hooks(text: str) -> tuple[Hook, ...]:
    found = sorted(json.loads(text), key=lambda values: int(values["id"]))
    return tuple(
        Hook(**values | {"target": hook_target_from_json(json.dumps(values["target"]))})
        for values in found
    )
