"""Which files an input names: folders, patterns, partitions; and one schema for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.dataset import build_manifest, read_schema
from jobs.merge import merge_schemas, merge_types
from jobs.records import DatasetError
from tests.input_helpers import manifest_of, table_of, types_of, values_of
from tests.job_factories import write_input


def tree(root: Path, *names: str) -> Path:
    """Parquet files whose prompt is their own name."""
    for name in names:
        write_input(root / name, {"prompt": [name]})
    return root


def names_of(input_path: str | Path, root: Path) -> list[str]:
    files = build_manifest(input_path).files
    return [Path(file.path).relative_to(root).as_posix() for file in files]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.parquet", ["a.parquet", "b.parquet"]),
        ("?.parquet", ["a.parquet", "b.parquet"]),
        ("[b-z].parquet", ["b.parquet"]),
        ("**/*.parquet", ["a.parquet", "b.parquet", "x/c.parquet", "x/y/d.parquet"]),
        ("**", ["a.parquet", "b.parquet", "x/c.parquet", "x/y/d.parquet"]),
        ("x*", ["x/c.parquet", "x/y/d.parquet"]),
        ("*/y/*", ["x/y/d.parquet"]),
    ],
)
def test_pattern_names_files_each_once(tmp_path: Path, pattern: str, names: list[str]) -> None:
    tree(tmp_path, "b.parquet", "a.parquet", "x/c.parquet", "x/y/d.parquet", "x/.hidden.parquet")
    assert names_of(tmp_path / pattern, tmp_path) == names


def test_pattern_is_relative_to_where_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path, "in/a.parquet")
    monkeypatch.chdir(tmp_path)
    assert names_of("in/*.parquet", tmp_path) == ["in/a.parquet"]


def test_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    tree(tmp_path, "[a].parquet", "a.parquet")
    assert names_of(tmp_path / "[a].parquet", tmp_path) == ["[a].parquet"]


def test_pattern_without_match_is_refused(tmp_path: Path) -> None:
    """Case 85: a pattern that matches nothing, or nothing that is an input."""
    with pytest.raises(DatasetError, match=r"pattern .*\*\.parquet matches no files that end in"):
        build_manifest(tmp_path / "*.parquet")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DatasetError, match=r"matches no files .*; it has notes\.txt"):
        build_manifest(tmp_path / "*")


def test_files_of_several_formats_are_refused_with_a_pattern_to_use(tmp_path: Path) -> None:
    tree(tmp_path, "a.parquet")
    (tmp_path / "b.csv").write_text("prompt\nx\n")
    with pytest.raises(DatasetError, match=r"\(a\.parquet, b\.csv\); .*\*\*/\*\.parquet"):
        build_manifest(tmp_path)


def test_folder_that_links_to_itself_is_read_once(tmp_path: Path) -> None:
    tree(tmp_path, "in/a.parquet")
    (tmp_path / "in" / "again").symlink_to(tmp_path / "in")
    assert names_of(tmp_path / "in", tmp_path) == ["in/a.parquet"]


# ---- partitions --------------------------------------------------------------------------


def test_partition_values_are_columns(tmp_path: Path) -> None:
    """Case 83: dates, a null partition, URL-encoded values, beside a prompt in a dictionary."""
    prompts = pa.array(["x", "y"]).dictionary_encode()
    assert prompts.type == pa.dictionary(pa.int32(), pa.string())
    for folder in (
        "date=2025-09-17/lang=de%20AT",
        "date=2025-09-18/lang=a%2Fb%3Dc",
        "date=__HIVE_DEFAULT_PARTITION__/lang=en",
    ):
        write_input(tmp_path / "in" / folder / "0.parquet", {"prompt": prompts, "n": [1, 2]})
    manifest = build_manifest(tmp_path / "in")
    assert types_of(manifest) == {
        "prompt": "dictionary<values=string, indices=int32, ordered=0>",
        "n": "int64",
        "date": "string",
        "lang": "string",
    }
    rows = table_of(manifest, ["date", "lang"])
    assert [(row["date"], row["lang"]) for row in rows[::2]] == [
        ("2025-09-17", "de AT"),
        ("2025-09-18", "a/b=c"),
        (None, "en"),
    ]
    assert values_of(manifest, ["prompt", "lang"])[:2] == [
        {"prompt": "x", "lang": "de AT"},
        {"prompt": "y", "lang": "de AT"},
    ]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_text_files_have_partitions_too(tmp_path: Path, suffix: str) -> None:
    for lang, text in (("de", "hallo"), ("fr", "salut")):
        folder = tmp_path / "in" / f"lang={lang}"
        folder.mkdir(parents=True)
        row = f'{{"prompt": "{text}"}}\n' if suffix == "jsonl" else f"prompt\n{text}\n"
        (folder / f"0.{suffix}").write_text(row)
    assert table_of(manifest_of(tmp_path / "in", tmp_path)) == [
        {"prompt": "hallo", "lang": "de"},
        {"prompt": "salut", "lang": "fr"},
    ]


def test_partitions_of_a_pattern_are_those_below_its_first_wildcard(tmp_path: Path) -> None:
    tree(tmp_path, "year=2024/month=1/a.parquet", "year=2024/month=2/b.parquet")
    manifest = build_manifest(tmp_path / "year=2024" / "*" / "*.parquet")
    assert [row["month"] for row in table_of(manifest)] == ["1", "2"]
    assert manifest.partitions == ("month",)


def test_column_of_the_file_goes_before_the_folder_of_its_name(tmp_path: Path) -> None:
    write_input(tmp_path / "n=1" / "a.parquet", {"prompt": ["x"], "n": [1]})
    assert table_of(build_manifest(tmp_path)) == [{"prompt": "x", "n": 1}]


def test_file_outside_of_all_partitions_has_null_there(tmp_path: Path) -> None:
    tree(tmp_path, "a.parquet", "lang=de/b.parquet")
    assert [row["lang"] for row in table_of(build_manifest(tmp_path))] == [None, "de"]


# ---- one schema --------------------------------------------------------------------------


def test_column_that_is_null_in_the_first_file_takes_the_type_of_the_next(tmp_path: Path) -> None:
    """An all-null first file, whose column has the null type, does not decide."""
    kinds: list[Any] = [pa.nulls(1), pa.array(["x"]), pa.nulls(1)]
    for number, column in enumerate(kinds):
        write_input(tmp_path / f"{number}.parquet", {"prompt": ["p"], "note": column})
    manifest = build_manifest(tmp_path)
    assert types_of(manifest)["note"] == "string"
    assert [row["note"] for row in table_of(manifest)] == [None, "x", None]


I8, I32, I64, U8, U32, U64 = pa.int8(), pa.int32(), pa.int64(), pa.uint8(), pa.uint32(), pa.uint64()
F32, F64, TEXT, LARGE = pa.float32(), pa.float64(), pa.string(), pa.large_string()
MERGED = [
    (I8, I64, I64),
    (U8, U32, U32),
    (U32, I32, I64),
    (U64, I8, None),
    (I32, F64, F64),
    (I64, F64, None),
    (I8, F32, F32),
    (F32, F64, F64),
    (TEXT, LARGE, LARGE),
    (TEXT, I64, None),
    (TEXT, pa.binary(), None),
    (pa.binary(), pa.large_binary(), pa.large_binary()),
    (TEXT, pa.dictionary(pa.int32(), TEXT), TEXT),
    (pa.null(), pa.list_(TEXT), pa.list_(TEXT)),
    (pa.decimal128(10, 2), pa.decimal128(12, 4), pa.decimal128(12, 4)),
    (pa.decimal128(38, 0), pa.decimal128(38, 10), pa.decimal256(48, 10)),
    (pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("us")),
    (pa.timestamp("us"), pa.timestamp("ns"), None),
    (pa.timestamp("us", "UTC"), pa.timestamp("us"), None),
    (pa.list_(I32), pa.list_(I64), pa.list_(I64)),
    (pa.list_(I32, 2), pa.list_(I32, 3), None),
    (pa.map_(TEXT, I32), pa.map_(TEXT, I64), pa.map_(TEXT, I64)),
    (
        pa.struct([("a", I32), ("b", TEXT)]),
        pa.struct([("b", TEXT), ("c", F64), ("a", I64)]),
        pa.struct([("a", I64), ("b", TEXT), ("c", F64)]),
    ),
    (pa.struct([("a", I32)]), pa.struct([("a", TEXT)]), None),
]


@pytest.mark.parametrize(("known", "new", "merged"), MERGED, ids=str)
def test_types_are_widened_where_nothing_is_lost(
    tmp_path: Path, known: pa.DataType, new: pa.DataType, merged: pa.DataType | None
) -> None:
    assert merge_types(known, new) == merged
    backwards = merge_types(new, known)
    assert (backwards is None) == (merged is None)
    for number, kind in enumerate((known, new)):
        table = pa.table({"prompt": ["p"], "x": pa.nulls(1, kind)})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    if merged is None:
        with pytest.raises(DatasetError, match=r"1\.parquet: column 'x' is .*without loss"):
            build_manifest(tmp_path)
    else:
        manifest = build_manifest(tmp_path)
        assert read_schema(manifest).field("x").type == merged
        assert [row["x"] for row in table_of(manifest)] == [None, None]


def test_dictionaries_of_other_types_become_plain_text() -> None:
    # Parquet keeps neither type of a dictionary's index nor large text in it, so no file differs.
    known, new = pa.dictionary(pa.int8(), TEXT), pa.dictionary(pa.int32(), LARGE)
    assert merge_types(known, new) == LARGE


def test_nested_values_are_widened_field_by_field(tmp_path: Path) -> None:
    first = pa.array([[{"role": "user", "n": 1}]], pa.list_(pa.struct([("role", TEXT), ("n", I8)])))
    second = pa.array(
        [[{"n": 2**40, "text": "hi", "role": "me"}]],
        pa.list_(pa.struct([("n", I64), ("text", LARGE), ("role", LARGE)])),
    )
    for number, column in enumerate((first, second)):
        write_input(tmp_path / f"{number}.parquet", {"messages": column})
    assert [row["messages"][0] for row in table_of(build_manifest(tmp_path))] == [
        {"role": "user", "n": 1, "text": None},
        {"role": "me", "n": 2**40, "text": "hi"},
    ]


def test_column_that_one_file_lacks_is_nullable() -> None:
    strict = pa.schema([pa.field("prompt", TEXT, nullable=False), pa.field("n", I64, False)])
    merged = merge_schemas(strict, pa.schema([pa.field("prompt", TEXT, False)]), Path("b"))
    assert (merged.field("prompt").nullable, merged.field("n").nullable) == (False, True)
