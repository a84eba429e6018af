"""Result rows: their schema, the spool's batches, and reading parts and spool in input order."""

from __future__ import annotations

import decimal
import json
import random
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import FinishedRow, TokenLogprob
from jobs.export import plain_values
from jobs.prepare import RowFacts
from jobs.publish import publish_part
from jobs.records import RESULT_COLUMNS, FinishedRows, Job, ResultsError
from jobs.results import (
    ResultRow,
    Results,
    blob_table,
    build_row_batch,
    job_schema,
    read_results,
)
from jobs.store import JobStore
from tests.job_factories import bad_row, finish_rows, ok_row, submit_input, write_input

CARRIED: dict[str, pa.Array] = {
    "uuid": pa.array([uuid.UUID(int=7).bytes, None, uuid.UUID(int=9).bytes], pa.uuid()),
    "dictionary": pa.array(["b", None, "a"]).dictionary_encode(),
    "decimal": pa.array(
        [decimal.Decimal("1.2500"), None, decimal.Decimal("-3")], pa.decimal128(20, 4)
    ),
    "timestamp": pa.array([1704067200000000001, None, 5], pa.timestamp("ns", "UTC")),
    "uint64": pa.array([2**64 - 1, None, 0], pa.uint64()),
    "int64": pa.array([9007199254740993, None, -1], pa.int64()),
    "fixed": pa.array([b"\x00\xff", None, b"ab"], pa.binary(2)),
    "nested": pa.array(
        [{"row_index": 5, "tags": ["x", None]}, None, {"row_index": None, "tags": []}]
    ),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    "null": pa.nulls(3),
    "nul": pa.array(["BANANA\0APPLE", None, ""]),
    "latin": pa.array([b"caf\xc9", None, b""]).view(pa.string()),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with JobStore(tmp_path / "state.sqlite") as store:
        yield store


def make_job(store: JobStore, num_rows: int = 3, columns: Any = None, **spec: Any) -> Job:
    columns = {"id": list(range(100, 100 + num_rows))} if columns is None else columns
    prompts = {"prompt": [f"p{row}" for row in range(num_rows)]}
    path = write_input(store.path.parent / "in.parquet", prompts | columns)
    job = submit_input(store, path, **spec)
    store.claim_job()
    return job


def publish(store: JobStore, job: Job) -> None:
    part, blobs = store.begin_part(job.id)
    Path(job.results_dir).mkdir(parents=True, exist_ok=True)
    publish_part(job, part, blobs)
    store.commit_part(job.id, part.number)


def commit(store: JobStore, job: Job, rows: list[FinishedRow], *, parts: int = 0) -> FinishedRows:
    """Keep rows, in that order, one batch each three; the first `parts` times three as parts."""
    publish(store, job)
    for number, begin in enumerate(range(0, len(rows), 3)):
        store.commit_batch(job.id, finish_rows(job, rows[begin : begin + 3]))
        if number < parts:
            publish(store, job)
    return store.finished(job.id)


# ---- schema and batches ------------------------------------------------------------------


def test_result_columns_follow_the_carried_ones_in_a_fixed_order(store: JobStore) -> None:
    schema = job_schema(make_job(store))
    assert schema.names == ["id", *RESULT_COLUMNS]
    types = {name: str(schema.field(name).type) for name in RESULT_COLUMNS}
    assert types == dict.fromkeys(RESULT_COLUMNS, "string") | {
        "row_index": "int64",
        "sample_index": "int32",
        "prompt_tokens": "int32",
        "completion_tokens": "int32",
        "reused_tokens": "int32",
        "truncated": "bool",
        "original_prompt_tokens": "int32",
        "logprobs": (
            "list<element: struct<token_id: int32, logprob: float, top: list<element: "
            "struct<token_id: int32, logprob: float>>>>"
        ),
        "duplicate_of": "int64",
        "json_valid": "bool",
    }


def test_prefix_is_put_before_our_columns_alone(store: JobStore) -> None:
    job = make_job(store, columns={"status": ["x", "y", "z"]}, output_prefix="ntx_")
    table = read_results(commit(store, job, [ok_row(1), ok_row(0)]))
    assert table.column_names == ["status", *(f"ntx_{name}" for name in RESULT_COLUMNS)]
    assert table.column("status").to_pylist() == ["x", "y"]
    assert table.column("ntx_status").to_pylist() == ["ok", "ok"]


@pytest.mark.parametrize("parts", [0, 1], ids=["spool", "part"])
def test_carried_columns_keep_type_and_value(store: JobStore, parts: int) -> None:
    """Case 89 (in part): ids of every type come out as they went in."""
    job = make_job(store, columns=CARRIED)
    table = read_results(commit(store, job, [ok_row(2), ok_row(0), ok_row(1)], parts=parts))
    written = pq.read_table(job.spec.input)
    for name in CARRIED:
        assert table.schema.field(name).type == written.schema.field(name).type, name
        ours, theirs = (plain_values(t.column(name).combine_chunks()) for t in (table, written))
        assert ours == theirs, name
    latin = table.column("latin").combine_chunks().view(pa.binary())
    assert latin.to_pylist() == [b"caf\xc9", None, b""]


def test_finished_row_fills_its_columns(store: JobStore) -> None:
    job = make_job(store)
    row = ok_row(
        1,
        "héllo",
        stop_reason="\n",
        reused_tokens=1,
        warnings={"invalid_utf8": 2},
        logprobs=(
            TokenLogprob(token_id=5, logprob=-0.5, top=((5, -0.5), (6, -2.0))),
            TokenLogprob(token_id=2, logprob=-1.0),
        ),
    )
    facts = RowFacts(truncated=True, original_prompt_tokens=99, sampling_params='{"top_k":1}')
    carried = pa.record_batch({"id": [101]})
    batch = build_row_batch(job_schema(job), [ResultRow(row, facts, carried)])
    assert (batch.row_indices, batch.sample_indices) == ((1,), (0,))
    assert (batch.num_ok, batch.num_error) == (1, 0)
    assert (batch.prompt_tokens, batch.completion_tokens) == (2, 3)
    assert blob_table(batch.ipc).to_pylist() == [
        {
            "id": 101,
            "row_index": 1,
            "sample_index": 0,
            "status": "ok",
            "generated_text": "héllo",
            "finish_reason": "stop",
            "stop_reason": "\n",
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "reused_tokens": 1,
            "truncated": True,
            "original_prompt_tokens": 99,
            "sampling_params": '{"top_k":1}',
            "logprobs": [
                {
                    "token_id": 5,
                    "logprob": -0.5,
                    "top": [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -2.0}],
                },
                {"token_id": 2, "logprob": -1.0, "top": []},
            ],
            "duplicate_of": None,
            "json_valid": None,
            "warnings": '{"invalid_utf8": 2}',
            "error_code": None,
            "error_message": None,
        }
    ]


