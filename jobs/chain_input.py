"""The results of one job as the input of the next: their columns beforehand, then a copy of them.

The copy is one Parquet file, in input order, with what retries brought. It belongs to the later
job, so that nothing that happens to the earlier one afterwards changes what this one reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jobs.columns import bind_columns
from jobs.dataset import OnProgress, build_manifest
from jobs.export import export_tables
from jobs.records import ChangedError, Job, JobError
from jobs.results import Results, Schema, Table, job_schema, result_schema
from jobs.store import JobStore

COPY_NAME = "input.parquet"


def results_schema(store: JobStore, job: Job, *, reads_all: bool = False) -> Schema:
    """The columns of a job's results, also where it has not begun.

    reads_all: look for columns in all rows of an input of text, not in the first ones alone

    Raises SpecError, DatasetError: its input is gone, has changed, or lacks a column.
    """
    if job.manifest.files:
        return job_schema(_read_whole(job) if reads_all and job.manifest.num_rows is None else job)
    refuse_orphan(job)
    assert job.after is not None
    input_schema = results_schema(store, store.job(job.after), reads_all=reads_all)
    return result_schema(input_schema, bind_columns(job.spec, input_schema), job.spec)


def _read_whole(job: Job) -> Job:
    spec = job.spec
    manifest = build_manifest(
        spec.input,
        encoding=spec.encoding,
        delimiter=spec.delimiter,
        on_bad_utf8=spec.on_bad_utf8,
        sample_nbytes=None,
        only={file.path for file in job.manifest.files},
    )
    return replace(job, manifest=manifest)


def refuse_orphan(job: Job) -> None:
    """Raises ChangedError: what the job was to read is gone, and it has no copy."""
    if not job.manifest.files and job.after is None:
        raise ChangedError(
            f"job {job.id} was to read the results of job {job.spec.after}, which was removed: "
            "submit a new job"
        )


@dataclass(slots=True)
class _Tally:
    """What passes through. not_ok: positions of rows that are not ok"""

    num_rows: int = 0
    not_ok: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def counted(
        self, tables: Iterator[Table], column: str, on_progress: OnProgress
    ) -> Iterator[Table]:
        for table in tables:
            on_progress(self.num_rows)
            statuses = np.array(table.column(column).to_pylist())
            self.not_ok.append(np.flatnonzero(statuses != "ok") + self.num_rows)
            self.num_rows += table.num_rows
            yield table

    @property
    def num_not_ok(self) -> int:
        return sum(map(len, self.not_ok))


def take_input(store: JobStore, job: Job, on_progress: OnProgress = lambda _: None) -> Job:
    """Copy the results that a job is to read, and give it the copy; returns the job with it.

    on_progress: called now and then with the rows copied so far; may raise to stop that

    Raises JobError: rows are not ok and the job wants to fail then.
    Raises ChangedError, ResultsError: the results are gone.
    """
    refuse_orphan(job)
    assert job.after is not None
    finished = store.finished(job.after)
    results = Results(finished)
    folder = store.job_dir(job.id)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for torn in folder.glob(f".{COPY_NAME}.*"):
        torn.unlink()  # of a runner that was killed while it copied
    tally = _Tally()
    column = finished.job.spec.output_prefix + "status"

    def tables() -> Iterator[Table]:
        yield from tally.counted(results.tables(), column, on_progress)
        if tally.num_not_ok and job.spec.after_errors == "fail":
            # Before the copy appears.
            store.note_unreadable_input(job.id)
            raise JobError(_refusal(job.after, tally))

    path = folder / COPY_NAME
    export_tables(finished.job, path, results.schema, tables())
    for place in (path, folder):
        _sync(place)
    leaves_out = job.spec.after_errors == "skip"
    facts = {
        "job": job.after,
        "rows": tally.num_rows,
        "not_ok": tally.num_not_ok,
        "left_out": tally.num_not_ok if leaves_out else 0,
    }
    return store.take_input(
        job.id,
        build_manifest(str(path)),
        {**job.record, "after": facts},
        _kept(job, tally) if leaves_out and tally.num_not_ok else None,
    )


def _refusal(earlier: str | None, tally: _Tally) -> str:
    return (
        f"{tally.num_not_ok} of {tally.num_rows} rows of job {earlier} are not ok, and "
        f"--after-errors is fail; `ntx-batch retry {earlier}` runs them again and puts this job "
        "back, but for those that their input makes fail: submit it again with --after-errors skip"
    )


def _kept(job: Job, tally: _Tally) -> npt.NDArray[np.int64]:
    """(n, 2) row and sample indices of what the job is to run: of each row that is ok, all samples.

    A limit counts the rows that are left out, so that a row has the same index either way.
    """
    num_rows, samples = min(tally.num_rows, job.spec.limit or tally.num_rows), job.spec.samples
    rows = np.setdiff1d(np.arange(num_rows), np.concatenate(tally.not_ok))
    return np.stack([np.repeat(rows, samples), np.tile(np.arange(samples), len(rows))], axis=1)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
