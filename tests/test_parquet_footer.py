"""Parquet files of many row groups: footers read in pieces, and memory that stays bounded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.dataset import RowReader, build_manifest, read_schema
from jobs.formats import parquet_footer
from jobs.formats.parquet_footer import map_footer
from jobs.records import Manifest
from tests.input_helpers import table_of

NUM_ROWS = 1000
KIND = pa.dictionary(pa.int32(), pa.string())


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every footer is large, and a window has a few row groups."""
    monkeypatch.setattr(parquet_footer, "LARGE_NBYTES", 1)
    monkeypatch.setattr(parquet_footer, "WINDOW_NBYTES", 3000)
    parquet_footer._map_footer.cache_clear()


def write_groups(path: Path, sizes: list[int]) -> pa.Table:
    """A file with a row group of each size, and columns of types that need the whole footer."""
    num_rows = sum(sizes)
    table = pa.table(
        {
            "prompt": pa.array([f"p{row}" for row in range(num_rows)], pa.string()),
            "id": pa.array([row.to_bytes(16) for row in range(num_rows)], pa.uuid()),
            "kind": pa.array([f"k{row % 3}" for row in range(num_rows)], KIND),
            "score": pa.array([row / 7 for row in range(num_rows)], pa.float64()),
        }
    )
    with pq.ParquetWriter(path, table.schema) as writer:
        first = 0
        for size in sizes:
            writer.write_table(table.slice(first, size), row_group_size=max(size, 1))
            first += size
    return table


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=60))
def test_pieces_are_where_arrow_finds_the_row_groups(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    path = tmp_path_factory.mktemp("groups") / "in.parquet"
    table = write_groups(path, sizes)
    pieces = map_footer(path)
    metadata = pq.read_metadata(path)
    assert pieces is not None and pieces.num_groups == metadata.num_row_groups
    rows = [metadata.row_group(idx).num_rows for idx in range(metadata.num_row_groups)]
    assert pieces.first_rows.tolist() == [sum(rows[:end]) for end in range(len(rows) + 1)]
    manifest = build_manifest(path)
    assert read_schema(manifest).equals(table.schema)
    assert table_of(manifest) == table.to_pylist()


@pytest.fixture(scope="module")
def many_groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many") / "in.parquet"
    write_groups(path, [7, 0, 1] * (NUM_ROWS // 8))
    return path


RANGES = st.tuples(st.integers(0, NUM_ROWS), st.integers(0, NUM_ROWS)).map(sorted)


@settings(max_examples=25, deadline=None)
@given(ranges=st.lists(RANGES, max_size=4))
def test_any_sequence_of_ranges_yields_exactly_its_rows(
    many_groups: Path, ranges: list[list[int]]
) -> None:
    manifest: Manifest = build_manifest(many_groups)
    with RowReader(manifest, ["score"], values=["prompt"]) as reader:
        for begin, end in ranges:
            rows = [row for _, batch in reader.read(begin, end) for row in batch.values]
            assert rows == [{"prompt": f"p{row}"} for row in range(begin, end)]


def test_windows_are_small_and_cover_all_row_groups(many_groups: Path) -> None:
    pieces = map_footer(many_groups)
    assert pieces is not None
    group, num_windows = 0, 0
    while group < pieces.num_groups:
        end = pieces.window_after(group)
        assert group < end and pieces.groups[end] - pieces.groups[group] <= 3000
        group, num_windows = end, num_windows + 1
    assert group == pieces.num_groups and num_windows > 10


def test_footer_that_cannot_be_walked_is_left_to_arrow(many_groups: Path, tmp_path: Path) -> None:
    data = bytearray(many_groups.read_bytes())
    pieces = map_footer(many_groups)
    assert pieces is not None
    data[pieces.begin + int(pieces.groups[1])] = 0xFF
    (tmp_path / "in.parquet").write_bytes(data)
    assert map_footer(tmp_path / "in.parquet") is None


MEASURE = """
import sys
from pathlib import Path
import psutil
from jobs.dataset import RowReader, build_manifest, count_rows
from jobs.id_counts import IdCounter

def uss():
    return psutil.Process().memory_full_info().uss

manifest = count_rows(build_manifest(sys.argv[1]), Path(sys.argv[1]).parent, ids=IdCounter())
num_rows, peak, last = 0, uss(), None
with RowReader(manifest, ["id"], values=["prompt"]) as reader:
    for number, (first, batch) in enumerate(reader.read(0, manifest.num_rows)):
        assert first == num_rows and batch.values[0] == {"prompt": f"p{first}"}
        num_rows += batch.num_rows
        if number % 200 == 0:
            peak = max(peak, uss())
print(num_rows, max(peak, uss()))
"""


def peak_uss(path: Path) -> tuple[int, int]:
    """(rows read, most bytes that the reading process had to itself), in a process of its own."""
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    num_rows, nbytes = map(int, done.stdout.split())
    return num_rows, nbytes


def test_memory_does_not_grow_with_rows_or_row_groups(tmp_path: Path) -> None:
    """Case 82: one row group of 400,000 rows; 40,000 row groups of one row."""
    peaks = {}
    for name, num_rows, group_rows in (
        ("small", 1000, 1000),
        ("one group", 400_000, 400_000),
        ("many groups", 40_000, 1),
    ):
        prompts = pa.array([f"p{row}" for row in range(num_rows)])
        path = tmp_path / f"{name}.parquet"
        pq.write_table(
            pa.table({"id": prompts, "prompt": prompts}), path, row_group_size=group_rows
        )
        num_read, peaks[name] = peak_uss(path)
        assert num_read == num_rows
    assert peaks["one group"] - peaks["small"] < 60 << 20
    assert peaks["many groups"] - peaks["small"] < 60 << 20
