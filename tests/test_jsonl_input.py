"""JSON lines: each line judged alone, one type per column, any range of rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.dataset import SAMPLE_NBYTES, RowReader, build_manifest, count_rows, read_schema
from jobs.formats import records
from jobs.formats.text_file import INDEX_ROWS
from jobs.records import DatasetError
from tests.input_helpers import manifest_of, table_of, types_of, values_of


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_types_may_differ_from_row_to_row(tmp_path: Path) -> None:
    """Case 26: each row has its own values; columns of one type keep it, mixed ones are text."""
    path = write_lines(
        tmp_path / "in.jsonl",
        [
            {"id": 1, "content": "text", "score": 1, "ok": True},
            {"id": "two", "content": [{"role": "user"}], "score": 0.5, "ok": None},
            {"content": None},
        ],
    )
    manifest = manifest_of(path, tmp_path)
    assert types_of(manifest) == {
        "id": "string",
        "content": "string",
        "score": "double",
        "ok": "bool",
    }
    assert table_of(manifest) == [
        {"id": "1", "content": "text", "score": 1.0, "ok": True},
        {"id": "two", "content": '[{"role": "user"}]', "score": 0.5, "ok": None},
        {"id": None, "content": None, "score": None, "ok": None},
    ]
    assert values_of(manifest, ["content", "id"]) == [
        {"content": "text", "id": 1},
        {"content": [{"role": "user"}], "id": "two"},
        {"content": None, "id": None},
    ]


def test_key_that_comes_late_is_a_column_of_all_rows(tmp_path: Path) -> None:
    """Case 26: a key that only line 90,000 has, in a file longer than what submit looks at."""
    path = tmp_path / "in.jsonl"
    with open(path, "w") as sink:
        for row in range(1, 100_001):
            note = ', "note": "here"' if row == 90_000 else ""
            sink.write(f'{{"prompt": "{row:040d}"{note}}}\n')
    assert path.stat().st_size > SAMPLE_NBYTES
    submitted = build_manifest(path)
    assert (submitted.num_rows, read_schema(submitted).names) == (None, ["prompt"])
    manifest = count_rows(submitted, tmp_path)
    assert (manifest.num_rows, read_schema(manifest).names) == (100_000, ["prompt", "note"])
    with RowReader(manifest, ["note"], values=["prompt"]) as reader:
        ((first, batch),) = reader.read(89_999, 90_000)
    assert (first, batch.table.to_pylist()) == (89_999, [{"note": "here"}])
    assert batch.values == [{"prompt": f"{90_000:040d}"}]


TYPES = [
    ([1, None, 2**63 - 1, -(2**63)], "int64"),
    ([0, 2**64 - 1], "uint64"),
    ([-1, 2**64 - 1], "string"),
    ([2**64], "string"),
    ([1, 0.5, -3], "double"),
    ([2**53 + 1, 0.5], "string"),
    ([True, 1], "string"),
    ([None, None], "string"),
    (["a", None], "string"),
    ([{"a": 1}], "string"),
]


@pytest.mark.parametrize(("values", "data_type"), TYPES, ids=lambda value: str(value)[:30])
def test_column_has_the_narrowest_type_that_loses_nothing(
    tmp_path: Path, values: list[Any], data_type: str
) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"x": value} for value in values])
    manifest = manifest_of(path, tmp_path)
    assert types_of(manifest) == {"x": data_type}
    found = [row["x"] for row in table_of(manifest)]
    if data_type == "string":
        texts = [json.dumps(v) if v is not None and not isinstance(v, str) else v for v in values]
        assert found == texts
    else:
        assert found == values


FAULTS = [
    ('{"prompt": "half', "line 3 is not JSON"),
    ("\0" * 4096, "line 3 is not JSON"),
    ("[1, 2]", "line 3 holds a list, not a JSON object"),
    ("null", "line 3 holds null"),
    ('"text"', "line 3 holds a str"),
    ('{"x": NaN}', "NaN is no JSON number"),
    ('{"x": 1e999}', "1e999 is too large a number"),
    ('{"x": ' + "9" * 5000 + "}", "line 3 is not JSON"),
    ("[" * 200_000, "line 3 is not JSON"),
    ('{"prompt": "a"} {"prompt": "b"}', "line 3 is not JSON: Extra data at column 17"),
]


@pytest.mark.parametrize(("line", "message"), FAULTS, ids=lambda text: text[:20])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_line_that_is_no_object_is_an_error_row(
    tmp_path: Path, line: str, message: str, end: str
) -> None:
    """Case 44 (input): a torn last line, NULs, or JSON that is no object; the others are kept."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "one"}\n\n' + line.encode() + end.encode())
    manifest = manifest_of(path, tmp_path)
    good, bad = values_of(manifest, ["prompt"])
    assert good == {"prompt": "one"}
    assert bad[0] == "invalid_row"
    assert message in bad[1]
    assert table_of(manifest)[1] == {"prompt": None}


