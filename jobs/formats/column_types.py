"""Types of the columns of JSON lines: what a column held in any row, and one type for all of it.

A column whose values are all of one scalar type has that type: bool, int64 (uint64 where that
holds them), double, string. Whole numbers and others together are double where that loses no
digit. Anything else is text: strings as they are, other values as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import IntFlag
from typing import Any

import pyarrow as pa

from jobs.records import DatasetError, TextColumn

MAX_COLUMNS = 4096
_MAX_EXACT_INT = 1 << 53


class Kind(IntFlag):
    """What was seen in a column; null is seen as nothing."""

    NULL = 0
    BOOL = 1
    INT = 2  # of int64 and exact as a double
    WIDE_INT = 4  # of int64, not exact as a double
    NEGATIVE = 8
    UNSIGNED = 16  # of uint64, not of int64
    HUGE = 32  # whole, of neither
    FLOAT = 64
    TEXT = 128
    NESTED = 256


_SIMPLE: Mapping[type, int] = {
    type(None): Kind.NULL.value,
    bool: Kind.BOOL.value,
    float: Kind.FLOAT.value,
    str: Kind.TEXT.value,
    list: Kind.NESTED.value,
    dict: Kind.NESTED.value,
}
_INTS = Kind.INT | Kind.WIDE_INT | Kind.NEGATIVE


def _kind_of_int(value: int) -> int:
    sign = Kind.NEGATIVE if value < 0 else Kind.NULL
    if abs(value) <= _MAX_EXACT_INT:
        return (Kind.INT | sign).value
    if -(1 << 63) <= value < 1 << 63:
        return (Kind.WIDE_INT | sign).value
    return (Kind.UNSIGNED if 0 < value < 1 << 64 else Kind.HUGE).value


class SeenColumns:
    """Columns in the order in which they first came, with all kinds of value seen in each."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._kinds: dict[str, int] = dict.fromkeys(names, 0)

    def add(self, values: Mapping[str, Any]) -> None:
        """Take a row. Raises DatasetError: there are too many columns by now."""
        kinds = self._kinds
        for name, value in values.items():
            kind = _SIMPLE.get(type(value))
            if kind is None:
                kind = _kind_of_int(value)
            kinds[name] = kinds.get(name, 0) | kind
        if len(kinds) > MAX_COLUMNS:
            raise DatasetError(
                f"the rows have more than {MAX_COLUMNS} different keys, the last is "
                f"{next(reversed(kinds))!r}; put keys that vary into one nested object"
            )

    def columns(self) -> tuple[TextColumn, ...]:
        return tuple(_column(name, Kind(kinds)) for name, kinds in self._kinds.items())


def _column(name: str, kinds: Kind) -> TextColumn:
    if kinds in (Kind.NULL, Kind.TEXT):
        return TextColumn(name=name)
    if kinds == Kind.BOOL:
        return TextColumn(name=name, type="bool")
    if not kinds & ~_INTS:
        return TextColumn(name=name, type="int64")
    if not kinds & ~(_INTS | Kind.UNSIGNED) and not kinds & Kind.NEGATIVE:
        return TextColumn(name=name, type="uint64")
    if not kinds & ~(Kind.FLOAT | Kind.INT | Kind.NEGATIVE):
        return TextColumn(name=name, type="double")
    return TextColumn(name=name, is_json=bool(kinds & Kind.NESTED))


def arrow_type(column: TextColumn) -> pa.DataType:
    return pa.type_for_alias(column.type)


def to_arrow(values: Sequence[Any], data_type: pa.DataType) -> pa.Array:
    """Values of one column as its type; where that is text, what is no string is written as JSON.

    Raises pyarrow.ArrowInvalid: a value is not of the type.
    """
    if data_type == pa.string():
        values = [value if value is None else as_text(value) for value in values]
    return pa.array(values, data_type)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
