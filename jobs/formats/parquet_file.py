"""Parquet files: their footers, and their rows by batch and never by row group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from engine import RowError
from jobs.formats.base import (
    BATCH_NBYTES,
    MAX_BATCH_ROWS,
    InputBatch,
    RecordBatch,
    ReplacedColumns,
    RowValues,
    Schema,
    Wanted,
)
from jobs.formats.parquet_footer import FooterMap, WindowedFile, map_footer
from jobs.formats.utf8 import repaired_cell, repaired_column
from jobs.records import DatasetError, InputFile
from jobs.remote import open_remote
from jobs.uris import is_uri

READ_BUFFER_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Footer:
    """What a footer says of the file."""

    schema: Schema
    num_rows: int


def read_footer(path: str | Path) -> Footer:
    """Raises DatasetError: the file is not whole Parquet."""
    pieces = _map_footer(path)
    parquet = open_parquet(path, pieces, (0, 1))
    try:
        return Footer(parquet.schema_arrow.remove_metadata(), parquet.metadata.num_rows)
    finally:
        parquet.close(force=True)


def open_parquet(
    path: str | Path, pieces: FooterMap | None = None, window: tuple[int, int] = (0, 0)
) -> pq.ParquetFile:
    """Open a file so that reading it buffers little.

    pieces: of its footer, if that is large; then only the row groups of `window` are there

    Raises DatasetError: the file is not whole Parquet.
    """
    try:
        # NOTE: without a buffer, or with pre_buffer, a whole column chunk is read into memory.
        return pq.ParquetFile(
            _source(str(path), pieces, window), buffer_size=READ_BUFFER_NBYTES, pre_buffer=False
        )
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _source(path: str, pieces: FooterMap | None, window: tuple[int, int]) -> Any:
    if pieces is not None:
        return pa.PythonFile(WindowedFile(path, pieces, *window))
    return pa.PythonFile(open_remote(path)) if is_uri(path) else path


def _map_footer(path: str | Path) -> FooterMap | None:
    try:
        return map_footer(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str | Path, error: Exception) -> DatasetError:
    why = str(error).rstrip(".")
    return DatasetError(
        f"input file {path} cannot be read as Parquet: {why}; other formats are known by "
        "their endings: .jsonl, .ndjson, .csv, .tsv; compressed text must be unpacked first"
    )


class ParquetReader:
    """One Parquet file in reading; reading begins at row groups.

    Raises DatasetError: it has other rows than the manifest says, or is damaged.
    """

    def __init__(
        self, info: InputFile, wanted: Wanted, partition: Mapping[str, str | None]
    ) -> None:
        self.info = info
        self._path = info.path
        self._wanted = wanted
        self._partition = partition
        self._pieces = _map_footer(self._path)
        self._parquet = open_parquet(self._path, self._pieces, (0, 1))
        metadata = self._parquet.metadata
        if metadata.num_rows != info.num_rows:
            raise DatasetError(
                f"input file {info.path} had {info.num_rows} rows at submit, "
                f"has {metadata.num_rows}; submit a new job"
            )
        self._group_starts = _group_starts(metadata, self._pieces)
        here = set(self._parquet.schema_arrow.names)
        names = dict.fromkeys((*wanted.table.names, *wanted.values))
        self._columns = [name for name in names if name in here]

    def close(self) -> None:
        self._parquet.close(force=True)

    def start_before(self, row: int) -> int:
        return int(self._group_starts[np.searchsorted(self._group_starts, row, "right") - 1])

    def batches(self, start: int) -> Iterator[InputBatch]:
        # Groups of no rows begin where the next one does: take them all.
        group = int(np.searchsorted(self._group_starts, start, "left"))
        position = start
        try:
            for batch in self._record_batches(group):
                yield make_batch(self._with_partition(batch), self._wanted)
                position += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise DatasetError(
                f"input file {self.info.path} is damaged at or after its row {position}: "
                f"{' '.join(str(error).split())}; write it again"
            ) from error

    def _record_batches(self, group: int) -> Iterator[RecordBatch]:
        """All rows from a row group on; of a large footer one window after the other is open."""
        num_groups = len(self._group_starts) - 1
        while group < num_groups:
            end = num_groups
            if self._pieces is not None:
                end = self._pieces.window_after(group)
                self.close()
                self._parquet = open_parquet(self._path, self._pieces, (group, end))
            offset = group if self._pieces is None else 0
            yield from self._parquet.iter_batches(
                _batch_rows(self._parquet.metadata),
                row_groups=range(offset, self._parquet.num_row_groups),
                columns=self._columns,
                use_threads=False,
            )
            group = end

    def _with_partition(self, batch: RecordBatch) -> RecordBatch:
        for name, value in self._partition.items():
            if name not in batch.schema.names:
                batch = batch.append_column(name, pa.array([value] * batch.num_rows, pa.string()))
        return batch


def _group_starts(metadata: Any, pieces: FooterMap | None) -> npt.NDArray[np.int64]:
    """Rows before each row group, and in all."""
    if pieces is not None:
        return pieces.first_rows
    sizes = [metadata.row_group(idx).num_rows for idx in range(metadata.num_row_groups)]
    return np.cumsum([0, *sizes], dtype=np.int64)


def _batch_rows(metadata: Any) -> int:
    groups = [metadata.row_group(idx) for idx in range(metadata.num_row_groups)]
    row_nbytes = max((g.total_byte_size // max(g.num_rows, 1) for g in groups), default=0)
    return min(MAX_BATCH_ROWS, max(1, BATCH_NBYTES // (row_nbytes + 1)))


# ---- batches -----------------------------------------------------------------------------


def make_batch(batch: RecordBatch, wanted: Wanted) -> InputBatch:
    """Rows as a file has them, as the job wants them: absent columns are null."""
    replaced = ReplacedColumns(batch.num_rows)
    values = row_values(batch, wanted, replaced)
    columns = [_table_column(batch, field, replaced) for field in wanted.table]
    table = pa.record_batch(columns, schema=wanted.table) if columns else batch.select([])
    return InputBatch(table, values, replaced.rows())


def _table_column(batch: RecordBatch, field: pa.Field, replaced: ReplacedColumns) -> pa.Array:
    if field.name not in batch.schema.names:
        return pa.nulls(batch.num_rows, field.type)
    column, bad = repaired_column(batch.column(field.name))
    for row in bad:
        replaced.add(row, field.name)
    return column if column.type.equals(field.type) else column.cast(field.type)


def row_values(batch: RecordBatch, wanted: Wanted, replaced: ReplacedColumns) -> list[RowValues]:
    """The wanted columns of a batch as one dict of Python values for each row.

    Null stays None; structs and maps become dicts; text in binary columns becomes str. In the
    place of a row that has no such values stands its error: `invalid_utf8`, or `invalid_row`.
    """
    names = wanted.values
    if not names:
        return [{} for _ in range(batch.num_rows)]
    replace = replaced if wanted.on_bad_utf8 == "replace" else None
    cells = [_column_values(batch, name, replace) for name in names]
    return [_row(names, row) for row in zip(*cells, strict=True)]


def _row(names: tuple[str, ...], cells: tuple[Any, ...]) -> RowValues:
    for cell in cells:
        if isinstance(cell, RowError):
            return cell
    return dict(zip(names, cells, strict=True))


def _column_values(batch: RecordBatch, name: str, replace: ReplacedColumns | None) -> list[Any]:
    if name not in batch.schema.names:
        return [None] * batch.num_rows
    column = _as_text(batch.column(name))
    try:
        values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
        return values
    except (ValueError, KeyError, ArithmeticError):
        return [_cell(column, row, name, replace) for row in range(len(column))]


def _as_text(column: pa.Array) -> pa.Array:
    """Binary values seen as text, which is checked when it becomes str."""
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_binary(column.type):
        return column.view(pa.string())
    if types.is_large_binary(column.type):
        return column.view(pa.large_string())
    if types.is_binary_view(column.type):
        return column.view(pa.string_view())
    return column


def _cell(column: pa.Array, row: int, name: str, replace: ReplacedColumns | None) -> Any:
    try:
        return column[row].as_py(maps_as_pydicts="strict")
    except UnicodeDecodeError as error:
        if replace is not None:
            replace.add(row, name)
            return repaired_cell(column, row)[0].as_py(maps_as_pydicts="strict")
        return RowError(
            "invalid_utf8",
            f"column {name}: byte 0x{error.object[error.start]:02x} at offset {error.start} is "
            f"not UTF-8 ({error.reason}); --on-bad-utf8 replace runs the row all the same",
        )
    except (ValueError, KeyError, ArithmeticError) as error:
        return RowError("invalid_row", f"column {name}: {error}")
