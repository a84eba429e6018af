"""Input columns that go through to the results: ids of every type, text that is not UTF-8."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import FinishedRow
from jobs.columns import bind_columns
from jobs.dataset import RowReader, build_manifest, read_schema
from jobs.export import export_results, plain_values
from jobs.prepare import RowFacts
from jobs.records import FinishedRows, Job
from jobs.results import ResultRow, build_row_batch, read_results, result_schema
from tests.input_helpers import id_facts, values_of
from tests.job_factories import make_spec, ok_row, write_input

ID = uuid.UUID("12345678-9abc-def0-1234-56789abcdef0")
IDS: list[tuple[pa.Array, Any]] = [
    (pa.array([ID.bytes, None], pa.uuid()), str(ID)),
    (pa.array([ID.bytes, None], pa.binary(16)), "EjRWeJq83vASNFZ4mrze8A=="),
    (pa.array([9007199254740993, None], pa.int64()), 9007199254740993),
    (pa.array([2**64 - 1, None], pa.uint64()), 18446744073709551615),
    (pa.nulls(2), None),
    (pa.array([Decimal("12345678901234567890.10"), None], pa.decimal128(30, 2)),
     "12345678901234567890.10"),
    (pa.array([datetime(2025, 9, 17, 12, 30, 0, 123456, UTC), None], pa.timestamp("us", "UTC")),
     "2025-09-17T12:30:00.123456Z"),
    (pa.array([1758112200123456789, None], pa.timestamp("ns")), "2025-09-17T12:30:00.123456789"),
    (pa.array([date(1, 1, 1), None]), "0001-01-01"),
    (pa.array(["007", None], pa.large_string()), "007"),
    (pa.array(["007", None]).dictionary_encode(), "007"),
    (pa.array([b"\xff\x00", None]), "/wA="),
]  # fmt: skip


def finished_rows(path: Path, *, on_bad_utf8: Any = "error", **spec: Any) -> FinishedRows:
    """All rows of an input, each with the same answer, as the engine actor hands them over."""
    job_spec = make_spec(input=str(path), on_bad_utf8=on_bad_utf8, **spec)
    manifest = build_manifest(path)
    schema = read_schema(manifest)
    binding = bind_columns(job_spec, schema)
    rows: list[ResultRow] = []
    with RowReader(
        manifest, binding.carried, values=binding.values, on_bad_utf8=on_bad_utf8
    ) as reader:
        for first, batch in reader.read(0, manifest.num_rows or 0):
            for idx in range(batch.num_rows):
                carried = batch.table.slice(idx, 1)
                row: FinishedRow = ok_row(first + idx)
                rows.append(ResultRow(row, RowFacts(), carried, batch.replaced[idx]))
    ipc = build_row_batch(result_schema(schema, binding, job_spec), rows).ipc
    job = Job(
        id="j", state="running", spec=job_spec, manifest=manifest, results_dir="/x", created_at=0
    )
    return FinishedRows(job=job, parts=(), blobs=(ipc,))


@pytest.mark.parametrize(("ids", "text"), IDS, ids=lambda value: str(getattr(value, "type", "")))
def test_id_of_any_type_comes_out_as_it_went_in(tmp_path: Path, ids: pa.Array, text: Any) -> None:
    """Case 89: type and value are kept; JSON has one exact form of each."""
    path = write_input(tmp_path / "in.parquet", {"prompt": ["a", "b"], "id": ids})
    finished = finished_rows(path)
    table = read_results(finished)
    written = pq.read_table(path).column("id")
    assert table.column("id").type == written.type
    assert table.column("id").combine_chunks().equals(written.combine_chunks())
    export_results(finished, tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [text, None]
    export_results(finished, tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet").column("id").type == written.type


def test_rows_of_one_id_are_all_kept_and_counted(tmp_path: Path) -> None:
    """Case 25 (Parquet): an id three times, and null twice."""
    ids = ["a", "b", "a", None, "a", None, "c"]
    path = write_input(tmp_path / "in.parquet", {"prompt": list("1234567"), "id": ids})
    assert id_facts(path, tmp_path) == {"duplicate_ids": 2, "null_ids": 2}
    table = read_results(finished_rows(path))
    assert table.column("id").to_pylist() == ids
    assert table.column("row_index").to_pylist() == list(range(7))


@pytest.mark.parametrize(("ids", "_text"), IDS, ids=lambda value: str(getattr(value, "type", "")))
def test_ids_of_any_type_are_counted(tmp_path: Path, ids: pa.Array, _text: Any) -> None:
    twice = pa.concat_arrays([ids, ids])
    path = write_input(tmp_path / "in.parquet", {"prompt": ["p"] * 4, "id": twice})
    valid = 2 - ids.null_count
    facts = {"duplicate_ids": valid, "null_ids": 2 * ids.null_count}
    assert id_facts(path, tmp_path) == {name: count for name, count in facts.items() if count}


def test_ids_of_text_files_are_counted_with_their_rows(tmp_path: Path) -> None:
    lines = ['{"id": 1}', '{"id": "1"}', '{"id": 1}', '{"id": -1}', '{"id": -2}', "{", "{}"]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert id_facts(tmp_path / "in.jsonl", tmp_path) == {"duplicate_ids": 2}
    assert id_facts(tmp_path / "in.jsonl", tmp_path, max_rows=2) == {"duplicate_ids": 1}


def test_input_without_ids_has_none_to_count(tmp_path: Path) -> None:
    path = write_input(tmp_path / "in.parquet", {"prompt": ["a", "a"]})
    assert id_facts(path, tmp_path) == {}


# ---- text that is not UTF-8 --------------------------------------------------------------


def bad_text(data_type: pa.DataType) -> pa.Array:
    """Three rows, of which the second has a Latin-1 byte."""
    cells = pa.array([b"ok", b"caf\xc9", None], pa.large_binary())
    if data_type == pa.string():
        return cells.cast(pa.binary()).view(pa.string())
    return cells.view(pa.large_string()).cast(data_type)


STRINGS = bad_text(pa.string())
BAD: dict[str, pa.Array] = {
    "string": STRINGS,
    "large_string": bad_text(pa.large_string()),
    "dictionary": STRINGS.dictionary_encode(),
    "struct": pa.StructArray.from_arrays([STRINGS, pa.array([1, 2, 3])], ["t", "n"]),
    "list": pa.ListArray.from_arrays([0, 1, 2, 3], STRINGS),
    "map": pa.MapArray.from_arrays([0, 1, 2, 3], pa.array(["k"] * 3), STRINGS),
}


@pytest.mark.parametrize("kind", BAD)
def test_results_never_hold_bytes_that_are_not_utf8(tmp_path: Path, kind: str) -> None:
    """Case 86: what is carried is repaired and marked in that row, and the row runs."""
    path = write_input(tmp_path / "in.parquet", {"prompt": ["a", "b", "c"], "note": BAD[kind]})
    table = read_results(finished_rows(path))
    table.validate(full=True)
    assert table.column("note").type == BAD[kind].type
    notes = plain_values(table.column("note").combine_chunks())
    wraps: dict[str, Callable[[Any, int], Any]] = {
        "string": lambda text, _: text,
        "struct": lambda text, n: {"t": text, "n": n},
        "list": lambda text, _: [text],
        "map": lambda text, _: {"k": text},
    }
    wrap = wraps.get(kind, wraps["string"])
    assert notes == [wrap("ok", 1), wrap("caf\ufffd", 2), wrap(None, 3)]
    assert table.column("warnings").to_pylist() == [None, '{"replaced_utf8": ["note"]}', None]


@pytest.mark.parametrize(
    "column",
    [STRINGS, BAD["large_string"], BAD["dictionary"], pa.array([b"ok", b"caf\xc9", None])],
    ids=lambda column: str(column.type),
)
def test_bad_prompt_is_an_error_or_replaced(tmp_path: Path, column: pa.Array) -> None:
    """Case 86: by default that row is an error; with replace it runs and is marked."""
    path = write_input(tmp_path / "in.parquet", {"prompt": column})
    manifest = build_manifest(path)
    good, bad, null = values_of(manifest, ["prompt"])
    assert (good, null) == ({"prompt": "ok"}, {"prompt": None})
    assert bad[0] == "invalid_utf8" and "byte 0xc9 at offset 3" in bad[1]
    assert values_of(manifest, ["prompt"], "replace") == [
        {"prompt": "ok"},
        {"prompt": "caf\ufffd"},
        {"prompt": None},
    ]
    table = read_results(finished_rows(path, on_bad_utf8="replace"))
    assert table.column("warnings").to_pylist() == [None, '{"replaced_utf8": ["prompt"]}', None]


def test_bad_messages_are_replaced_inside(tmp_path: Path) -> None:
    roles = pa.array(["user"] * 3)
    items = pa.StructArray.from_arrays([roles, STRINGS], ["role", "content"])
    column = pa.ListArray.from_arrays([0, 1, 2, 3], items)
    manifest = build_manifest(write_input(tmp_path / "in.parquet", {"messages": column}))
    (_, row, _) = values_of(manifest, ["messages"], "replace")
    assert row == {"messages": [{"role": "user", "content": "caf\ufffd"}]}
