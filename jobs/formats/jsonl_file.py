"""JSON lines: one object per line, each judged alone; a line that is none is an error row."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import starmap
from typing import Any, BinaryIO, NoReturn

from engine import RowError
from jobs.formats.base import OnBadUtf8
from jobs.formats.records import (
    FILE_START,
    MAX_ROW_NBYTES,
    Place,
    Record,
    describe_bad_byte,
    read_lines,
    without_mark,
)
from jobs.formats.utf8 import without_surrogates


def read_records(
    source: BinaryIO, on_bad_utf8: OnBadUtf8, start: Place = FILE_START
) -> Iterator[Record]:
    """The records of a file from a record's place on; blank lines are none."""
    for place, line in starmap(without_mark, read_lines(source, start)):
        if line.strip():
            yield parse_line(line, place, on_bad_utf8)


def parse_line(line: bytes, place: Place, on_bad_utf8: OnBadUtf8) -> Record:
    """One line as a record; what is wrong with it becomes the record's error."""
    nbytes = len(line)
    if nbytes > MAX_ROW_NBYTES:
        message = f"line {place.line} is longer than {MAX_ROW_NBYTES >> 20} MiB"
        return Record(place, nbytes, {}, RowError("invalid_row", message))
    error: RowError | None = None
    is_repaired = False
    try:
        text = line.decode()
    except UnicodeDecodeError as bad:
        text, is_repaired = line.decode(errors="replace"), True
        if on_bad_utf8 == "error":
            error = _utf8_error(bad, place)
    values = _parse_object(text, place)
    if isinstance(values, RowError):
        return Record(place, nbytes, {}, values)
    # Only an escape can bring in a surrogate without its other half.
    if "\\u" in text and (whole := without_surrogates(values)) != values:
        if on_bad_utf8 == "error":
            message = f"line {place.line} has half of a surrogate pair (\\ud800 to \\udfff)"
            error = RowError("invalid_utf8", message)
        values, is_repaired = whole, True
    return Record(place, nbytes, values, error, is_repaired)


def _utf8_error(error: UnicodeDecodeError, place: Place) -> RowError:
    return RowError(
        "invalid_utf8",
        f"{describe_bad_byte(error, place)} is not UTF-8; --on-bad-utf8 replace runs the row all "
        "the same",
    )


def _parse_object(text: str, place: Place) -> dict[str, Any] | RowError:
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        return RowError("invalid_row", f"line {place.line} is not JSON: {error}")
    if isinstance(value, dict):
        return value
    kind = "null" if value is None else f"a {type(value).__name__}"
    return RowError("invalid_row", f"line {place.line} holds {kind}, not a JSON object")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large a number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
