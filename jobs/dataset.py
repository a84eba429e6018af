"""Rows in: the frozen list of input files, their columns, and reading ranges of rows.

Parquet, JSON lines and CSV; what is particular to each is in `jobs.formats`. Memory is bounded by
batches, not by files or row groups.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import types

from jobs.columns import JSON_MARK, bind_columns
from jobs.files import file_state
from jobs.formats.base import (
    FileReader,
    InputBatch,
    OnBadUtf8,
    RecordBatch,
    RowValues,
    Schema,
    Wanted,
)
from jobs.formats.column_types import arrow_type
from jobs.formats.csv_file import check_delimiter, check_encoding, find_delimiter
from jobs.formats.parquet_file import Footer, ParquetReader, read_footer
from jobs.formats.text_file import TextReader
from jobs.id_counts import IdCounter, id_column
from jobs.input_files import InputFiles, find_files, partition_of
from jobs.merge import merge_schemas
from jobs.records import DatasetError, InputFile, Manifest, StorageError
from jobs.remote import each
from jobs.row_index import (
    OnProgress,
    index_rows,
    is_indexed,
    places_by_file,
    record_reader,
    sample_rows,
)
from jobs.uris import base_name, is_uri

__all__ = [
    "InputBatch",
    "OnProgress",
    "RecordBatch",
    "RowReader",
    "RowValues",
    "Schema",
    "bind_columns",
    "build_manifest",
    "check_unchanged",
    "count_rows",
    "file_change",
    "file_changes",
    "read_schema",
    "reserve_arrow_memory",
]

SAMPLE_NBYTES = 4 << 20
_T = TypeVar("_T")


# ---- the manifest ------------------------------------------------------------------------


def build_manifest(
    input_path: str | Path,
    *,
    encoding: str | None = None,
    delimiter: str | None = None,
    on_bad_utf8: OnBadUtf8 = "error",
    sample_nbytes: int | None = SAMPLE_NBYTES,
    only: Container[str] | None = None,
) -> Manifest:
    """Freeze the input: a file, a folder with all below it, or a pattern; sorted by path.

    Of Parquet only footers are read; of text the first rows, and rows are counted only where
    that is all of them. Hidden names, those that begin with `_` and other endings are listed as
    skipped.

    encoding, delimiter: of CSV; None takes UTF-8, and a tab for .tsv or what the header suggests
    sample_nbytes: of text read here; None reads it all
    only: paths; other files of the input are left out as if they were not there

    Raises DatasetError: nothing to read there, files that cannot be read or do not go together.
    Raises SpecError: an encoding or delimiter that will not do.
    """
    found = find_files(input_path)
    if only is not None:
        found.files = [file for file in found.files if file.path in only]
    files, names = _partitioned(found)
    manifest = Manifest(
        files=files, skipped=tuple(found.skipped), format=found.format, partitions=names
    )
    if found.format == "parquet":
        return _with_footers(manifest)
    if found.format == "csv":
        manifest = _with_csv_format(manifest, found.files[0].path, encoding, delimiter)
    return sample_rows(manifest, on_bad_utf8, sample_nbytes)


def _partitioned(found: InputFiles) -> tuple[tuple[InputFile, ...], tuple[str, ...]]:
    """The files, and the names of all partition columns; null where a file is in no such one."""
    partitions = [partition_of(file.folders) for file in found.files]
    names = tuple(dict.fromkeys(name for partition in partitions for name in partition))
    files = [
        InputFile(
            path=file.path,
            nbytes=file.state.nbytes,
            mtime_ns=file.state.mtime_ns,
            etag=file.state.etag,
            num_rows=None,
            first_row=None,
            partition=tuple(partition.get(name) for name in names),
        )
        for file, partition in zip(found.files, partitions, strict=True)
    ]
    return tuple(files), names


def _with_footers(manifest: Manifest) -> Manifest:
    schema: pa.Schema | None = None
    files: list[InputFile] = []
    first_row = 0
    for file, footer in zip(manifest.files, _of_each(manifest, _read_footer), strict=True):
        schema = merge_schemas(schema, footer.schema, file.path)
        files.append(replace(file, num_rows=footer.num_rows, first_row=first_row))
        first_row += footer.num_rows
    return replace(manifest, files=tuple(files))


def _read_footer(file: InputFile) -> Footer:
    return read_footer(file.path)


def _of_each(manifest: Manifest, work: Callable[[InputFile], _T]) -> list[_T]:
    """What `work` returns for each file; those of a store are asked for several at a time."""
    if any(is_uri(file.path) for file in manifest.files):
        return each(work, manifest.files)
    return [work(file) for file in manifest.files]


def _with_csv_format(
    manifest: Manifest, first: str, encoding: str | None, delimiter: str | None
) -> Manifest:
    encoding = check_encoding(encoding or "utf-8")
    if delimiter is not None:
        delimiter = check_delimiter(delimiter)
    elif base_name(first).lower().endswith(".tsv"):
        delimiter = "\t"
    else:
        delimiter = find_delimiter(first, encoding)
    return replace(manifest, encoding=encoding, delimiter=delimiter)


def count_rows(
    manifest: Manifest,
    folder: Path,
    on_bad_utf8: OnBadUtf8 = "error",
    *,
    ids: IdCounter | None = None,
    on_progress: OnProgress = lambda _: None,
) -> Manifest:
    """The manifest with all that reading needs: rows counted, columns settled, places indexed.

    Parquet, and text that has its index, is returned as it is.

    folder: of the job; the index of text files is written there
    ids: gets the ids of the rows; of text only when the index is made
    on_progress: called now and then with the rows counted so far; may raise to stop it

    Raises DatasetError: a file has changed, or cannot be read as rows.
    """
    if manifest.format == "parquet":
        if ids is not None:
            _count_ids(manifest, ids, on_progress)
        return manifest
    if is_indexed(manifest):
        return manifest
    _of_each(manifest, check_unchanged)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return index_rows(manifest, folder, on_bad_utf8, ids or IdCounter(), on_progress)


def _count_ids(manifest: Manifest, ids: IdCounter, on_progress: OnProgress) -> None:
    column = id_column(read_schema(manifest).names)
    if column is None:
        return
    with RowReader(manifest, [column]) as reader:
        for first, batch in reader.read(0, manifest.num_rows or 0):
            on_progress(first)
            ids.add(_id_values(batch.table.column(0)))
            if ids.is_full:
                return


def _id_values(column: pa.Array) -> list[Any]:
    """Values to compare; none for types that are no ids."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if types.is_temporal(column.type) or types.is_decimal(column.type):
        column = column.cast(pa.string())
    values: list[Any] = [] if types.is_nested(column.type) else column.to_pylist()
    return values


