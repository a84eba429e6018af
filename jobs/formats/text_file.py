"""Text files of either format as batches of rows, beginning at the places of an index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from engine import RowError
from jobs.files import open_file
from jobs.formats.base import BATCH_NBYTES, MAX_BATCH_ROWS, InputBatch, RowValues, Wanted
from jobs.formats.column_types import to_arrow
from jobs.formats.records import Place, Record
from jobs.records import DatasetError, InputFile

INDEX_ROWS = 512  # a place where reading can begin comes every so many rows

ReadRecords = Callable[[BinaryIO, Place], Iterator[Record]]


class TextReader:
    """One text file in reading.

    read_records: cuts the file into records, from a place on
    places: (n, 2) int64, offset and line of every INDEX_ROWS-th row of this file
    """

    def __init__(
        self,
        info: InputFile,
        wanted: Wanted,
        partition: Mapping[str, str | None],
        *,
        read_records: ReadRecords,
        places: npt.NDArray[np.int64],
    ) -> None:
        self.info = info
        self._wanted = wanted
        self._partition = partition
        self._read_records = read_records
        self._places = places
        self._source = open_file(info.path)

    def close(self) -> None:
        self._source.close()

    def start_before(self, row: int) -> int:
        return row // INDEX_ROWS * INDEX_ROWS

    def batches(self, start: int) -> Iterator[InputBatch]:
        offset, line = self._places[start // INDEX_ROWS].tolist()
        pending: list[Record] = []
        nbytes = 0
        for record in self._read_records(self._source, Place(offset, line)):
            pending.append(record)
            nbytes += record.nbytes
            if len(pending) == MAX_BATCH_ROWS or nbytes >= BATCH_NBYTES:
                yield self._batch(pending)
                pending, nbytes = [], 0
        if pending:
            yield self._batch(pending)

    def _batch(self, records: Sequence[Record]) -> InputBatch:
        rows = [{**self._partition, **record.values} for record in records]
        columns = [
            self._column(field, [row.get(field.name) for row in rows])
            for field in self._wanted.table
        ]
        return InputBatch(
            table=pa.record_batch(columns, schema=self._wanted.table),
            values=[self._values(*pair) for pair in zip(records, rows, strict=True)],
            replaced=[self._replaced(record) for record in records],
        )

    def _column(self, field: pa.Field, values: list[Any]) -> pa.Array:
        try:
            return to_arrow(values, field.type)
        except (pa.ArrowException, OverflowError) as error:
            raise DatasetError(
                f"input file {self.info.path}: column {field.name!r} is not the {field.type} that "
                f"it was when its rows were counted: {error}; submit a new job"
            ) from error

    def _values(self, record: Record, row: Mapping[str, Any]) -> RowValues:
        if record.error is not None:
            return RowError(record.error.code, str(record.error))
        if self._is_refused(record):
            advice = "--on-bad-utf8 replace runs the row all the same"
            return RowError("invalid_utf8", f"{record.bad_text}; {advice}")
        return {name: row.get(name) for name in self._wanted.values}

    def _is_refused(self, record: Record) -> bool:
        """What the row needs to run is bad, and is not to be replaced."""
        bad = set(record.repaired).intersection(self._wanted.values)
        return bool(bad) and self._wanted.on_bad_utf8 == "error"

    def _replaced(self, record: Record) -> tuple[str, ...]:
        used = set(self._wanted.table.names)
        if not self._is_refused(record):
            used.update(self._wanted.values)
        return tuple(name for name in record.repaired if name in used)