def test_error_row_has_null_where_there_is_nothing(store: JobStore) -> None:
    job = make_job(store)
    batch = finish_rows(job, [bad_row(0), ok_row(2, "", completion_tokens=0)])
    error, ok = blob_table(batch.ipc).to_pylist()
    assert (batch.num_ok, batch.num_error) == (1, 1)
    assert (error["status"], error["error_code"], error["error_message"]) == (
        "error",
        "empty_prompt",
        "no text",
    )
    for name in ("generated_text", "finish_reason", "prompt_tokens", "completion_tokens"):
        assert error[name] is None
    # A row that ran and produced nothing is another thing.
    assert (ok["generated_text"], ok["completion_tokens"]) == ("", 0)


def test_lone_surrogates_do_not_fail_the_batch(store: JobStore) -> None:
    job = make_job(store)
    message = json.loads('"refused: \\ud800"')
    table = read_results(commit(store, job, [bad_row(0, "template_error", message)]))
    assert table.column("error_message").to_pylist() == ["refused: ?"]


# ---- reading -----------------------------------------------------------------------------


def test_results_are_in_input_order_whatever_the_order_of_completion(store: JobStore) -> None:
    """Case 11: rows finish in any order, parts hold what came, results have the input's order."""
    job = make_job(store, 90)
    rows = [ok_row(idx, f"t{idx}") for idx in range(90)]
    random.Random(5).shuffle(rows)
    finished = commit(store, job, rows, parts=10)
    table = read_results(finished)
    assert table.column("row_index").to_pylist() == list(range(90))
    assert table.column("id").to_pylist() == list(range(100, 190))
    assert table.column("generated_text").to_pylist() == [f"t{idx}" for idx in range(90)]
    raw = pq.read_table(Path(job.results_dir) / finished.parts[1].name)
    assert raw.column("row_index").to_pylist() == sorted(row.row_index for row in rows[:3])


