"""Jobs, inputs and finished rows with defaults, for tests of the job layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine import FinishedRow
from jobs.dataset import build_manifest
from jobs.prepare import RowFacts
from jobs.records import InputFile, Job, JobSpec, Manifest, RowBatch
from jobs.results import ResultRow, Schema, build_row_batch, job_schema
from jobs.store import JobStore
from tests.golden import GOLDEN


def make_spec(**changes: Any) -> JobSpec:
    return JobSpec(**{"input": "/in/prompts.parquet", "model": "/models/tiny.gguf"} | changes)


def make_manifest(num_rows: int = 10) -> Manifest:
    file = InputFile(
        path="/in/prompts.parquet", nbytes=100, mtime_ns=1, num_rows=num_rows, first_row=0
    )
    return Manifest(files=(file,))


def make_job(store: JobStore, *, num_rows: int = 10, **spec: Any) -> Job:
    """A queued job whose input does not exist."""
    return store.create_job(make_spec(**spec), make_manifest(num_rows), {})


def make_batch(rows: Iterable[int], *, num_error: int = 0, ipc: bytes = b"rows") -> RowBatch:
    """Finished rows whose content is of no account."""
    indices = tuple(rows)
    return RowBatch(
        row_indices=indices,
        sample_indices=(0,) * len(indices),
        num_ok=len(indices) - num_error,
        num_error=num_error,
        prompt_tokens=2 * len(indices),
        completion_tokens=3 * len(indices),
        ipc=ipc,
    )


def write_input(path: Path, columns: Mapping[str, Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), path, **options)
    return path


def submit_input(store: JobStore, path: Path, **spec: Any) -> Job:
    """A job over a file that is there, and a model."""
    values = {"input": str(path), "model": str(GOLDEN / "llama-q4_0.gguf")} | spec
    return store.create_job(make_spec(**values), build_manifest(path), {})


def finish_rows(job: Job, rows: Sequence[FinishedRow]) -> RowBatch:
    """The spool batch of rows that carry what a job's input holds."""
    schema = job_schema(job)
    return build_row_batch(schema, [result_row(job, schema, row) for row in rows])


def result_row(job: Job, schema: Schema, row: FinishedRow) -> ResultRow:
    table = pa.concat_tables(pq.read_table(file.path) for file in job.manifest.files)
    names = [name for name in schema.names if name in table.column_names]
    one = table.select(names).slice(row.row_index, 1).combine_chunks()
    carried = one.to_batches()[0] if names else pa.record_batch([], [])
    return ResultRow(row, RowFacts(), carried)


def ok_row(row_index: int, text: str = "answer", **changes: Any) -> FinishedRow:
    values = {"finish_reason": "stop", "prompt_tokens": 2, "completion_tokens": 3}
    return FinishedRow(row_index=row_index, text=text, **values | changes)


def bad_row(
    row_index: int, code: str = "empty_prompt", message: str = "no text", **changes: Any
) -> FinishedRow:
    values = {"status": "error", "error_code": code, "error_message": message}
    return FinishedRow(row_index=row_index, **values | changes)
