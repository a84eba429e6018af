"""Large Parquet footers, read in pieces.

Arrow keeps about 1.2 KB for each column of each row group of an open file: 100 MB for 40,000 groups
of two columns. So a large footer is cut up where its row groups begin, and a file is opened with a
footer that has a window of them only. Thrift's compact protocol is walked over, not decoded:
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

import io
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jobs.files import FileState, file_state, open_unbuffered

LARGE_NBYTES = 2 << 20
WINDOW_NBYTES = 1 << 20
_MAGIC = b"PAR1"
_TRAILER_NBYTES = 8  # the footer's length and the magic
_ROW_GROUPS, _NUM_ROWS = 4, 3  # field numbers in FileMetaData and in RowGroup

# Types of the compact protocol. 1 and 2 are booleans, whose value is in the type.
_BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 3, 4, 5, 6, 7, 8, 9, 10, 12


@dataclass(frozen=True, slots=True)
class FooterMap:
    """Where the pieces of a footer are. Offsets are within it, but for `begin`.

    begin: of the footer in the file
    nbytes: of the footer
    list_begin: of the header of the list of row groups
    groups: (n + 1,) int64, where each row group begins, and where the last one ends
    first_rows: (n + 1,) int64, rows before each row group, and in all
    """

    begin: int
    nbytes: int
    list_begin: int
    groups: npt.NDArray[np.int64]
    first_rows: npt.NDArray[np.int64]

    @property
    def num_groups(self) -> int:
        return len(self.groups) - 1

    def window_after(self, group: int) -> int:
        """The end of the window of row groups that begins at `group`."""
        end = int(np.searchsorted(self.groups, self.groups[group] + WINDOW_NBYTES, "right")) - 1
        return min(max(end, group + 1), self.num_groups)


def map_footer(path: str | Path) -> FooterMap | None:
    """The pieces of a large footer; None for one that Arrow may as well read whole.

    Raises OSError, StorageError: the file cannot be read.
    """
    return _map_footer(str(path), file_state(str(path)))


@lru_cache(maxsize=4)
def _map_footer(path: str, state: FileState) -> FooterMap | None:
    file_nbytes = state.nbytes
    with open_unbuffered(path) as source:
        source.seek(max(0, file_nbytes - _TRAILER_NBYTES))
        trailer = source.read(_TRAILER_NBYTES) or b""
        nbytes = int.from_bytes(trailer[:4], "little")
        begin = file_nbytes - _TRAILER_NBYTES - nbytes
        if trailer[4:] != _MAGIC or nbytes < LARGE_NBYTES or begin < 0:
            return None
        source.seek(begin)
        footer = source.read(nbytes) or b""
    try:
        return _cut(footer, begin)
    except (IndexError, ValueError):
        return None  # Arrow will say what is wrong with it


def _cut(footer: bytes, begin: int) -> FooterMap | None:
    groups, first_rows, list_begin = array("q"), array("q", [0]), 0

    def visit(field: int, position: int) -> None:
        nonlocal list_begin
        if field != _ROW_GROUPS:
            return
        list_begin = position
        count, _, position = _list_header(footer, position)
        for _ in range(count):
            groups.append(position)
            position = _skip_struct(footer, position, take_rows)
        groups.append(position)

    def take_rows(field: int, position: int) -> None:
        if field == _NUM_ROWS:
            zigzag, _ = _varint(footer, position)
            first_rows.append(first_rows[-1] + (zigzag >> 1))

    end = _skip_struct(footer, 0, visit)
    if end != len(footer) or len(groups) < 2 or len(groups) != len(first_rows):
        return None
    return FooterMap(
        begin, end, list_begin, np.array(groups, np.int64), np.array(first_rows, np.int64)
    )


# ---- walking over the compact protocol ---------------------------------------------------


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position


def _list_header(data: bytes, position: int) -> tuple[int, int, int]:
    """(number of items, their type, where they begin)"""
    header = data[position]
    count, position = header >> 4, position + 1
    if count == 15:
        count, position = _varint(data, position)
    return count, header & 15, position


def _skip_struct(
    data: bytes, position: int, visit: Callable[[int, int], None] | None = None
) -> int:
    """The end of a struct. visit: called with the number and the place of each of its fields"""
    field = 0
    while header := data[position]:
        position += 1
        if header >> 4:
            field += header >> 4
        else:
            zigzag, position = _varint(data, position)
            field = zigzag >> 1
        if visit is not None:
            visit(field, position)
        kind = header & 15
        if kind > 2:
            position = _skip_value(data, position, kind)
    return position + 1


def _skip_value(data: bytes, position: int, kind: int) -> int:
    if _I16 <= kind <= _I64:
        while data[position] & 128:
            position += 1
        return position + 1
    if kind == _BINARY:
        nbytes, position = _varint(data, position)
        return position + nbytes
    if kind == _STRUCT:
        return _skip_struct(data, position)
    if kind in (_LIST, _SET):
        count, item, position = _list_header(data, position)
        for _ in range(count):
            position = _skip_value(data, position, item)
        return position
    if kind in (1, 2, _BYTE):
        return position + 1
    if kind == _DOUBLE:
        return position + 8
    raise ValueError(f"a footer has no values of type {kind}")


# ---- a file with a smaller footer --------------------------------------------------------


class WindowedFile(io.RawIOBase):
    """A Parquet file whose footer has the row groups [begin, end) only."""

    def __init__(self, path: str | Path, footer: FooterMap, begin: int, end: int) -> None:
        super().__init__()
        self._source = open_unbuffered(str(path))
        self._prefix_nbytes = footer.begin
        self._footer = self._make_footer(footer, begin, end)
        self._position = 0

    def _make_footer(self, footer: FooterMap, begin: int, end: int) -> bytes:
        def piece(first: int, last: int) -> bytes:
            return self._read_at(last - first, footer.begin + first)

        window = piece(int(footer.groups[begin]), int(footer.groups[end]))
        tail = piece(int(footer.groups[-1]), footer.nbytes)
        made = piece(0, footer.list_begin) + _struct_list(end - begin) + window + tail
        return made + len(made).to_bytes(4, "little") + _MAGIC

    def _read_at(self, nbytes: int, offset: int) -> bytes:
        self._source.seek(offset)
        return self._source.read(nbytes) or b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        bases = {
            os.SEEK_SET: 0,
            os.SEEK_CUR: self._position,
            os.SEEK_END: self._prefix_nbytes + len(self._footer),
        }
        self._position = bases[whence] + offset
        return self._position

    def read(self, nbytes: int | None = -1) -> bytes:
        left = max(0, self._prefix_nbytes + len(self._footer) - self._position)
        wanted = left if nbytes is None or nbytes < 0 else min(nbytes, left)
        here = min(wanted, max(0, self._prefix_nbytes - self._position))
        data = self._read_at(here, self._position)
        if len(data) == here:
            first = self._position + here - self._prefix_nbytes
            data += self._footer[first : first + wanted - here]
        self._position += len(data)
        return data

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()


def _struct_list(count: int) -> bytes:
    """The header of a list of structs."""
    if count < 15:
        return bytes([count << 4 | _STRUCT])
    header = bytearray([15 << 4 | _STRUCT])
    while count > 127:
        header.append(count & 127 | 128)
        count >>= 7
    header.append(count)
    return bytes(header)
