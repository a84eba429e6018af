"""What every kind of input file gives: batches of rows, as columns and as Python values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import pyarrow as pa

from engine import RowError
from jobs.records import InputFile

Schema: TypeAlias = pa.Schema
RecordBatch: TypeAlias = pa.RecordBatch
RowValues: TypeAlias = dict[str, Any] | RowError
OnBadUtf8 = Literal["error", "replace"]

BATCH_NBYTES = 8 << 20
MAX_BATCH_ROWS = 256


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a job wants of each row.

    table: columns as they go to the results, in that order, partition columns among them
    values: names of columns that are wanted as Python values
    """

    table: Schema
    values: tuple[str, ...] = ()
    on_bad_utf8: OnBadUtf8 = "error"


@dataclass(frozen=True, slots=True)
class InputBatch:
    """Consecutive rows.

    table: wanted columns; all text in them is UTF-8
    values: for each row its wanted values by name, or why it has none
    replaced: for each row the columns in which bytes that are not UTF-8 were replaced
    """

    table: RecordBatch
    values: Sequence[RowValues]
    replaced: Sequence[tuple[str, ...]]

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def slice(self, offset: int, length: int | None = None) -> InputBatch:
        end = None if length is None else offset + length
        return InputBatch(
            table=self.table.slice(offset, length),
            values=self.values[offset:end],
            replaced=self.replaced[offset:end],
        )


class FileReader(Protocol):
    """One input file in reading."""

    info: InputFile

    def start_before(self, row: int) -> int:
        """The last row up to `row` at which reading can begin. Rows are those of this file."""
        ...

    def batches(self, start: int) -> Iterator[InputBatch]:
        """All rows from `start` on, which `start_before` gave."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class ReplacedColumns:
    """Collects, row by row, the columns in which something was replaced."""

    num_rows: int
    by_row: dict[int, list[str]] = field(default_factory=dict)

    def add(self, row: int, name: str) -> None:
        names = self.by_row.setdefault(row, [])
        if name not in names:
            names.append(name)

    def rows(self) -> list[tuple[str, ...]]:
        return [tuple(self.by_row.get(row, ())) for row in range(self.num_rows)]


def batch_of_nulls(schema: Schema, num_rows: int) -> RecordBatch:
    return pa.record_batch([pa.nulls(num_rows, field.type) for field in schema], schema=schema)