def test_cut_within_a_character_is_an_error_row(tmp_path: Path) -> None:
    """Case 44 (input): the file ends in the middle of a character."""
    path = tmp_path / "in.jsonl"
    path.write_bytes('{"prompt": "one"}\n{"prompt": "caf\u00e9'.encode()[:-1])
    _, bad = values_of(manifest_of(path, tmp_path), ["prompt"])
    assert bad[0] == "invalid_row" and "line 2 is not JSON" in bad[1]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("last_end", [True, False])
def test_ends_of_lines_marks_and_blank_lines_are_no_content(
    tmp_path: Path, end: str, mark: str, last_end: bool
) -> None:
    lines = ['{"prompt": "a\\n"}', "", '{"prompt": " \u2028b"}', " \t", '{"prompt": "c"}']
    path = tmp_path / "in.ndjson"
    path.write_bytes((mark + end.join(lines) + (end if last_end else "")).encode())
    manifest = manifest_of(path, tmp_path)
    assert [row["prompt"] for row in table_of(manifest)] == ["a\n", " \u2028b", "c"]


def test_bytes_that_are_not_utf8_are_the_error_of_their_row(tmp_path: Path) -> None:
    """Case 86 (JSON lines): the row is an error that names the byte; its id is still carried."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"id": 1, "prompt": "ok"}\n{"id": 2, "prompt": "caf\xc9"}\n')
    manifest = manifest_of(path, tmp_path)
    good, bad = values_of(manifest, ["prompt"])
    assert good == {"prompt": "ok"}
    assert bad[0] == "invalid_utf8"
    assert bad[1].startswith("byte 0xc9 at offset 50 (line 2) is not UTF-8")
    assert table_of(manifest, ["id"]) == [{"id": 1}, {"id": 2}]


@pytest.mark.parametrize("text", [b"caf\xc9", rb"caf\ud83d"], ids=["byte", "half a pair"])
def test_bad_text_is_replaced_on_demand_and_marked(tmp_path: Path, text: bytes) -> None:
    """Case 86 (JSON lines): --on-bad-utf8 replace runs the row and says what it touched."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"id": "a", "prompt": "ok"}\n{"id": "b", "prompt": "' + text + b'"}\n')
    manifest = manifest_of(path, tmp_path, on_bad_utf8="replace")
    with RowReader(manifest, ["id"], values=["prompt"], on_bad_utf8="replace") as reader:
        ((_, batch),) = reader.read(0, 2)
    assert batch.values == [{"prompt": "ok"}, {"prompt": "caf\ufffd"}]
    assert batch.replaced == [(), ("prompt",)]


