"""Records of text files: their place in the file, and lines of bounded length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from engine import RowError

MAX_ROW_NBYTES = 64 << 20
UTF8_BOM = b"\xef\xbb\xbf"


class Place(NamedTuple):
    """Where a record begins. offset: bytes before it; line: its first line, from 1"""

    offset: int
    line: int


FILE_START = Place(0, 1)


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a text file.

    values: by column name; for JSON lines whatever JSON has, for CSV text; what could be read
        where there is an error
    error: why the row cannot run
    repaired: columns of which bad text was replaced in `values`; bad_text: what was bad
    """

    place: Place
    nbytes: int
    values: dict[str, Any]
    error: RowError | None = None
    repaired: tuple[str, ...] = ()
    bad_text: str = ""


def read_lines(source: BinaryIO, start: Place) -> Iterator[tuple[Place, bytes]]:
    """Lines with their ends; the first may begin with a byte order mark.

    A line of more than MAX_ROW_NBYTES comes as its first MAX_ROW_NBYTES + 1 bytes.
    """
    offset, line = start
    source.seek(offset)
    while data := source.readline(MAX_ROW_NBYTES + 1):
        nbytes = len(data)
        if nbytes > MAX_ROW_NBYTES:
            nbytes += _skip_line(source, data)
        yield Place(offset, line), data
        offset, line = offset + nbytes, line + 1


def _skip_line(source: BinaryIO, data: bytes) -> int:
    """Pass over what is left of a line; returns its bytes."""
    skipped = 0
    while not data.endswith(b"\n") and (data := source.readline(MAX_ROW_NBYTES)):
        skipped += len(data)
    return skipped


def without_mark(place: Place, data: bytes) -> tuple[Place, bytes]:
    """The place and bytes of a line, a byte order mark at the file's start left out."""
    if place.offset == 0 and data.startswith(UTF8_BOM):
        return Place(len(UTF8_BOM), place.line), data[len(UTF8_BOM) :]
    return place, data


def describe_bad_byte(error: UnicodeDecodeError, place: Place) -> str:
    """The byte that could not be decoded, by value and place.

    place: of what was decoded
    """
    line = place.line + error.object[: error.start].count(b"\n")
    byte = error.object[error.start]
    return f"byte 0x{byte:02x} at offset {place.offset + error.start} (line {line})"
