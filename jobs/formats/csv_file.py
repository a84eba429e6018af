"""CSV: a header, then rows of text. A field may span lines, and every value stays text.

Fields may be in double quotes, a quote inside them doubled. Any encoding will do in which the
bytes below 128 are those of ASCII wherever they stand.
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator
from typing import BinaryIO

from engine import RowError
from jobs.files import open_file
from jobs.formats.base import OnBadUtf8
from jobs.formats.records import (
    FILE_START,
    MAX_ROW_NBYTES,
    UTF8_BOM,
    Place,
    Record,
    describe_bad_byte,
    read_lines,
    without_mark,
)
from jobs.formats.utf8 import repair_values, without_surrogates
from jobs.records import DatasetError, SpecError

DELIMITERS = (",", ";", "\t")
NAMES_OF_DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", " ": "space"}
SNIFF_NBYTES = 64 << 10
SNIFF_ROWS = 20
_STATEFUL = ("iso2022", "utf_7", "hz")

csv.field_size_limit(MAX_ROW_NBYTES)


class CsvFormat:
    """How a job's CSV files are written."""

    def __init__(self, encoding: str, delimiter: str, on_bad_utf8: OnBadUtf8) -> None:
        self.encoding = encoding
        self.delimiter = delimiter
        self.on_bad_utf8 = on_bad_utf8

    def read_header(self, source: BinaryIO, path: str) -> tuple[list[str], Place]:
        """The names of the columns, and where the first row begins.

        A column without a name gets `column_N`, N its number from 1.

        Raises DatasetError: there is none, it cannot be decoded, or a name is there twice.
        """
        rows = _Rows(source, path, FILE_START, self)
        for _, fields in rows:
            if isinstance(fields, RowError):
                raise DatasetError(f"input file {path}: its header cannot be read: {fields}")
            named = [name or f"column_{number}" for number, name in enumerate(fields, 1)]
            names = [without_surrogates(name) for name in named]
            _refuse_double_names(names, path)
            return names, rows.place
        raise DatasetError(f"input file {path} has no header: its first row names the columns")

    def read_records(
        self, source: BinaryIO, path: str, names: list[str], start: Place
    ) -> Iterator[Record]:
        """The records of a file from a record's place on.

        Raises DatasetError: a byte cannot be decoded and is not to be replaced.
        """
        rows = _Rows(source, path, start, self)
        for place, fields in rows:
            nbytes = rows.place.offset - place.offset
            if isinstance(fields, RowError):
                yield Record(place, nbytes, {}, fields)
            elif len(fields) != len(names):
                yield Record(place, nbytes, {}, _wrong_width(place, len(fields), len(names)))
            else:
                values = dict(zip(names, fields, strict=True))
                repaired: tuple[str, ...] = ()
                if rows.is_bad:
                    values, repaired = repair_values(values)
                yield Record(place, nbytes, values, None, repaired)


class _Rows:
    """Rows of fields, with their places, as the csv module cuts them out of the lines.

    place: where the next row begins
    is_bad: the row that came last has surrogates in the place of bytes that are to be replaced
    """

    def __init__(self, source: BinaryIO, path: str, start: Place, form: CsvFormat) -> None:
        self.place = start
        self.is_bad = False
        self._path = path
        self._form = form
        self._row_begin = start
        lines = self._decoded(read_lines(source, start))
        self._reader = csv.reader(lines, delimiter=form.delimiter, strict=True)

    def __iter__(self) -> Iterator[tuple[Place, list[str] | RowError]]:
        while True:
            self._row_begin, self.is_bad = self.place, False
            try:
                fields = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                message = f"line {self._row_begin.line} is not CSV: {error}"
                yield self._row_begin, RowError("invalid_row", message)
                continue
            if fields:  # a blank line has none
                yield self._row_begin, fields

    def _decoded(self, lines: Iterator[tuple[Place, bytes]]) -> Iterator[str]:
        for place, line in lines:
            self.place = Place(place.offset + len(line), place.line + 1)
            if self.place.offset - self._row_begin.offset > MAX_ROW_NBYTES:
                raise DatasetError(
                    f"input file {self._path}: the row that begins in line "
                    f"{self._row_begin.line} has more than {MAX_ROW_NBYTES >> 20} MiB; is a "
                    "quote not closed there?"
                )
            yield self._decode(*without_mark(place, line))

    def _decode(self, place: Place, line: bytes) -> str:
        form = self._form
        try:
            return line.decode(form.encoding)
        except UnicodeDecodeError as error:
            if form.on_bad_utf8 == "replace":
                self.is_bad = True
                return line.decode(form.encoding, "surrogateescape")
            raise DatasetError(
                f"input file {self._path}: {describe_bad_byte(error, place)} is not "
                f"{form.encoding}; name the file's encoding with --encoding, for instance cp1252, "
                "or replace what is bad with --on-bad-utf8 replace"
            ) from error


