"""Rows in: the frozen list of input files, which columns a job uses, and reading ranges of rows.

Parquet files and folders of them. Memory is bounded by batches, not by files or row groups.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from engine import RowError
from jobs.columns import bind_columns, merge_schemas
from jobs.records import DatasetError, InputFile, Manifest

Schema: TypeAlias = pa.Schema
RecordBatch: TypeAlias = pa.RecordBatch

__all__ = [
    "RecordBatch",
    "RowReader",
    "Schema",
    "bind_columns",
    "build_manifest",
    "check_unchanged",
    "read_schema",
    "row_values",
]

READ_BUFFER_NBYTES = 1 << 20
BATCH_NBYTES = 8 << 20
MAX_BATCH_ROWS = 256


# ---- the manifest ------------------------------------------------------------------------


def build_manifest(input_path: str | Path) -> Manifest:
    """Freeze the input: one Parquet file, or those directly in a folder, sorted by name.

    Only footers are read. In a folder, other names (hidden ones, those that begin with `_`,
    other extensions, folders) are listed as skipped.

    Raises DatasetError: nothing to read there, a file that is not whole Parquet, or files whose
        columns differ in more than nullability and order.
    """
    path = Path(os.path.abspath(input_path))
    paths, skipped = _input_paths(path)
    files: list[InputFile] = []
    schema: pa.Schema | None = None
    for file_path in paths:
        stat = file_path.stat()
        with _open_parquet(file_path) as parquet:
            schema = merge_schemas(schema, parquet.schema_arrow.remove_metadata(), file_path)
            num_rows = parquet.metadata.num_rows
        first_row = files[-1].first_row + files[-1].num_rows if files else 0
        files.append(
            InputFile(
                path=str(file_path),
                nbytes=stat.st_size,
                mtime_ns=stat.st_mtime_ns,
                num_rows=num_rows,
                first_row=first_row,
            )
        )
    return Manifest(files=tuple(files), skipped=tuple(skipped))


def read_schema(manifest: Manifest) -> Schema:
    """The columns of the input: those of its files, nullable where they are so in one of them.

    Raises DatasetError: a file is gone or has changed since the manifest was made.
    """
    schema: pa.Schema | None = None
    for file in manifest.files:
        check_unchanged(file)
        with _open_parquet(Path(file.path)) as parquet:
            own = parquet.schema_arrow.remove_metadata()
            schema = merge_schemas(schema, own, Path(file.path))
    assert schema is not None, "a manifest has at least one file"
    return schema


def check_unchanged(file: InputFile) -> None:
    """Raise DatasetError where a file is not what the manifest froze: gone, other size or time."""
    try:
        stat = os.stat(file.path)
    except OSError as error:
        raise DatasetError(f"input file {file.path} cannot be read any more: {error}") from error
    for what, then, now in (
        ("size", f"{file.nbytes} bytes", f"{stat.st_size} bytes"),
        ("modification time", f"{file.mtime_ns} ns", f"{stat.st_mtime_ns} ns"),
    ):
        if then != now:
            raise DatasetError(
                f"input file {file.path} has changed since the job was submitted: its {what} was "
                f"{then}, is {now}; restore it, or submit a new job"
            )


def _input_paths(path: Path) -> tuple[list[Path], list[str]]:
    if not path.is_dir():
        if not path.exists():
            raise DatasetError(f"there is no input {path}")
        return [path], []
    wanted, skipped = [], []
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name):
        if entry.name[0] not in "._" and entry.suffix.lower() == ".parquet" and entry.is_file():
            wanted.append(entry)
        else:
            skipped.append(entry.name + "/" if entry.is_dir() else entry.name)
    if not wanted:
        others = f"; it has {', '.join(skipped[:5])}" if skipped else ""
        raise DatasetError(f"folder {path} has no .parquet files directly in it{others}")
    return wanted, skipped


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        if path.stat().st_size == 0:
            raise DatasetError(f"input file {path} is empty (0 bytes): write it again")
        # NOTE: without a buffer, or with pre_buffer, a whole column chunk is read into memory.
        return pq.ParquetFile(path, buffer_size=READ_BUFFER_NBYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(
            f"input file {path} cannot be read as Parquet, the one format read so far: {error}"
        ) from error


# ---- reading -----------------------------------------------------------------------------


@dataclass(slots=True)
class _OpenFile:
    """An input file in reading. group_starts: its rows before each row group, and in all."""

    info: InputFile
    parquet: pq.ParquetFile
    group_starts: list[int]
    batch_rows: int

    @classmethod
    def open(cls, info: InputFile) -> _OpenFile:
        check_unchanged(info)
        parquet = _open_parquet(Path(info.path))
        metadata = parquet.metadata
        if metadata.num_rows != info.num_rows:
            raise DatasetError(
                f"input file {info.path} had {info.num_rows} rows at submit, "
                f"has {metadata.num_rows}; submit a new job"
            )
        groups = [metadata.row_group(idx) for idx in range(metadata.num_row_groups)]
        row_nbytes = max((g.total_byte_size // max(g.num_rows, 1) for g in groups), default=0)
        return cls(
            info=info,
            parquet=parquet,
            group_starts=list(accumulate((group.num_rows for group in groups), initial=0)),
            batch_rows=min(MAX_BATCH_ROWS, max(1, BATCH_NBYTES // (row_nbytes + 1))),
        )

    def group_of(self, row: int) -> int:
        """The row group that holds a row of this file."""
        return bisect.bisect_right(self.group_starts, row) - 1


class RowReader:
    """Reads ranges of a job's rows as record batches.

    The file stays open between calls, and a range that begins where the last one ended goes on
    in the middle of a row group. Not for several threads.

    columns: names to read, in that order; None reads all
    schema: the columns as they come out

    Raises DatasetError: the input cannot be read or is not what the manifest froze.
    """

    def __init__(self, manifest: Manifest, columns: Sequence[str] | None = None) -> None:
        self._manifest = manifest
        whole = read_schema(manifest)
        names = whole.names if columns is None else columns
        self.schema: Schema = pa.schema([whole.field(name) for name in names])
        self._first_rows = [file.first_row for file in manifest.files]
        self._file: _OpenFile | None = None
        self._stream: Iterator[pa.RecordBatch] = iter(())
        self._pending: pa.RecordBatch | None = None
        self._position = 0  # row index of the first row in _pending, or of the next to come

    def close(self) -> None:
        if self._file is not None:
            self._file.parquet.close()
        self._file, self._pending, self._stream = None, None, iter(())

    def __enter__(self) -> RowReader:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def read(self, begin: int, end: int) -> Iterator[tuple[int, RecordBatch]]:
        """Yield (row index of the batch's first row, batch) over rows [begin, end), without gaps.

        Raises DatasetError: the range passes the input's end, a file has changed, or its data
            is damaged; says which file and row.
        """
        if not 0 <= begin <= end <= self._manifest.num_rows:
            raise DatasetError(
                f"rows [{begin}, {end}) are not in the input, which has "
                f"{self._manifest.num_rows} rows"
            )
        position = begin
        while position < end:
            batch = self._take(position, end)
            yield position, batch
            position += batch.num_rows

    def _take(self, position: int, end: int) -> pa.RecordBatch:
        """At least one row from `position` on, as far as the batch at hand goes."""
        self._seek(position)
        batch = self._load()
        while self._position + batch.num_rows <= position:
            self._drop(batch.num_rows)
            batch = self._load()
        skipped = position - self._position
        taken = batch.slice(skipped, end - position)
        self._drop(skipped + taken.num_rows)
        return taken

    def _seek(self, position: int) -> None:
        """Make the stream one that comes to `position`, from its row group at the furthest."""
        info = self._manifest.files[bisect.bisect_right(self._first_rows, position) - 1]
        file = self._file
        if file is None or file.info is not info:
            self.close()
            file = self._file = _OpenFile.open(info)
            self._start_at(file, file.group_of(position - info.first_row))
            return
        check_unchanged(info)
        group = file.group_of(position - info.first_row)
        at_hand = self._position + (self._pending.num_rows if self._pending else 0)
        if position < self._position or info.first_row + file.group_starts[group] > at_hand:
            self._start_at(file, group)

    def _start_at(self, file: _OpenFile, group: int) -> None:
        self._stream = file.parquet.iter_batches(
            file.batch_rows,
            row_groups=range(group, file.parquet.num_row_groups),
            columns=self.schema.names,
            use_threads=False,
        )
        self._pending = None
        self._position = file.info.first_row + file.group_starts[group]

    def _load(self) -> pa.RecordBatch:
        while self._pending is None or not self._pending.num_rows:
            assert self._file is not None
            try:
                self._pending = _conform(next(self._stream), self.schema)
            except (StopIteration, pa.ArrowException, OSError) as error:
                path, row = self._file.info.path, self._position - self._file.info.first_row
                self.close()
                raise DatasetError(
                    f"input file {path} is damaged at or after its row {row}: "
                    f"{' '.join(str(error).split()) or 'its row groups end early'}; write it again"
                ) from error
        return self._pending

    def _drop(self, num_rows: int) -> None:
        assert self._pending is not None
        self._position += num_rows
        self._pending = self._pending.slice(num_rows)


def _conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with the schema's order of columns and its types."""
    columns = []
    for field in schema:
        column = batch.column(field.name)
        columns.append(column if column.type.equals(field.type) else column.cast(field.type))
    if not columns:
        return batch.select([])
    return pa.record_batch(columns, schema=schema)


# ---- values ------------------------------------------------------------------------------


def row_values(batch: RecordBatch, columns: Iterable[str]) -> list[dict[str, Any] | RowError]:
    """The named columns of a batch as one dict of Python values for each row.

    Null stays None; structs and maps become dicts; text in binary columns becomes str. In the
    place of a row that has no such values stands its error: `invalid_utf8`, or `invalid_row`.
    """
    names = tuple(columns)
    cells = [_column_values(batch.column(name), name) for name in names]
    if not names:
        return [{} for _ in range(batch.num_rows)]
    return [_row(names, row) for row in zip(*cells, strict=True)]


def _row(names: tuple[str, ...], cells: tuple[Any, ...]) -> dict[str, Any] | RowError:
    for cell in cells:
        if isinstance(cell, RowError):
            return cell
    return dict(zip(names, cells, strict=True))


def _column_values(column: pa.Array, name: str) -> list[Any]:
    column = _as_text(column)
    try:
        values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
        return values
    except (ValueError, KeyError, ArithmeticError):
        return [_cell(scalar, name) for scalar in column]


def _as_text(column: pa.Array) -> pa.Array:
    """Binary values seen as text, which is checked when it becomes str."""
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_binary(column.type):
        return column.view(pa.string())
    if types.is_large_binary(column.type):
        return column.view(pa.large_string())
    return column


def _cell(scalar: pa.Scalar, name: str) -> Any:
    try:
        return scalar.as_py(maps_as_pydicts="strict")
    except UnicodeDecodeError as error:
        return RowError(
            "invalid_utf8",
            f"column {name}: byte 0x{error.object[error.start]:02x} at offset {error.start} is "
            f"not UTF-8 ({error.reason})",
        )
    except (ValueError, KeyError, ArithmeticError) as error:
        return RowError("invalid_row", f"column {name}: {error}")