def test_half_of_a_surrogate_pair_is_the_error_of_its_row(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(rb'{"prompt": "\ud800"}' + b"\n" + rb'{"prompt": "\ud83d\ude00"}')
    bad, good = values_of(manifest_of(path, tmp_path), ["prompt"])
    assert bad[0] == "invalid_utf8" and "line 1 has half of a surrogate pair" in bad[1]
    assert good == {"prompt": "\U0001f600"}


@pytest.mark.parametrize("text", [b"\xc9", rb"\ud800"], ids=["byte", "half a pair"])
def test_bad_text_beside_the_prompt_is_replaced_and_the_row_runs(
    tmp_path: Path, text: bytes
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"id": {"a": ["' + text + b'"]}, "prompt": "\xef\xbf\xbd"}')
    with RowReader(manifest_of(path, tmp_path), ["id"], values=["prompt"]) as reader:
        ((_, batch),) = reader.read(0, 1)
    assert batch.values == [{"prompt": "\ufffd"}]
    assert batch.table.to_pylist() == [{"id": '{"a": ["\ufffd"]}'}]
    assert batch.replaced == [("id",)]


def test_line_that_is_too_long_is_an_error_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("records", "jsonl_file"):
        monkeypatch.setattr(f"jobs.formats.{module}.MAX_ROW_NBYTES", 1000)
    rows = [{"prompt": "a"}, {"prompt": "x" * 5000}, {"prompt": "b" * 900}]
    manifest = manifest_of(write_lines(tmp_path / "in.jsonl", rows), tmp_path)
    first, bad, last = values_of(manifest, ["prompt"])
    assert (first, last) == (rows[0], rows[2])
    assert bad[0] == "invalid_row" and "line 2 is longer" in bad[1]
    assert records.MAX_ROW_NBYTES == 1000


def test_too_many_keys_are_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{f"user{n}": n} for n in range(5000)])
    with pytest.raises(DatasetError, match="more than 4096 different keys, the last is 'user4096'"):
        build_manifest(path)


# ---- ranges ------------------------------------------------------------------------------

NUM_ROWS = 3 * INDEX_ROWS + 100
RANGES = st.tuples(st.integers(0, NUM_ROWS), st.integers(0, NUM_ROWS)).map(sorted)


@pytest.fixture(scope="module")
def two_files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("two")
    for name, begin, end in (("a", 0, INDEX_ROWS + 1), ("b", INDEX_ROWS + 1, NUM_ROWS)):
        path = folder / "in" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f'{{"prompt": "p{row}"}}\n\n' for row in range(begin, end)))
    return manifest_of(folder / "in", folder)


@settings(max_examples=30, deadline=None)
@given(ranges=st.lists(RANGES, max_size=5))
def test_any_sequence_of_ranges_yields_exactly_its_rows(two_files: Any, ranges: Any) -> None:
    with RowReader(two_files, values=["prompt"]) as reader:
        for begin, end in ranges:
            rows: list[Any] = []
            for first, batch in reader.read(begin, end):
                assert first == begin + len(rows)
                assert batch.num_rows == batch.table.num_rows > 0
                rows += batch.values
            assert rows == [{"prompt": f"p{row}"} for row in range(begin, end)]


def test_resume_reads_from_the_place_before_and_not_from_the_start(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": str(row)} for row in range(20_000)])
    manifest = manifest_of(path, tmp_path)
    data = path.read_bytes()
    stat = path.stat()
    path.write_bytes(b"x" * (len(data) // 2) + data[len(data) // 2 :])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with RowReader(manifest, values=["prompt"]) as reader:
        rows = [row for _, batch in reader.read(19_000, 19_500) for row in batch.values]
    assert rows == [{"prompt": str(row)} for row in range(19_000, 19_500)]


def test_index_is_made_once_and_anew_when_it_is_gone(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    manifest = manifest_of(path, tmp_path)
    assert count_rows(manifest, tmp_path / "job") is manifest
    assert manifest.index is not None
    Path(manifest.index).unlink()
    with pytest.raises(DatasetError, match="index of the input"):
        RowReader(manifest)
    assert count_rows(manifest, tmp_path / "job") == manifest
    assert table_of(manifest) == [{"prompt": "a"}]


def test_counting_can_be_stopped_from_its_progress(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}] * 10_000)
    calls: list[int] = []

    def stop(num_rows: int) -> None:
        calls.append(num_rows)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        count_rows(build_manifest(path), tmp_path / "job", on_progress=stop)
    assert calls == [4096]
    assert list((tmp_path / "job").iterdir()) == []