def read_schema(manifest: Manifest) -> Schema:
    """The columns of the input, those of partitions last; of text, as far as they are known.

    Raises DatasetError: a file is gone or has changed since the manifest was made.
    """
    schema: pa.Schema | None = None
    _of_each(manifest, check_unchanged)
    if manifest.format == "parquet":
        footers = _of_each(manifest, _read_footer)
        for file, footer in zip(manifest.files, footers, strict=True):
            schema = merge_schemas(schema, footer.schema, file.path)
    if schema is None:
        return pa.schema(
            [
                pa.field(
                    column.name, arrow_type(column), metadata=JSON_MARK if column.is_json else None
                )
                for column in manifest.columns
            ]
        )
    names = [name for name in manifest.partitions if name not in schema.names]
    return pa.schema([*schema, *(pa.field(name, pa.string()) for name in names)])


def check_unchanged(file: InputFile) -> None:
    """Raise DatasetError where a file is not what the manifest froze: gone, other size or time."""
    change = file_change(file)
    if change is not None:
        raise DatasetError(f"input file {file.path} {change}; restore it, or submit a new job")


def file_changes(manifest: Manifest) -> list[str | None]:
    """`file_change` of each file."""
    return _of_each(manifest, file_change)


def file_change(file: InputFile) -> str | None:
    """How a file differs from what the manifest froze; None where it does not.

    Raises StorageError: its store refuses or does not answer.
    """
    try:
        now = file_state(file.path)
    except OSError as error:
        return f"cannot be read any more: {error}"
    differing = [("size", f"{file.nbytes} bytes", f"{now.nbytes} bytes")]
    if file.etag is not None:
        differing.append(("ETag", file.etag, str(now.etag)))
    else:
        differing.append(("modification time", f"{file.mtime_ns} ns", f"{now.mtime_ns} ns"))
    for what, then, found in differing:
        if then != found:
            return f"has changed since the job was submitted: its {what} was {then}, is {found}"
    return None


