"""CSV files: headers, delimiters, encodings, fields over several lines; values stay text."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.dataset import SAMPLE_NBYTES, RowReader, build_manifest, count_rows
from jobs.formats.text_file import INDEX_ROWS
from jobs.records import DatasetError, Manifest, SpecError
from tests.input_helpers import manifest_of, table_of, types_of, values_of

SHEET = (
    '"id","prompt","note"\r\n'
    '"007","first line\r\nsecond ""quoted"" line\r\nthird","1e5"\r\n'
    "8,caf\u00e9,NA\r\n"
)
ROWS = [
    {"id": "007", "prompt": 'first line\r\nsecond "quoted" line\r\nthird', "note": "1e5"},
    {"id": "8", "prompt": "caf\u00e9", "note": "NA"},
]


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (b"\xef\xbb\xbf" + SHEET.encode(), {}),
        (SHEET.encode(), {}),
        (SHEET.encode().rstrip(b"\r\n"), {}),
        (SHEET.replace(",", ";").encode(), {}),
        (SHEET.replace(",", "\t").encode(), {}),
        (SHEET.replace(",", "|").encode(), {"delimiter": "|"}),
        (SHEET.encode("cp1252"), {"encoding": "cp1252"}),
        (b"\xef\xbb\xbf" + SHEET.encode(), {"encoding": "utf-8-sig"}),
    ],
    ids=["BOM", "plain", "no last end", "semicolon", "tab", "pipe", "cp1252", "utf-8-sig"],
)
def test_sheet_is_read_as_it_was_written(
    tmp_path: Path, data: bytes, options: dict[str, Any]
) -> None:
    """Case 35: BOM, quoted header, CRLF, a field of 3 lines, numbers that stay text."""
    (tmp_path / "in.csv").write_bytes(data)
    manifest = manifest_of(tmp_path / "in.csv", tmp_path, **options)
    assert manifest.num_rows == 2
    assert types_of(manifest) == dict.fromkeys(("id", "prompt", "note"), "string")
    assert table_of(manifest) == ROWS
    assert values_of(manifest, ["prompt"])[0] == {"prompt": ROWS[0]["prompt"]}


def test_encoding_error_names_the_byte_and_the_option(tmp_path: Path) -> None:
    """Case 35: cp1252 read as UTF-8."""
    path = tmp_path / "in.csv"
    path.write_bytes(SHEET.encode("cp1252"))
    offset = path.read_bytes().index(b"\xe9")
    with pytest.raises(DatasetError, match=rf"byte 0xe9 at offset {offset} \(line 5\).*--encoding"):
        build_manifest(path)


def test_encoding_error_after_what_submit_reads_comes_when_rows_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    body = b"prompt\n" + b"x" * 99 + b"\n"
    path.write_bytes(body + (b"x" * 99 + b"\n") * (SAMPLE_NBYTES // 100 + 100) + b"caf\xe9\n")
    manifest = build_manifest(path)
    assert manifest.num_rows is None
    offset = path.stat().st_size - 2
    with pytest.raises(DatasetError, match=f"byte 0xe9 at offset {offset} "):
        count_rows(manifest, tmp_path / "job")


def test_bad_bytes_are_replaced_on_demand_and_marked(tmp_path: Path) -> None:
    """Case 86 (CSV): --on-bad-utf8 replace."""
    path = tmp_path / "in.csv"
    path.write_bytes(b"id,prompt\n1,caf\xe9\n2,tea\n")
    manifest = manifest_of(path, tmp_path, on_bad_utf8="replace")
    with RowReader(manifest, ["id"], values=["prompt"], on_bad_utf8="replace") as reader:
        ((_, batch),) = reader.read(0, 2)
    assert batch.values == [{"prompt": "caf\ufffd"}, {"prompt": "tea"}]
    assert batch.replaced == [("prompt",), ()]


@pytest.mark.parametrize(
    ("text", "delimiter"),
    [
        ("a;b\n1,5;2\n", ";"),
        ("a,b\n1;2,3\n", ","),
        ("a\tb\nx, y\tz\n", "\t"),
        ('"a;b",c\n1,2\n', ","),
        ("prompt\nhello; there\n", ","),
        ("a,b;c\n1,2;3\n4;5;6;7,8\n", ","),
    ],
)
def test_delimiter_is_the_one_that_cuts_rows_evenly(
    tmp_path: Path, text: str, delimiter: str
) -> None:
    (tmp_path / "in.csv").write_text(text)
    assert build_manifest(tmp_path / "in.csv").delimiter == delimiter


def test_tsv_is_cut_at_tabs(tmp_path: Path) -> None:
    (tmp_path / "in.tsv").write_text("prompt\nno tab, here\n")
    manifest = manifest_of(tmp_path / "in.tsv", tmp_path)
    assert table_of(manifest) == [{"prompt": "no tab, here"}]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a,b\n1,2\n\n3\n4,5\n", 4, "the row in line 4 has 1 field, the header has 2"),
        ("a,b\n1,2\n1,2,3\n4,5\n", 3, "the row in line 3 has 3 fields, the header has 2"),
        ('a,b\n1,2\n"x"y,3\n4,5\n', 3, "line 3 is not CSV"),
        ('a,b\n1,2\n4,"not closed\n4,5\n', 3, "line 3 is not CSV: unexpected end of data"),
        ("a,b\n1,2\n4", 3, "the row in line 3 has 1 field"),
        ("a,b\n1,2\nx\ry,3\n4,5\n", 3, "line 3 is not CSV"),
    ],
)
def test_row_that_is_not_whole_is_an_error_row(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    """Case 44 (input): a torn last row, a quote that is not closed, other numbers of fields."""
    (tmp_path / "in.csv").write_bytes(text.encode())
    manifest = manifest_of(tmp_path / "in.csv", tmp_path)
    first, bad, *rest = values_of(manifest, ["a", "b"])
    assert first == {"a": "1", "b": "2"}
    assert bad[0] == "invalid_row" and message in bad[1]
    assert rest in ([], [{"a": "4", "b": "5"}])
    assert table_of(manifest)[1] == {"a": None, "b": None}


def test_quote_that_is_not_closed_does_not_take_in_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.formats.csv_file.MAX_ROW_NBYTES", 1000)
    (tmp_path / "in.csv").write_text('a,b\n1,2\n3,"' + "4,5\n" * 1000)
    with pytest.raises(DatasetError, match=r"begins in line 3 has more than .* not closed there"):
        build_manifest(tmp_path / "in.csv")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "has no header"),
        (b"\r\n\n", "has no header"),
        (b"a,b,a\n", "more than one column named 'a'"),
        (b"\xff\xfea\0,\0b\0\n\0", "is UTF-16; .*iconv"),
        (b'"a,b\n', "its header cannot be read"),
    ],
)
def test_file_without_a_header_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    """Case 85 (CSV): nothing in it."""
    (tmp_path / "in.csv").write_bytes(data)
    with pytest.raises(DatasetError, match=message):
        build_manifest(tmp_path / "in.csv")


def test_header_alone_is_an_input_of_no_rows(tmp_path: Path) -> None:
    """Case 85 (CSV): no rows, and all columns known."""
    (tmp_path / "in.csv").write_text("id,prompt\n")
    manifest = manifest_of(tmp_path / "in.csv", tmp_path)
    assert manifest.num_rows == 0
    assert types_of(manifest) == {"id": "string", "prompt": "string"}
    assert table_of(manifest) == []


def test_column_without_a_name_is_numbered(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(",prompt\n0,a\n")
    assert table_of(manifest_of(tmp_path / "in.csv", tmp_path)) == [
        {"column_1": "0", "prompt": "a"}
    ]


def test_files_may_have_other_columns_and_another_order(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("id,prompt\n1,a\n")
    (tmp_path / "in" / "b.csv").write_text("prompt,lang,id\nb,de,2\n")
    assert table_of(manifest_of(tmp_path / "in", tmp_path)) == [
        {"id": "1", "prompt": "a", "lang": None},
        {"id": "2", "prompt": "b", "lang": "de"},
    ]


@pytest.mark.parametrize("name", ["utf-16", "utf-7", "iso2022_jp", "cp037", "klingon"])
def test_encoding_that_hides_ascii_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "in.csv").write_text("prompt\na\n")
    with pytest.raises(SpecError, match=f"encoding '{name}' .*iconv -f {name}"):
        build_manifest(tmp_path / "in.csv", encoding=name)


@pytest.mark.parametrize("text", ["", ",,", '"', "\n", "\u00b6"])
def test_delimiter_that_is_no_single_character_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "in.csv").write_text("prompt\na\n")
    with pytest.raises(SpecError, match="delimiter is one ASCII character"):
        build_manifest(tmp_path / "in.csv", delimiter=text)


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(CELLS, CELLS), max_size=20),
    delimiter=st.sampled_from(",;\t|"),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_what_the_csv_module_writes_comes_back(
    tmp_path_factory: pytest.TempPathFactory, rows: Any, delimiter: str, end: str
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    sink = io.StringIO(newline="")
    writer = csv.writer(sink, delimiter=delimiter, lineterminator=end)
    writer.writerows([("a", "b"), *rows])
    (folder / "in.csv").write_bytes(sink.getvalue().encode())
    manifest = manifest_of(folder / "in.csv", folder, delimiter=delimiter)
    assert [tuple(row.values()) for row in table_of(manifest)] == rows


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("long")
    with open(folder / "in.csv", "w", newline="") as sink:
        writer = csv.writer(sink)
        writer.writerow(["row", "prompt"])
        writer.writerows([row, "two\nlines"] for row in range(3 * INDEX_ROWS))
    return manifest_of(folder / "in.csv", folder)


@pytest.mark.parametrize(
    "begin", [0, 1, INDEX_ROWS - 1, INDEX_ROWS, INDEX_ROWS + 1, 3 * INDEX_ROWS - 1]
)
def test_reading_can_begin_anywhere(long_file: Manifest, begin: int) -> None:
    with RowReader(long_file, ["row"], values=["prompt"]) as reader:
        batches = [batch for _, batch in reader.read(begin, 3 * INDEX_ROWS)]
    rows = [row for batch in batches for row in batch.table.column("row").to_pylist()]
    assert rows == [str(row) for row in range(begin, 3 * INDEX_ROWS)]
    assert batches[0].values[0] == {"prompt": "two\nlines"}