def test_head_gives_the_first_rows(store: JobStore) -> None:
    job = make_job(store, 20)
    finished = commit(store, job, [ok_row(idx) for idx in (15, 3, 9, 1, 12)], parts=1)
    assert read_results(finished, head=3).column("row_index").to_pylist() == [1, 3, 9]
    assert read_results(finished, head=50).num_rows == 5


def test_errors_alone_on_request(store: JobStore) -> None:
    job = make_job(store, 20)
    rows = [ok_row(4), bad_row(7), ok_row(1), bad_row(2)]
    finished = commit(store, job, rows, parts=1)
    table = read_results(finished, errors=True)
    assert table.column("row_index").to_pylist() == [2, 7]
    assert read_results(finished, errors=True, head=1).column("row_index").to_pylist() == [2]


def test_queued_job_has_no_rows_and_the_whole_schema(store: JobStore) -> None:
    job = make_job(store)
    table = read_results(store.finished(job.id))
    assert table.num_rows == 0
    assert table.schema == job_schema(job)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), window_rows=st.integers(1, 40))
def test_any_window_yields_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, window_rows: int
) -> None:
    indices = data.draw(st.lists(st.integers(0, 29), unique=True, max_size=12))
    parts = data.draw(st.integers(0, 4))
    with JobStore(tmp_path_factory.mktemp("results") / "state.sqlite") as store:
        job = make_job(store, 30)
        finished = commit(store, job, [ok_row(idx) for idx in indices], parts=parts)
    tables = list(Results(finished, window_rows=window_rows).tables())
    rows = [row for table in tables for row in table.column("row_index").to_pylist()]
    assert rows == sorted(indices)
    assert all(0 < table.num_rows <= window_rows for table in tables)


def test_samples_of_a_row_are_in_order(store: JobStore) -> None:
    job = make_job(store)
    rows = [ok_row(1, sample_index=1), ok_row(1, sample_index=0), ok_row(0, sample_index=1)]
    table = read_results(commit(store, job, rows))
    assert table.select(["row_index", "sample_index"]).to_pydict() == {
        "row_index": [0, 1, 1],
        "sample_index": [1, 0, 1],
    }


# ---- cancelled jobs ----------------------------------------------------------------------


def test_rows_that_a_cancelled_job_left_are_shown_as_cancelled(store: JobStore) -> None:
    job = make_job(store, 6, limit=5)
    commit(store, job, [ok_row(3), bad_row(1)], parts=1)
    store.set_state(job.id, "cancelled")
    finished = store.finished(job.id)
    table = read_results(finished)
    assert table.column("status").to_pylist() == [
        "cancelled",
        "error",
        "cancelled",
        "ok",
        "cancelled",
    ]
    assert table.column("id").to_pylist() == [100, 101, 102, 103, 104]
    assert table.column("generated_text").to_pylist() == [None, None, None, "answer", None]
    assert (
        table.num_rows == finished.job.num_ok + finished.job.num_error + finished.job.num_cancelled
    )
    assert read_results(finished, errors=True).column("row_index").to_pylist() == [1]


def test_cancelled_rows_are_shown_without_their_input_too(store: JobStore) -> None:
    job = make_job(store, 3)
    commit(store, job, [ok_row(1)], parts=1)
    store.set_state(job.id, "cancelled")
    Path(job.spec.input).unlink()
    table = read_results(store.finished(job.id))
    assert table.column("status").to_pylist() == ["cancelled", "ok", "cancelled"]
    assert table.column("id").to_pylist() == [None, 101, None]


# ---- parts that are not what they were ---------------------------------------------------


def test_missing_part_is_named(store: JobStore) -> None:
    job = make_job(store)
    finished = commit(store, job, [ok_row(0)], parts=1)
    path = Path(job.results_dir) / finished.parts[1].name
    path.unlink()
    with pytest.raises(ResultsError, match=f"job {job.id}: results part {path} is gone"):
        read_results(finished)


def test_part_with_other_rows_is_named(store: JobStore) -> None:
    job = make_job(store)
    finished = commit(store, job, [ok_row(0)], parts=1)
    path = Path(job.results_dir) / finished.parts[1].name
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    with pytest.raises(ResultsError, match=f"{path} has 0 rows, was published with 1"):
        read_results(finished)


def test_times_of_parts_are_read_back_exactly(store: JobStore) -> None:
    when = datetime(2026, 5, 1, 12, tzinfo=UTC)
    job = make_job(store, columns={"when": pa.array([when] * 3, pa.timestamp("s", "UTC"))})
    table = read_results(commit(store, job, [ok_row(0)], parts=1))
    assert table.column("when").to_pylist() == [when]
