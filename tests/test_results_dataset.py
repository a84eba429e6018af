"""The dataset of a job holds the rows of its results, wherever those lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import FinishedRow
from jobs.export import plain_rows
from jobs.records import FinishedRows, Job, ResultsError
from jobs.results import read_results
from jobs.results_dataset import open_dataset
from jobs.store import JobStore
from tests.job_factories import bad_row, ok_row
from tests.test_results import CARRIED, commit, make_job


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with JobStore(tmp_path / "state.sqlite") as opened:
        yield opened


def in_order(finished: FinishedRows) -> pa.Table:
    prefix = finished.job.spec.output_prefix
    keys = [(prefix + name, "ascending") for name in ("row_index", "sample_index")]
    return open_dataset(finished).to_table().sort_by(keys)


def expect_equal(finished: FinishedRows) -> pa.Table:
    """The dataset's rows against `read_results`; returns the former."""
    table, wanted = in_order(finished), read_results(finished)
    assert table.schema == wanted.schema
    assert list(plain_rows(table)) == list(plain_rows(wanted))
    return table


def outcomes(job: Job, failed: Callable[[int], bool], text: str = "answer") -> list[FinishedRow]:
    samples = job.spec.samples
    return [
        (bad_row if failed(output) else ok_row)(
            output // samples, text, sample_index=output % samples
        )
        for output in range(job.total or 0)
    ]


@pytest.mark.parametrize("parts", [0, 1, 2], ids=["spool", "both", "parts"])
def test_rows_of_parts_and_spool_are_there_once(store: JobStore, parts: int) -> None:
    job = make_job(store, num_rows=6)
    rows = [ok_row(row) for row in (4, 0, 3, 1, 5, 2)]
    table = expect_equal(commit(store, job, rows, parts=parts))
    assert table.column("row_index").to_pylist() == list(range(6))


@pytest.mark.parametrize("parts", [0, 1], ids=["spool", "part"])
def test_carried_columns_keep_their_types(store: JobStore, parts: int) -> None:
    columns = {name: column for name, column in CARRIED.items() if name != "latin"}
    job = make_job(store, columns=columns)
    expect_equal(commit(store, job, [ok_row(2), ok_row(0), ok_row(1)], parts=parts))


def test_a_job_without_rows_has_an_empty_dataset_with_its_columns(store: JobStore) -> None:
    job = make_job(store)
    assert expect_equal(store.finished(job.id)).num_rows == 0


def test_rows_of_a_cancelled_job_that_never_ran_are_cancelled(store: JobStore) -> None:
    job = make_job(store, num_rows=9, samples=2)
    commit(store, job, [ok_row(4), bad_row(0), ok_row(3)], parts=1)
    store.set_state(job.id, "cancelled")
    table = expect_equal(store.finished(job.id))
    counts = {row["values"]: row["counts"] for row in pc.value_counts(table["status"]).to_pylist()}
    assert counts == {"ok": 2, "error": 1, "cancelled": 15}


@settings(deadline=None, max_examples=15)
@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.integers(0, 4))
def test_retried_rows_take_the_place_of_failed_ones(
    tmp_path_factory: pytest.TempPathFactory, first: set[int], second: set[int], parts: int
) -> None:
    """Whatever failed at first and again, samples apart, and wherever it lies."""
    folder = tmp_path_factory.mktemp("retried")
    with JobStore(folder / "state.sqlite") as store:
        job = make_job(store, num_rows=5, samples=2, output_prefix="ntx_")
        commit(store, job, outcomes(job, first.__contains__), parts=parts)
        store.set_state(job.id, "completed")
        if first:
            keys = np.array([(output // 2, output % 2) for output in sorted(first)])
            retry = store.create_job(job.spec, job.manifest, {}, retry_of=job.id, selection=keys)
            store.claim_job()
            again = outcomes(job, second.__contains__, "later")
            commit(store, retry, [again[output] for output in sorted(first)], parts=1)
        table = expect_equal(store.finished(job.id))
        assert table.num_rows == 10
        failed = table.filter(pc.equal(table["ntx_status"], "error"))
        assert failed.num_rows == len(first & second)


def test_columns_are_read_apart_and_filters_reach_the_files(store: JobStore) -> None:
    job = make_job(store, num_rows=6)
    finished = commit(store, job, [ok_row(row) for row in range(6)], parts=2)
    found = open_dataset(finished).to_table(columns=["id"], filter=pc.field("row_index") > 3)
    assert found.to_pydict() == {"id": [104, 105]}


def test_a_part_that_is_gone_is_named(store: JobStore) -> None:
    job = make_job(store)
    finished = commit(store, job, [ok_row(0), ok_row(1), ok_row(2)], parts=1)
    (Path(job.results_dir) / finished.parts[1].name).unlink()
    with pytest.raises(ResultsError, match="is gone"):
        open_dataset(finished)
