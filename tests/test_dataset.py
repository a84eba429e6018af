"""Parquet input: the manifest, the columns a job uses, ranges of rows, values."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import RowError
from engine.chat import ChatTemplate
from jobs.dataset import (
    RowReader,
    bind_columns,
    build_manifest,
    read_schema,
)
from jobs.formats.base import BATCH_NBYTES
from jobs.prepare import as_messages
from jobs.records import DatasetError, Manifest, SpecError
from tests.job_factories import make_spec, write_input

MESSAGE = {"role": "user", "content": "hi"}


def prompts_of(manifest: Manifest, begin: int, end: int) -> list[Any]:
    with RowReader(manifest, ["prompt"]) as reader:
        return [
            value
            for _, batch in reader.read(begin, end)
            for value in batch.table.column("prompt").to_pylist()
        ]


def values_of(path: Path, columns: dict[str, Any], **options: Any) -> list[Any]:
    """Write columns to Parquet and take them back as values."""
    write_input(path, columns, **options)
    with RowReader(build_manifest(path), values=tuple(columns)) as reader:
        return [
            row
            for _, batch in reader.read(0, pq.read_metadata(path).num_rows)
            for row in batch.values
        ]


# ---- the manifest ------------------------------------------------------------------------


def test_manifest_of_a_file_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_input(tmp_path / "in.parquet", {"prompt": ["a", "b"]})
    monkeypatch.chdir(tmp_path)
    (file,) = build_manifest("in.parquet").files
    stat = path.stat()
    assert (file.path, file.nbytes, file.mtime_ns) == (str(path), stat.st_size, stat.st_mtime_ns)
    assert (file.num_rows, file.first_row) == (2, 0)


def test_folder_is_sorted_and_other_names_are_listed(tmp_path: Path) -> None:
    names = {"b.parquet": "34", "a.parquet": "012", "c.PARQUET": "5", "old/f.parquet": "6"}
    for name, rows in names.items():
        write_input(tmp_path / name, {"prompt": list(rows)})
    for name in (".d.parquet", "_e.parquet", "notes.txt", "old/notes.txt"):
        (tmp_path / name).write_text("no input")
    write_input(tmp_path / "_temporary" / "g.parquet", {"prompt": ["no"]})
    manifest = build_manifest(tmp_path)
    assert [Path(file.path).name for file in manifest.files] == [
        "a.parquet",
        "b.parquet",
        "c.PARQUET",
        "f.parquet",
    ]
    assert [file.first_row for file in manifest.files] == [0, 3, 5, 6]
    assert manifest.skipped == (
        ".d.parquet",
        "_e.parquet",
        "_temporary/",
        "notes.txt",
        "old/notes.txt",
    )
    assert prompts_of(manifest, 0, 7) == list("0123456")


def zero_bytes(path: Path) -> None:
    path.touch()


def not_parquet(path: Path) -> None:
    path.write_text('{"prompt": "hi"}\n')


def cut_in_half(path: Path) -> None:
    write_input(path, {"prompt": ["x" * 1000]})
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (zero_bytes, r"is empty \(0 bytes\)"),
        (not_parquet, "cannot be read as Parquet"),
        (cut_in_half, "cannot be read as Parquet"),
        (Path.mkdir, r"has no files that end in \.parquet, \.jsonl"),
        (lambda path: None, "there is no input"),
    ],
)
def test_input_that_cannot_be_read_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    """Case 85 (Parquet): no files, no bytes, not Parquet."""
    make(tmp_path / "in.parquet")
    with pytest.raises(DatasetError, match=message) as caught:
        build_manifest(tmp_path / "in.parquet")
    assert str(tmp_path / "in.parquet") in str(caught.value)


@pytest.mark.parametrize("row_group_size", [None, 1])
def test_input_without_rows_is_no_error(tmp_path: Path, row_group_size: int | None) -> None:
    """Case 85: zero rows, in one row group or in none."""
    schema = pa.schema([("prompt", pa.string())])
    with pq.ParquetWriter(tmp_path / "in.parquet", schema) as writer:
        if row_group_size:
            writer.write_table(schema.empty_table())
    manifest = build_manifest(tmp_path / "in.parquet")
    assert manifest.num_rows == 0
    assert prompts_of(manifest, 0, 0) == []


def test_files_of_different_types_are_refused_by_column(tmp_path: Path) -> None:
    write_input(tmp_path / "a.parquet", {"prompt": ["x"], "n": [1]})
    write_input(tmp_path / "b.parquet", {"prompt": ["x"], "n": ["1"]})
    with pytest.raises(DatasetError, match=r"b\.parquet: column 'n' is string, .* is int64"):
        build_manifest(tmp_path)


def test_columns_that_only_some_files_have_are_null_in_the_others(tmp_path: Path) -> None:
    write_input(tmp_path / "a.parquet", {"prompt": ["x"], "n": [1]})
    write_input(tmp_path / "b.parquet", {"prompt": ["y"], "m": ["new"]})
    manifest = build_manifest(tmp_path)
    with RowReader(manifest, values=["prompt", "m"]) as reader:
        batches = [batch for _, batch in reader.read(0, 2)]
    assert [row for batch in batches for row in batch.table.to_pylist()] == [
        {"prompt": "x", "n": 1, "m": None},
        {"prompt": "y", "n": None, "m": "new"},
    ]
    assert [batch.values[0] for batch in batches] == [
        {"prompt": "x", "m": None},
        {"prompt": "y", "m": "new"},
    ]


def test_column_name_used_twice_is_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["x"]), pa.array(["y"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(DatasetError, match="more than one column named 'prompt'"):
        build_manifest(tmp_path / "in.parquet")


def test_files_may_differ_in_nullability_and_order(tmp_path: Path) -> None:
    strict = pa.struct([pa.field("role", pa.string(), nullable=False), ("content", pa.string())])
    loose = pa.struct([("role", pa.string()), ("content", pa.string())])
    for name, item, row in (("a", strict, MESSAGE), ("b", loose, MESSAGE | {"role": None})):
        columns = {"messages": pa.array([[row]], pa.list_(item)), "n": [1]}
        write_input(
            tmp_path / f"{name}.parquet", dict(sorted(columns.items(), reverse=name == "a"))
        )
    manifest = build_manifest(tmp_path)
    with RowReader(manifest) as reader:
        batches = [batch.table for _, batch in reader.read(0, 2)]
    assert all(batch.schema.equals(reader.schema) for batch in batches)
    assert reader.schema.names == ["n", "messages"]
    assert [batch.column("messages").to_pylist()[0][0]["role"] for batch in batches] == [
        "user",
        None,
    ]


# ---- ranges ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three_files(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("three")
    sizes, first = (700, 0, 333), 0
    for name, num_rows in zip("abc", sizes, strict=True):
        prompts = pa.array([f"p{row}" for row in range(first, first + num_rows)], pa.string())
        write_input(folder / f"{name}.parquet", {"prompt": prompts}, row_group_size=150)
        first += num_rows
    return build_manifest(folder)


RANGES = st.tuples(st.integers(0, 1033), st.integers(0, 1033)).map(lambda ends: tuple(sorted(ends)))


@settings(max_examples=40, deadline=None)
@given(ranges=st.lists(RANGES, max_size=6))
def test_any_sequence_of_ranges_yields_exactly_its_rows(
    three_files: Manifest, ranges: list[tuple[int, int]]
) -> None:
    with RowReader(three_files, ["prompt"]) as reader:
        for begin, end in ranges:
            rows: list[str] = []
            for first, batch in reader.read(begin, end):
                assert first == begin + len(rows)
                assert batch.num_rows
                rows += batch.table.column("prompt").to_pylist()
            assert rows == [f"p{row}" for row in range(begin, end)]


@settings(max_examples=20, deadline=None)
@given(ranges=st.lists(st.tuples(RANGES, st.integers(1, 3)), max_size=5))
def test_reading_that_is_left_early_does_not_disturb_the_next(
    three_files: Manifest, ranges: list[tuple[tuple[int, int], int]]
) -> None:
    with RowReader(three_files, ["prompt"]) as reader:
        for (begin, end), num_batches in ranges:
            batches = reader.read(begin, end)
            for (first, batch), _ in zip(batches, range(num_batches), strict=False):
                assert batch.table.column("prompt")[0].as_py() == f"p{first}"


@pytest.mark.parametrize(("begin", "end"), [(-1, 3), (4, 3), (0, 1034)])
def test_range_outside_the_input_is_refused(three_files: Manifest, begin: int, end: int) -> None:
    with RowReader(three_files) as reader, pytest.raises(DatasetError, match="which has 1033 rows"):
        next(reader.read(begin, end))


def test_consecutive_ranges_decode_a_row_group_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_input(tmp_path / "in.parquet", {"prompt": [str(row) for row in range(5000)]})
    starts: list[range] = []
    original = pq.ParquetFile.iter_batches

    def spy(self: pq.ParquetFile, *args: Any, **options: Any) -> Iterator[pa.RecordBatch]:
        starts.append(options["row_groups"])
        yield from original(self, *args, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    with RowReader(build_manifest(path), ["prompt"]) as reader:
        for begin in range(0, 5000, 100):
            rows = [v for _, b in reader.read(begin, begin + 100) for v in b.table[0].to_pylist()]
            assert rows == [str(row) for row in range(begin, begin + 100)]
    assert starts == [range(0, 1)]


def test_memory_is_bounded_within_a_large_row_group(tmp_path: Path) -> None:
    """Case 82 (in part): one row group of 50 MB, of which little is in memory at a time."""
    text = [os.urandom(2500).hex() for _ in range(10_000)]
    path = write_input(tmp_path / "in.parquet", {"prompt": text}, use_dictionary=False)
    del text
    assert pq.read_metadata(path).num_row_groups == 1
    before, peak, num_rows = pa.total_allocated_bytes(), 0, 0
    with RowReader(build_manifest(path), ["prompt"]) as reader:
        for _, batch in reader.read(0, 10_000):
            num_rows += batch.num_rows
            peak = max(peak, pa.total_allocated_bytes() - before)
    assert num_rows == 10_000
    assert peak < 2 * BATCH_NBYTES


def test_rows_of_long_prompts_come_in_small_batches(tmp_path: Path) -> None:
    text = [os.urandom(500_000).hex() for _ in range(20)]
    path = write_input(tmp_path / "in.parquet", {"prompt": text})
    with RowReader(build_manifest(path), ["prompt"]) as reader:
        sizes = [batch.num_rows for _, batch in reader.read(0, 20)]
    assert max(sizes) * 1_000_000 < 2 * BATCH_NBYTES
    assert sum(sizes) == 20


# ---- an input that changes ---------------------------------------------------------------


def touch_later(path: Path) -> None:
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def append_rows(path: Path) -> None:
    write_input(path, {"prompt": ["a", "b", "c", "d"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (touch_later, "its modification time was"),
        (append_rows, "its size was"),
        (Path.unlink, "cannot be read any more"),
    ],
)
@pytest.mark.parametrize("is_open", [False, True])
def test_changed_input_is_refused_when_it_is_read(
    tmp_path: Path, change: Any, message: str, is_open: bool
) -> None:
    path = write_input(tmp_path / "in.parquet", {"prompt": ["a", "b"]})
    manifest = build_manifest(path)
    reader = RowReader(manifest)
    if is_open:
        assert next(reader.read(0, 1))[1].num_rows == 1
    change(path)
    with pytest.raises(DatasetError, match=f"{path} .*{message}"):
        next(reader.read(1, 2))
    with pytest.raises(DatasetError, match=message):
        read_schema(manifest)
    reader.close()


def test_damaged_pages_are_named_by_file_and_row(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    prompts = [os.urandom(20).hex() for _ in range(1000)]
    write_input(path, {"prompt": prompts}, row_group_size=512, compression="zstd")
    offset = pq.read_metadata(path).row_group(1).column(0).dictionary_page_offset
    data = bytearray(path.read_bytes())
    data[offset : offset + 2000] = bytes(2000)
    path.write_bytes(data)
    with (
        RowReader(build_manifest(path)) as reader,
        pytest.raises(
            DatasetError, match=r"in\.parquet is damaged at or after its row 512: .*data"
        ),
    ):
        list(reader.read(0, 1000))


# ---- values ------------------------------------------------------------------------------


def test_null_prompts_stay_null_and_texts_stay_as_they_are(tmp_path: Path) -> None:
    """Case 7: null is None, never the text "None" or "nan"; blanks are kept."""
    prompts = [None, "", "   ", "\n", "None", "nan", "BANANA\0APPLE", "end\u00a0"]
    rows = values_of(tmp_path / "in.parquet", {"prompt": prompts})
    assert [row["prompt"] for row in rows] == prompts


@pytest.mark.parametrize(
    "data_type", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()], ids=str
)
@pytest.mark.parametrize("in_dictionary", [False, True])
def test_text_of_any_type_becomes_text(
    tmp_path: Path, data_type: pa.DataType, in_dictionary: bool
) -> None:
    """Case 83 (in part): dictionary and large columns hold text like any other."""
    column = pa.array(["añb", None, "añb"], pa.string()).cast(data_type)
    rows = values_of(
        tmp_path / "in.parquet",
        {"prompt": column.dictionary_encode() if in_dictionary else column},
    )
    assert [row["prompt"] for row in rows] == ["añb", None, "añb"]


@pytest.mark.parametrize("data_type", [pa.string(), pa.large_string(), pa.binary()], ids=str)
def test_invalid_utf8_is_the_error_of_its_row_alone(tmp_path: Path, data_type: pa.DataType) -> None:
    """Case 86 (in part): Latin-1 bytes in one row of a text column."""
    cells = pa.array([b"ok", b"caf\xc9 x", "é".encode(), None], pa.binary())
    rows = values_of(
        tmp_path / "in.parquet",
        {
            "prompt": cells.cast(data_type, safe=False)
            if data_type == pa.binary()
            else cells.cast(pa.large_binary()).view(pa.large_string())
            if data_type == pa.large_string()
            else cells.view(pa.string())
        },
    )
    assert [rows[idx]["prompt"] for idx in (0, 2, 3)] == ["ok", "é", None]
    assert isinstance(rows[1], RowError)
    assert rows[1].code == "invalid_utf8"
    assert str(rows[1]).startswith("column prompt: byte 0xc9 at offset 3 is not UTF-8")


def test_invalid_utf8_inside_messages_is_the_error_of_its_row(tmp_path: Path) -> None:
    content = pa.array([b"ok", b"\xff"], pa.binary()).view(pa.string())
    items = pa.StructArray.from_arrays([pa.array(["user", "user"]), content], ["role", "content"])
    rows = values_of(
        tmp_path / "in.parquet", {"messages": pa.ListArray.from_arrays([0, 1, 2], items)}
    )
    assert rows[0] == {"messages": [{"role": "user", "content": "ok"}]}
    assert isinstance(rows[1], RowError) and rows[1].code == "invalid_utf8"


def test_map_with_a_key_twice_is_an_invalid_row(tmp_path: Path) -> None:
    column = pa.array([[("a", "1")], [("a", "1"), ("a", "2")]], pa.map_(pa.string(), pa.string()))
    rows = values_of(tmp_path / "in.parquet", {"tags": column})
    assert rows[0] == {"tags": {"a": "1"}}
    assert isinstance(rows[1], RowError) and rows[1].code == "invalid_row"


STRUCT = pa.struct([("role", pa.string()), ("content", pa.string())])
MAP = pa.map_(pa.string(), pa.string())


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[MESSAGE]], pa.list_(STRUCT)),
        pa.array([[MESSAGE]], pa.large_list(STRUCT)),
        pa.array([[MESSAGE]], pa.list_(STRUCT, 1)),
        pa.array([[list(MESSAGE.items())]], pa.list_(MAP)),
        pa.array([json.dumps([MESSAGE])]),
    ],
    ids=["list", "large_list", "fixed_size_list", "list of map", "JSON"],
)
def test_messages_of_any_form_are_the_same_conversation(tmp_path: Path, column: pa.Array) -> None:
    rows = values_of(tmp_path / "in.parquet", {"messages": column})
    assert as_messages(rows[0]["messages"]) == [MESSAGE]


def test_null_keys_of_messages_change_nothing(tmp_path: Path) -> None:
    """Case 10: keys that Arrow adds to every struct are not in the prompt."""
    with_nulls = MESSAGE | {"name": None, "tool_calls": None}
    rows = values_of(tmp_path / "in.parquet", {"messages": [[with_nulls]]})
    (message,) = as_messages(rows[0]["messages"])
    assert message == with_nulls
    template = ChatTemplate("{% for m in messages %}{{ m.items() | sort }}{% endfor %}")
    assert template.render([message]) == template.render([MESSAGE])


# ---- binding -----------------------------------------------------------------------------


def schema_with(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(list(columns.items()))


TEXT, NUMBER = pa.string(), pa.int64()
MESSAGES = pa.list_(STRUCT)


def test_prompt_column_is_found_and_the_others_are_carried() -> None:
    binding = bind_columns(make_spec(), schema_with(id=NUMBER, prompt=TEXT, note=TEXT))
    assert (binding.source, binding.column) == ("prompt", "prompt")
    assert binding.carried == ("id", "note")
    assert binding.values == ("prompt",)
    assert binding.columns == ("prompt", "id", "note")


def test_messages_column_is_found() -> None:
    binding = bind_columns(make_spec(), schema_with(messages=MESSAGES, id=NUMBER))
    assert (binding.source, binding.column, binding.carried) == ("messages", "messages", ("id",))


def test_choice_between_prompt_and_messages_is_obeyed_and_the_other_is_carried() -> None:
    schema = schema_with(prompt=TEXT, messages=MESSAGES)
    binding = bind_columns(make_spec(messages_column="messages"), schema)
    assert (binding.source, binding.carried) == ("messages", ("prompt",))


def test_template_columns_are_those_that_it_names() -> None:
    schema = schema_with(title=TEXT, body=TEXT, id=NUMBER)
    spec = make_spec(prompt_template="{% for x in range(2) %}{{ body }}{% endfor %}{{ title }}")
    binding = bind_columns(spec, schema)
    assert (binding.source, binding.template_columns) == ("template", ("title", "body"))
    assert binding.carried == ("title", "body", "id")


def test_parameters_and_kept_columns_are_bound() -> None:
    schema = schema_with(
        prompt=TEXT, temperature=pa.float64(), sampling_params=pa.struct([("top_k", NUMBER)])
    )
    spec = make_spec(param_columns=("temperature", "sampling_params"), keep=("prompt",))
    binding = bind_columns(
        make_spec(param_columns=spec.param_columns, keep=("prompt",), output_prefix="ntx_"), schema
    )
    assert binding.values == ("prompt", "temperature", "sampling_params")
    assert binding.carried == ("prompt",)


@pytest.mark.parametrize(
    ("spec", "schema", "message"),
    [
        ({}, {"prompt": TEXT, "messages": MESSAGES}, "choose one with --prompt-column"),
        ({}, {"text": TEXT, "id": NUMBER}, "no prompt or messages column, only text, id"),
        (
            {"prompt_column": "txt"},
            {"text": TEXT},
            "no column txt; did you mean text?; it has text",
        ),
        ({"messages_column": "m"}, {"text": TEXT}, "messages_column: the input has no column m"),
        ({}, {"prompt": NUMBER}, "column prompt is int64, a prompt is text"),
        ({}, {"prompt": MESSAGES}, "see --messages-column"),
        ({}, {"messages": NUMBER}, "column messages is int64; messages are lists"),
        ({}, {"messages": pa.list_(TEXT)}, "messages are lists of structs"),
        ({"prompt_template": "{{ titel }}"}, {"title": TEXT}, "titel; did you mean title?"),
        ({"prompt_template": "a\n{% if %}"}, {"title": TEXT}, "prompt_template, line 2"),
        ({"keep": ("di",)}, {"prompt": TEXT, "id": NUMBER}, "keep: the input has no column di"),
        ({"param_columns": ("top_k",)}, {"prompt": TEXT}, "param_columns: the input has no column"),
        (
            {"param_columns": ("temp",)},
            {"prompt": TEXT, "temp": NUMBER},
            "temp is not a sampling parameter",
        ),
        (
            {"param_columns": ("sampling_params",)},
            {"prompt": TEXT, "sampling_params": TEXT},
            "column sampling_params is string; it must be a struct",
        ),
        (
            {"param_columns": ("sampling_params",), "output_prefix": "x_"},
            {"prompt": TEXT, "sampling_params": pa.struct([("topk", NUMBER)])},
            "has a field topk, which is not a sampling parameter; did you mean top_k?",
        ),
        ({}, {"prompt": TEXT, "status": TEXT, "logprobs": TEXT}, "columns status, logprobs have"),
        (
            {"output_prefix": "ntx_"},
            {"prompt": TEXT, "ntx_status": TEXT},
            "otherwise with --output-prefix, or leave them out with --keep",
        ),
    ],
)
def test_columns_that_cannot_serve_are_refused(
    spec: dict[str, Any], schema: dict[str, pa.DataType], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        bind_columns(make_spec(**spec), schema_with(**schema))
    assert message in str(caught.value)


def test_clash_is_resolved_by_prefix_or_keep() -> None:
    schema = schema_with(prompt=TEXT, status=TEXT)
    assert bind_columns(make_spec(output_prefix="ntx_"), schema).carried == ("status",)
    assert bind_columns(make_spec(keep=()), schema).carried == ()
