"""Results as a file: Parquet, JSON lines, CSV."""

from __future__ import annotations

import csv
import decimal
import json
import uuid
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.export import export_results, plain_values, write_csv
from jobs.records import FinishedRows, ResultsError
from jobs.results import read_results
from jobs.store import JobStore
from tests.job_factories import bad_row, finish_rows, ok_row, submit_input, write_input

COLUMNS = {
    "prompt": pa.array(["a", "b", "c"]),
    "id": pa.array([9007199254740993, None, 2**63 - 1], pa.int64()),
    "tags": pa.array([["x", None], [], None]),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with JobStore(tmp_path / "state.sqlite") as store:
        yield store


@pytest.fixture
def finished(store: JobStore, tmp_path: Path) -> FinishedRows:
    job = submit_input(store, write_input(tmp_path / "in.parquet", COLUMNS))
    store.claim_job()
    rows = [ok_row(2, 'say "x",\r\nplease'), bad_row(1), ok_row(0, "")]
    store.commit_batch(job.id, finish_rows(job, rows))
    return store.finished(job.id)


def test_parquet_export_is_the_results(finished: FinishedRows, tmp_path: Path) -> None:
    """Case 11: the file is in input order."""
    assert export_results(finished, tmp_path / "out.parquet") == 3
    assert pq.read_table(tmp_path / "out.parquet").equals(read_results(finished))


def test_jsonl_export_keeps_integers_and_order(finished: FinishedRows, tmp_path: Path) -> None:
    export_results(finished, tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["row_index"] for row in rows] == [0, 1, 2]
    assert [row["id"] for row in rows] == [9007199254740993, None, 2**63 - 1]
    assert [row["tags"] for row in rows] == [["x", None], [], None]
    assert [row["generated_text"] for row in rows] == ["", None, 'say "x",\r\nplease']


def test_csv_export_is_read_back_by_others(finished: FinishedRows, tmp_path: Path) -> None:
    export_results(finished, tmp_path / "out.csv")
    with open(tmp_path / "out.csv", newline="") as source:
        rows = list(csv.DictReader(source))
    assert [row["generated_text"] for row in rows] == ["", "", 'say "x",\r\nplease']
    assert [row["tags"] for row in rows] == ['["x", null]', "[]", ""]
    # Null and the empty text differ in the file, though most readers do not tell.
    first, second = (tmp_path / "out.csv").read_text().splitlines()[1:3]
    assert ',ok,"",stop,' in first and ",error,,," in second


def test_export_can_be_of_errors_or_of_the_first_rows(
    finished: FinishedRows, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    assert export_results(finished, path, errors=True) == 1
    assert json.loads(path.read_text())["error_code"] == "empty_prompt"
    assert export_results(finished, path, head=2) == 2
    assert len(path.read_text().splitlines()) == 2


def test_export_that_fails_leaves_what_was_there(finished: FinishedRows, tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.write_text("before")
    part_gone = FinishedRows(
        job=finished.job, parts=finished.parts, blobs=(*finished.blobs, b"damaged")
    )
    with pytest.raises(ResultsError, match="is damaged"):
        export_results(part_gone, path)
    assert path.read_text() == "before"
    assert not list(tmp_path.glob(".*.tmp"))


def test_export_refuses_unknown_endings_and_the_jobs_own_files(
    finished: FinishedRows, tmp_path: Path
) -> None:
    """Case 37 (in part): neither the input nor a results folder is written to."""
    with pytest.raises(ResultsError, match=r"end it in \.parquet, \.jsonl, \.csv"):
        export_results(finished, tmp_path / "out.xlsx")
    with pytest.raises(ResultsError, match=f"make the folder {tmp_path / 'none'} first"):
        export_results(finished, tmp_path / "none" / "out.csv")
    (tmp_path / "link.parquet").symlink_to(tmp_path / "in.parquet")
    for path in (tmp_path / "in.parquet", tmp_path / "link.parquet"):
        with pytest.raises(ResultsError, match="is an input file of job"):
            export_results(finished, path)
    with pytest.raises(ResultsError, match="is in the results folder of job"):
        export_results(finished, Path(finished.job.results_dir) / "all.parquet")


@pytest.mark.parametrize(
    ("array", "plain"),
    [
        (pa.array([uuid.UUID(int=5).bytes, None], pa.uuid()), [str(uuid.UUID(int=5)), None]),
        (pa.array([1704067200000000001], pa.timestamp("ns")), ["2024-01-01T00:00:00.000000001"]),
        (pa.array([1704067200], pa.timestamp("s", "UTC")), ["2024-01-01T00:00:00Z"]),
        (pa.array([date(2024, 1, 2), None]), ["2024-01-02", None]),
        (pa.array([3723000004], pa.time64("us")), ["01:02:03.000004"]),
        (pa.array([5, None], pa.duration("ms")), ["5ms", None]),
        (pa.array([decimal.Decimal("1E+2"), None], pa.decimal128(30, 2)), ["100.00", None]),
        (pa.array([b"\xff\x00", None], pa.binary(2)), ["/wA=", None]),
        (pa.array([b"\xff\x00"], pa.binary_view()), ["/wA="]),
        (pa.array([float("nan"), float("-inf"), 0.5, None]), ["NaN", "-Infinity", 0.5, None]),
        (pa.array([2**64 - 1], pa.uint64()), [18446744073709551615]),
        (pa.array(["x", None, "x"]).dictionary_encode(), ["x", None, "x"]),
        (pa.array([b"caf\xc9"]).view(pa.string()), ["caf\ufffd"]),
        (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)), [[1, 2], None, [3, 4]]),
        (
            pa.array([[("a", 1)], None, [("b", None)]], pa.map_(pa.string(), pa.int64())),
            [{"a": 1}, None, {"b": None}],
        ),
        (
            pa.array([{"a": b"\xff"}, None, {"a": None}]),
            [{"a": "/w=="}, None, {"a": None}],
        ),
        (pa.nulls(2), [None, None]),
        (pa.array([True, None]), [True, None]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_values_of_every_type_have_one_text(array: pa.Array, plain: list[Any]) -> None:
    """Case 89 (in part): canonical text of ids and other values, in slices too."""
    assert plain_values(array) == plain
    assert plain_values(array.slice(1)) == plain[1:]
    json.dumps(plain, allow_nan=False)


CELLS = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@given(st.lists(st.tuples(CELLS, CELLS), max_size=5))
def test_any_text_survives_csv(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str | None, str | None]]
) -> None:
    columns = [pa.array([row[idx] for row in rows], pa.string()) for idx in range(2)]
    table = pa.table(columns, names=["a", "b"])
    path = tmp_path_factory.getbasetemp() / "any.csv"
    write_csv(path, table.schema, [table])
    with open(path, newline="", encoding="utf-8") as source:
        header, *again = csv.reader(source)
    assert header == ["a", "b"]
    assert again == [[cell or "" for cell in row] for row in rows]