def reserve_arrow_memory() -> None:
    """Let Arrow take the gigabyte of addresses now that it takes at its first allocation.

    Where address space is limited later, that would leave too little for what is meant to use it.
    """
    pa.allocate_buffer(1)


# ---- reading -----------------------------------------------------------------------------


class RowReader:
    """Reads ranges of a job's rows as batches.

    The file stays open between calls, and a range that begins where the last one ended goes on
    where that stopped. Not for several threads.

    columns: names for the batches' table, in that order; None takes all
    values: names of columns that are wanted as Python values
    on_bad_utf8: whether a row whose wanted values are not UTF-8 is an error; in tables such bytes
        are always replaced
    schema: of the tables

    Raises DatasetError: the input cannot be read or is not what the manifest froze.
    Raises StorageError: a store refuses or does not answer; the next call tries anew.
    """

    def __init__(
        self,
        manifest: Manifest,
        columns: Sequence[str] | None = None,
        *,
        values: Sequence[str] = (),
        on_bad_utf8: OnBadUtf8 = "error",
    ) -> None:
        whole = read_schema(manifest)
        names = whole.names if columns is None else columns
        self.schema: Schema = pa.schema([whole.field(name) for name in names])
        self._manifest = manifest
        self._wanted = Wanted(self.schema, tuple(values), on_bad_utf8)
        self._places = [] if manifest.format == "parquet" else places_by_file(manifest)
        self._first_rows = [file.first_row or 0 for file in manifest.files]
        self._file: FileReader | None = None
        self._first_row = 0  # of the file at hand
        self._stream: Iterator[InputBatch] = iter(())
        self._pending: InputBatch | None = None
        self._position = 0  # row index of the first row in _pending, or of the next to come

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
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

    def read(self, begin: int, end: int) -> Iterator[tuple[int, InputBatch]]:
        """Yield (row index of the batch's first row, batch) over rows [begin, end), without gaps.

        Raises DatasetError: the range passes the input's end, a file has changed, or its data
            is damaged; says which file and row.
        """
        num_rows = self._manifest.num_rows or 0
        if not 0 <= begin <= end <= num_rows:
            raise DatasetError(
                f"rows [{begin}, {end}) are not in the input, which has {num_rows} rows"
            )
        position = begin
        while position < end:
            batch = self._take(position, end)
            yield position, batch
            position += batch.num_rows

    def _take(self, position: int, end: int) -> InputBatch:
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
        """Make the stream one that comes to `position`, from the last start before it."""
        number = bisect.bisect_right(self._first_rows, position) - 1
        info = self._manifest.files[number]
        if self._file is None or self._file.info is not info:
            self.close()
            self._file = self._open(number)
            self._first_row = self._first_rows[number]
            self._start_at(self._file.start_before(position - self._first_row))
            return
        check_unchanged(info)
        start = self._file.start_before(position - self._first_row)
        at_hand = self._position + (self._pending.num_rows if self._pending else 0)
        if position < self._position or self._first_row + start > at_hand:
            self._start_at(start)

    def _open(self, number: int) -> FileReader:
        manifest, info = self._manifest, self._manifest.files[number]
        check_unchanged(info)
        partition = dict(zip(manifest.partitions, info.partition, strict=True))
        if manifest.format == "parquet":
            return ParquetReader(info, self._wanted, partition)
        read_records = record_reader(manifest, info.path, self._wanted.on_bad_utf8)
        places = self._places[number]
        return TextReader(info, self._wanted, partition, read_records=read_records, places=places)

    def _start_at(self, start: int) -> None:
        assert self._file is not None
        self._stream = self._file.batches(start)
        self._pending = None
        self._position = self._first_row + start

    def _load(self) -> InputBatch:
        while self._pending is None or not self._pending.num_rows:
            assert self._file is not None
            try:
                self._pending = next(self._stream, None)
                if is_uri(self._file.info.path):
                    # What is overwritten while it is read must not come as rows: all that was
                    # read until now is of one object if that is the one still.
                    check_unchanged(self._file.info)
            except (DatasetError, StorageError):
                self.close()
                raise
            if self._pending is None:
                path, row = self._file.info.path, self._position - self._first_row
                self.close()
                raise DatasetError(
                    f"input file {path} ends at its row {row}, earlier than when its rows were "
                    "counted; submit a new job"
                )
        return self._pending

    def _drop(self, num_rows: int) -> None:
        assert self._pending is not None
        self._position += num_rows
        self._pending = self._pending.slice(num_rows)
