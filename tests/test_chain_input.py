"""What a job gets of the one before it: a copy of its results in order, less what it leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import FinishedRow
from jobs.chain_input import results_schema, take_input
from jobs.columns import bind_columns
from jobs.dataset import read_schema
from jobs.job_run import JobRun
from jobs.publish import claim_folder, publish_part
from jobs.records import RESULT_COLUMNS, ChangedError, Job, JobError, Manifest
from jobs.results import job_schema, read_results
from jobs.retry import create_retry
from jobs.store import JobStore
from tests.job_factories import bad_row, finish_rows, make_spec, ok_row, submit_input, write_input
from tests.runner_helpers import MODEL


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with JobStore(tmp_path / "state.sqlite") as store:
        yield store


def run_job(store: JobStore, job: Job, *rows: FinishedRow, state: Any = "completed") -> None:
    """Finish a job with these rows, some in a part and the last in the spool."""
    claimed = store.claim_job()
    assert claimed is not None and claimed.id == job.id
    claim_folder(job.results_dir, job.id)
    for some in (rows[:-1], rows[-1:]):
        store.commit_batch(job.id, finish_rows(job, some))
        part, blobs = store.begin_part(job.id)
        if some is rows[:-1]:
            publish_part(job, part, blobs)
            store.commit_part(job.id, part.number)
    store.set_state(job.id, state)


def first_job(store: JobStore, tmp_path: Path, num_rows: int = 4, **spec: Any) -> Job:
    columns = {"id": [f"r{n}" for n in range(num_rows)], "prompt": ["p"] * num_rows}
    return submit_input(store, write_input(tmp_path / "in.parquet", columns), **spec)


def chain_after(store: JobStore, earlier: Job, **spec: Any) -> Job:
    values = {"after": earlier.id, "model": str(MODEL), "prompt_template": "{{ generated_text }}"}
    return store.create_job(make_spec(**values | spec), Manifest(files=()), {})


def take(store: JobStore, job: Job) -> Job:
    claimed = store.claim_job()
    assert claimed is not None and claimed.id == job.id
    return take_input(store, claimed)


def copied(job: Job) -> pa.Table:
    return pq.read_table(job.manifest.files[0].path)


def test_the_copy_is_in_input_order_with_all_columns(store: JobStore, tmp_path: Path) -> None:
    first = first_job(store, tmp_path)
    second = chain_after(store, first)
    run_job(store, first, ok_row(2, "c"), ok_row(0, "a"), ok_row(3, "d"), ok_row(1, "b"))
    planned = results_schema(store, store.job(first.id))
    taken = take(store, second)
    table = copied(taken)
    assert table.column("generated_text").to_pylist() == ["a", "b", "c", "d"]
    assert table.schema.equals(planned) and table.schema.equals(read_schema(taken.manifest))
    assert table.equals(read_results(store.finished(first.id)))
    assert store.selection(second.id) is None
    assert taken.record["after"] == {"job": first.id, "rows": 4, "not_ok": 0, "left_out": 0}


def test_columns_are_known_before_anything_has_run(store: JobStore, tmp_path: Path) -> None:
    first = first_job(store, tmp_path, output_prefix="a_")
    second = chain_after(store, first, prompt_template="{{ a_generated_text }}")
    third = chain_after(store, second)
    ours = [f"a_{name}" for name in RESULT_COLUMNS]
    assert results_schema(store, store.job(first.id)).names == ["id", *ours]
    assert results_schema(store, second).names == ["id", *ours, *RESULT_COLUMNS]
    # The third takes the place of the second's columns, and carries the first's.
    assert results_schema(store, third).names == ["id", *ours, *RESULT_COLUMNS]


def test_results_of_a_job_that_waits_are_empty(store: JobStore, tmp_path: Path) -> None:
    second = chain_after(store, first_job(store, tmp_path), output_prefix="b_")
    table = read_results(store.finished(second.id))
    assert (table.num_rows, table.column_names) == (0, [f"b_{name}" for name in RESULT_COLUMNS])


def test_a_chained_job_carries_what_its_own_columns_leave_room_for(
    store: JobStore, tmp_path: Path
) -> None:
    first = first_job(store, tmp_path)
    schema = job_schema(first)
    spec = chain_after(store, first).spec
    assert bind_columns(spec, schema).carried == ("id",)
    prefixed = chain_after(store, first, output_prefix="b_").spec
    assert bind_columns(prefixed, schema).carried == ("id", *RESULT_COLUMNS)


def test_rows_that_failed_are_left_out_and_the_others_keep_their_index(
    store: JobStore, tmp_path: Path
) -> None:
    first = first_job(store, tmp_path)
    second = chain_after(store, first, samples=2, params=make_spec().params)
    run_job(store, first, ok_row(3), bad_row(1), ok_row(0), bad_row(2))
    taken = take(store, second)
    assert copied(taken).num_rows == 4
    selection = store.selection(second.id)
    assert selection is not None
    assert selection.tolist() == [[0, 0], [0, 1], [3, 0], [3, 1]]
    assert taken.record["after"] == {"job": first.id, "rows": 4, "not_ok": 2, "left_out": 2}


def test_a_limit_counts_the_rows_that_are_left_out(store: JobStore, tmp_path: Path) -> None:
    first = first_job(store, tmp_path)
    second = chain_after(store, first, limit=3)
    run_job(store, first, ok_row(0), bad_row(1), ok_row(2), ok_row(3))
    take(store, second)
    selection = store.selection(second.id)
    assert selection is not None
    assert np.array_equal(selection[:, 0], [0, 2])


def test_rows_that_failed_are_passed_on_where_that_is_asked_for(
    store: JobStore, tmp_path: Path
) -> None:
    first = first_job(store, tmp_path)
    second = chain_after(store, first, after_errors="pass")
    run_job(store, first, ok_row(0), bad_row(1, "empty_prompt"), ok_row(2), ok_row(3))
    taken = take(store, second)
    assert store.selection(second.id) is None
    assert copied(taken).column("error_code").to_pylist() == [None, "empty_prompt", None, None]
    assert taken.record["after"] == {"job": first.id, "rows": 4, "not_ok": 1, "left_out": 0}


def test_a_job_that_wants_every_row_refuses_and_comes_back_with_a_retry(
    store: JobStore, tmp_path: Path
) -> None:
    first = first_job(store, tmp_path)
    second = chain_after(store, first, after_errors="fail")
    run_job(store, first, ok_row(0), bad_row(1, "worker_crashed"), ok_row(2), ok_row(3))
    with pytest.raises(JobError, match=f"1 of 4 rows of job {first.id} are not ok") as refused:
        take(store, second)
    assert not list(store.job_dir(second.id).glob("*.parquet*"))
    store.set_state(second.id, "failed", reason=str(refused.value))
    again = create_retry(store, first.id, {})
    assert store.job(second.id).state == "queued"
    run_job(store, again, ok_row(1, "mended"))
    taken = take(store, second)
    assert copied(taken).column("generated_text").to_pylist()[1] == "mended"
    assert taken.record["after"]["not_ok"] == 0


def test_a_copy_that_was_begun_is_made_anew(store: JobStore, tmp_path: Path) -> None:
    first = first_job(store, tmp_path)
    second = chain_after(store, first)
    run_job(store, first, ok_row(0), ok_row(1), ok_row(2), ok_row(3))
    store.job_dir(second.id).mkdir(parents=True)
    for name in ("input.parquet", ".input.parquet.4711.tmp"):
        (store.job_dir(second.id) / name).write_bytes(b"torn")
    assert copied(take(store, second)).num_rows == 4
    assert [path.name for path in store.job_dir(second.id).iterdir()] == ["input.parquet"]


def test_the_copy_outlives_the_earlier_job_and_its_folder(store: JobStore, tmp_path: Path) -> None:
    first = first_job(store, tmp_path)
    second = chain_after(store, first)
    run_job(store, first, ok_row(0), ok_row(1), ok_row(2), ok_row(3))
    taken = take(store, second)
    store.remove_job(first.id)
    for part in Path(first.results_dir).iterdir():
        part.unlink()
    run = JobRun(store, taken, publish_part)
    run.open()
    assert (run.total, run.num_done) == (4, 0)


def test_a_job_whose_earlier_one_was_removed_says_so(store: JobStore, tmp_path: Path) -> None:
    first = first_job(store, tmp_path)
    second = chain_after(store, first)
    store.set_request(second.id, "cancel")
    store.remove_job(first.id)
    with pytest.raises(ChangedError, match=f"results of job {first.id}, which was removed"):
        take_input(store, store.job(second.id))


def test_a_job_of_an_input_without_rows_passes_on_none(store: JobStore, tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    first = submit_input(store, path)
    second = chain_after(store, first)
    claimed = store.claim_job()
    assert claimed is not None
    run = JobRun(store, claimed, publish_part)
    run.open()
    assert run.finish() == "completed"
    taken = take(store, second)
    assert (taken.manifest.num_rows, taken.record["after"]["rows"]) == (0, 0)


def test_the_results_of_samples_are_rows_of_their_own(store: JobStore, tmp_path: Path) -> None:
    first = first_job(store, tmp_path, 2, samples=2)
    second = chain_after(store, first)
    rows = [ok_row(n, f"{n}.{s}", sample_index=s) for n in (1, 0) for s in (1, 0)]
    run_job(store, first, *rows)
    texts = copied(take(store, second)).column("generated_text").to_pylist()
    assert texts == ["0.0", "0.1", "1.0", "1.1"]