def _refuse_double_names(names: list[str], path: str) -> None:
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise DatasetError(f"input file {path} has more than one column named {double!r}")


def _wrong_width(place: Place, found: int, wanted: int) -> RowError:
    return RowError(
        "invalid_row",
        f"the row in line {place.line} has {found} {'field' if found == 1 else 'fields'}, the "
        f"header has {wanted}",
    )


# ---- how it is written -------------------------------------------------------------------


def check_encoding(name: str) -> str:
    """The encoding's own name. Raises SpecError: Python does not know it, or it will not do."""
    try:
        found = codecs.lookup(name).name
        plain = bytes(range(128)).decode(found) == "".join(map(chr, range(128)))
    except (LookupError, UnicodeDecodeError):
        plain, found = False, name
    if not plain or found.startswith(_STATEFUL):
        raise SpecError(
            f"encoding {name!r} is not known, or not one in which ASCII stands for itself, such "
            f"as utf-8 or cp1252; convert the file with `iconv -f {name} -t utf-8`"
        )
    return "utf-8" if found == "utf-8-sig" else found


def check_delimiter(text: str) -> str:
    """The character that a person named. Raises SpecError."""
    words = {name: delimiter for delimiter, name in NAMES_OF_DELIMITERS.items()}
    chosen = (words | {"\\t": "\t"}).get(text, text)
    if len(chosen) != 1 or not chosen.isascii() or chosen in '"\r\n\0':
        raise SpecError(f"delimiter is one ASCII character, or tab, not {text!r}")
    return chosen


def name_of(delimiter: str) -> str:
    return NAMES_OF_DELIMITERS.get(delimiter, delimiter)


def find_delimiter(path: str, encoding: str) -> str:
    """The delimiter that cuts the first rows into the most fields, evenly; else a comma."""
    with open_file(path) as source:
        head = source.read(SNIFF_NBYTES)
    _refuse_utf16(head, path)
    text = head.removeprefix(UTF8_BOM).decode(encoding, "replace")
    lines = list(io.StringIO(text, newline="\n"))
    if len(head) == SNIFF_NBYTES:
        del lines[-1:]
    return max(DELIMITERS, key=lambda delimiter: _fit(lines, delimiter))


def _refuse_utf16(head: bytes, path: str) -> None:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DatasetError(
            f"input file {path} is UTF-16; save it as UTF-8, or convert it with "
            f"`iconv -f utf-16 -t utf-8`"
        )


def _fit(lines: list[str], delimiter: str) -> tuple[float, int]:
    """(share of rows as wide as the header, width), better ones larger; nothing for width 1."""
    widths: list[int] = []
    try:
        for row in csv.reader(lines, delimiter=delimiter, strict=True):
            if row:
                widths.append(len(row))
            if len(widths) == SNIFF_ROWS:
                break
    except csv.Error:
        pass  # the rows before it count
    if not widths or widths[0] == 1:
        return 0.0, 0
    return widths.count(widths[0]) / len(widths), widths[0]
