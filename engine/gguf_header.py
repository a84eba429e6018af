"""Parse the header of one GGUF file, within bounds whatever its bytes say.

Counts and lengths are checked against the bytes that are left before anything is allocated or
looped over; arrays are skipped, their place is noted. Format: docs/gguf.md of ggml.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from engine.requests import GgufError

Scalar = int | float | bool

STRING, ARRAY = 8, 9
SCALAR_FORMATS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ARRAY_ITEMS = 1 << 22  # of all arrays together; the largest known vocabularies have 1.3 M
MAX_NAME_NBYTES = 1 << 16
MAX_VALUE_NBYTES = 1 << 28
MAX_DIMENSIONS = 4
WINDOW_NBYTES = 1 << 20
MIN_KEY_NBYTES = 8 + 1 + 4 + 1
MIN_TENSOR_NBYTES = 8 + 1 + 4 + 8 + 4 + 8

DOWNLOAD_HINT = "download the file again"
FOREIGN_HEADS = (
    (b"version https://git-lfs", "a git-lfs pointer, not the model: run `git lfs pull`"),
    (b"<", "an HTML or XML page, not a model: download the file itself, not its web page"),
    (b"{", "JSON text, perhaps an error message of a server, not a model"),
    (b"PK\x03\x04", "a zip archive (perhaps a PyTorch checkpoint), not a GGUF file"),
    (b"\x1f\x8b", "gzip-compressed: unpack it first"),
    (b"\xfd7zXZ", "xz-compressed: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed: unpack it first"),
    (b"lmgg", "a GGML file, older than GGUF: convert it with llama.cpp"),
    (b"fmgg", "a GGMF file, older than GGUF: convert it with llama.cpp"),
    (b"tjgg", "a GGJT file, older than GGUF: convert it with llama.cpp"),
    (b"\0\0\0\0", f"zeros at its start: an incomplete download; {DOWNLOAD_HINT}"),
)


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What identifies a file's content without reading it."""

    nbytes: int
    mtime_ns: int
    inode: int

    @staticmethod
    def of(status: os.stat_result) -> FileStamp:
        return FileStamp(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class Value:
    """A metadata value: a scalar, or the place [offset, offset + nbytes) of its bytes.

    kind: value type of the format; item_kind and count are those of an array's items
    """

    kind: int
    offset: int
    nbytes: int
    scalar: Scalar | None = None
    item_kind: int = -1
    count: int = 0


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as the header lists it; dims: innermost first; offset: from the data's start."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    path: Path
    stamp: FileStamp
    version: int
    values: dict[str, Value]
    tensors: list[TensorEntry]
    nbytes: int  # of the header: its end in the file

    def int_value(self, key: str, *, default: int) -> int:
        value = self.values.get(key)
        if value is None:
            return default
        if type(value.scalar) is not int:
            raise GgufError(f"{self.path}: metadata key {key!r} must be an integer: damaged")
        return value.scalar


class HeaderCursor:
    """Reads a file forwards through a small window; never past the file's end."""

    def __init__(self, path: Path, fd: int, nbytes: int) -> None:
        self.path = path
        self.offset = 0
        self.nbytes = nbytes
        self._fd = fd
        self._window = b""
        self._window_offset = 0

    def require(self, nbytes: int, what: str) -> None:
        """Raise GgufError unless so many bytes are left."""
        if nbytes > self.nbytes - self.offset:
            raise GgufError(
                f"{self.path}: {what} at byte {self.offset} needs {nbytes} bytes, but the file "
                f"ends at {self.nbytes}: damaged, or an incomplete download; {DOWNLOAD_HINT}"
            )

    def take(self, nbytes: int, what: str) -> bytes:
        self.require(nbytes, what)
        at = self.offset - self._window_offset
        if not 0 <= at <= len(self._window) - nbytes:
            self._load(max(nbytes, WINDOW_NBYTES))
            at = 0
        self.offset += nbytes
        return self._window[at : at + nbytes]

    def skip(self, nbytes: int, what: str) -> None:
        self.require(nbytes, what)
        self.offset += nbytes

    def scalar(self, kind: int, what: str) -> Scalar:
        layout = SCALAR_FORMATS[kind]
        (value,) = struct.unpack(layout, self.take(struct.calcsize(layout), what))
        assert isinstance(value, Scalar)
        return value

    def u32(self, what: str) -> int:
        return int(self.scalar(4, what))

    def u64(self, what: str) -> int:
        return int(self.scalar(10, what))

    def name(self, what: str) -> str:
        """A key or a tensor name."""
        begin = self.offset
        nbytes = self.u64(what)
        self.require(nbytes, what)
        if not 0 < nbytes <= MAX_NAME_NBYTES:
            raise GgufError(f"{self.path}: {what} at byte {begin} has {nbytes} bytes: damaged")
        try:
            return self.take(nbytes, what).decode()
        except UnicodeDecodeError as error:
            raise GgufError(f"{self.path}: {what} at byte {begin} is not UTF-8: damaged") from error

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings; a tight loop, since vocabularies have 400,000."""
        length_at = struct.Struct("<Q").unpack_from
        done = 0
        while done < count:
            self.take(8, what)
            window, at = self._window, self.offset - 8 - self._window_offset
            last = len(window) - 8
            while done < count and at <= last:
                at += 8 + length_at(window, at)[0]
                done += 1
            self.offset = self._window_offset
            self.skip(at, what)

    def _load(self, nbytes: int) -> None:
        wanted = min(nbytes, self.nbytes - self.offset)
        self._window = os.pread(self._fd, wanted, self.offset)
        self._window_offset = self.offset
        if len(self._window) < wanted:
            raise GgufError(
                f"{self.path}: read {len(self._window)} of {wanted} bytes at {self.offset}; "
                "the file became shorter while it was read"
            )


def read_header(path: Path) -> Header:
    """Raises GgufError: no such file, another format, another version, or a damaged header."""
    try:
        fd = open_regular(path)
    except OSError as error:
        raise GgufError(f"{path}: {error.strerror}; give the path of a .gguf file") from error
    try:
        return _parse(path, fd)
    finally:
        os.close(fd)


def open_regular(path: Path) -> int:
    """A descriptor for reading. A FIFO or device, which could block, is refused."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(0, "not a regular file")
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def read_extent(path: Path, stamp: FileStamp, offset: int, nbytes: int) -> bytes:
    """Bytes of a file that must be the one whose header was read. Raises GgufError."""
    try:
        fd = open_regular(path)
    except OSError as error:
        raise GgufError(f"{path}: {error.strerror}") from error
    try:
        now = FileStamp.of(os.fstat(fd))
        data = os.pread(fd, nbytes, offset) if now == stamp else b""
    finally:
        os.close(fd)
    if len(data) < nbytes:
        raise GgufError(f"{path}: changed since it was opened ({stamp} then, {now} now)")
    return data


def _parse(path: Path, fd: int) -> Header:
    stamp = FileStamp.of(os.fstat(fd))
    cursor = HeaderCursor(path, fd, stamp.nbytes)
    version = _read_version(cursor)
    num_tensors = cursor.u64("the number of tensors")
    num_keys = cursor.u64("the number of metadata keys")
    _check_count(cursor, num_keys, MAX_KEYS, MIN_KEY_NBYTES, "metadata keys")
    _check_count(cursor, num_tensors, MAX_TENSORS, MIN_TENSOR_NBYTES, "tensors")
    values = _read_values(cursor, num_keys)
    tensors = [_read_tensor(cursor) for _ in range(num_tensors)]
    return Header(path, stamp, version, values, tensors, cursor.offset)


def _read_version(cursor: HeaderCursor) -> int:
    if cursor.nbytes == 0:
        raise GgufError(f"{cursor.path}: 0 bytes; {DOWNLOAD_HINT}")
    head = cursor.take(min(32, cursor.nbytes), "the head")
    if head[:4] != b"GGUF"[: len(head)]:
        what = next((what for magic, what in FOREIGN_HEADS if head.lstrip().startswith(magic)), "")
        raise GgufError(f"{cursor.path}: {what or f'not a GGUF file; it starts with {head[:4]!r}'}")
    cursor.offset = 4
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version:
        raise GgufError(f"{cursor.path}: a big-endian GGUF file; only little-endian ones are read")
    if version not in (2, 3):
        raise GgufError(
            f"{cursor.path}: GGUF version {version}; versions 2 and 3 are read: "
            "convert the model with a current llama.cpp"
        )
    return version


def _check_count(cursor: HeaderCursor, count: int, limit: int, nbytes: int, what: str) -> None:
    left = cursor.nbytes - cursor.offset
    if count * nbytes > left or count > limit:
        raise GgufError(
            f"{cursor.path}: {count} {what} in the {left} bytes after byte {cursor.offset} "
            f"(at most {limit} are read): damaged, or an incomplete download; {DOWNLOAD_HINT}"
        )


def _read_values(cursor: HeaderCursor, num_keys: int) -> dict[str, Value]:
    values: dict[str, Value] = {}
    num_items = 0
    for _ in range(num_keys):
        key = cursor.name("a metadata key")
        if key in values:
            raise GgufError(f"{cursor.path}: metadata key {key!r} occurs twice: damaged")
        value = values[key] = _read_value(cursor, key, MAX_ARRAY_ITEMS - num_items)
        num_items += value.count
        if value.nbytes > MAX_VALUE_NBYTES:
            raise GgufError(
                f"{cursor.path}: the value of {key!r} has {value.nbytes} bytes, more than the "
                f"{MAX_VALUE_NBYTES} that are read: damaged"
            )
    return values


def _read_value(cursor: HeaderCursor, key: str, max_items: int) -> Value:
    kind = cursor.u32(f"the type of {key!r}")
    begin = cursor.offset
    if kind in SCALAR_FORMATS:
        scalar = cursor.scalar(kind, f"the value of {key!r}")
        return Value(kind, begin, cursor.offset - begin, scalar=scalar)
    if kind == STRING:
        nbytes = cursor.u64(f"the value of {key!r}")
        cursor.skip(nbytes, f"the value of {key!r}")
        return Value(kind, begin + 8, nbytes)
    if kind == ARRAY:
        return _skip_array(cursor, key, max_items)
    raise GgufError(f"{cursor.path}: metadata key {key!r} has the unknown value type {kind}")


def _skip_array(cursor: HeaderCursor, key: str, max_items: int) -> Value:
    what = f"the array {key!r}"
    item_kind = cursor.u32(what)
    count = cursor.u64(what)
    begin = cursor.offset
    if item_kind not in SCALAR_FORMATS and item_kind != STRING:
        kind = "arrays" if item_kind == ARRAY else f"the unknown value type {item_kind}"
        raise GgufError(f"{cursor.path}: {what} holds {kind}, which is not supported")
    item_nbytes = 8 if item_kind == STRING else struct.calcsize(SCALAR_FORMATS[item_kind])
    _check_count(cursor, count, max_items, item_nbytes, f"items of {what}")
    if item_kind == STRING:
        cursor.skip_strings(count, what)
    else:
        cursor.skip(count * item_nbytes, what)
    return Value(ARRAY, begin, cursor.offset - begin, item_kind=item_kind, count=count)


def _read_tensor(cursor: HeaderCursor) -> TensorEntry:
    name = cursor.name("a tensor name")
    num_dims = cursor.u32(f"the dimensions of {name!r}")
    if not 1 <= num_dims <= MAX_DIMENSIONS:
        raise GgufError(
            f"{cursor.path}: tensor {name!r} has {num_dims} dimensions; "
            f"1 to {MAX_DIMENSIONS} are possible: damaged"
        )
    dims = tuple(cursor.u64(f"the dimensions of {name!r}") for _ in range(num_dims))
    type_id = cursor.u32(f"the type of {name!r}")
    return TensorEntry(name, dims, type_id, cursor.u64(f"the offset of {name!r}"))


def listed(names: list[str], most: int = 5) -> str:
    """The first names of a list, for a message."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
