"""JSON lines: one object per line, each judged alone; a line that is none is an error row."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import starmap
from typing import Any, BinaryIO, NoReturn

from engine import RowError
from jobs.formats.records import (
    FILE_START,
    MAX_ROW_NBYTES,
    Place,
    Record,
    describe_bad_byte,
    read_lines,
    without_mark,
)
from jobs.formats.utf8 import repair_values

# Only an escape can bring in half of a surrogate pair.
_MAYBE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_records(source: BinaryIO, start: Place = FILE_START) -> Iterator[Record]:
    """The records of a file from a record's place on; blank lines are none."""
    for place, line in starmap(without_mark, read_lines(source, start)):
        if line.strip():
            yield parse_line(line, place)


def parse_line(line: bytes, place: Place) -> Record:
    """One line as a record; what is wrong with it becomes the record's error."""
    nbytes, bad_text = len(line), ""
    if nbytes > MAX_ROW_NBYTES:
        message = f"line {place.line} is longer than {MAX_ROW_NBYTES >> 20} MiB"
        return Record(place, nbytes, {}, RowError("invalid_row", message))
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        text = line.decode(errors="surrogateescape")
        bad_text = f"{describe_bad_byte(error, place)} is not UTF-8"
    values = _parse_object(text, place)
    if isinstance(values, RowError):
        return Record(place, nbytes, {}, values)
    if not bad_text and not _MAYBE_SURROGATE.search(text):
        return Record(place, nbytes, values)
    values, repaired = repair_values(values)
    bad_text = bad_text or f"line {place.line} has half of a surrogate pair (\\ud800 to \\udfff)"
    return Record(place, nbytes, values, None, repaired, bad_text)


def _parse_object(text: str, place: Place) -> dict[str, Any] | RowError:
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        # Its own text counts lines inside this one line.
        why = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        return RowError("invalid_row", f"line {place.line} is not JSON: {why}")
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
