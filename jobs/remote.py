"""Files of a store, by URI, through pyarrow's file systems.

What goes wrong comes out as one of two errors that name the URI: `UnreachableError` where the store
does not answer, which may pass, and `StorageError` where it says no.
"""

from __future__ import annotations

import errno
import io
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from glob import has_magic
from mmap import mmap
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa
from pyarrow import fs

from jobs.records import StorageError, UnreachableError
from jobs.uris import Uri, parse_uri

TIMEOUT_S = 5.0  # without a byte
RETRY_S = 6.0  # of what may pass; then whoever asked decides
FIRST_PAUSE_S = 0.25
MAX_CALLS = 16  # at once; each waits for the store
# Here a file appears when its upload is complete; elsewhere it is renamed to its name.
OBJECT_STORES = ("s3", "gcs", "abfs")
Buffer: TypeAlias = bytes | memoryview | mmap
_T = TypeVar("_T")
_I = TypeVar("_I")

_AWS_CODE = re.compile(r"AWS Error (\w+) during")
_MAY_PASS = re.compile(
    r"NETWORK_CONNECTION|SLOW_DOWN|THROTTL|REQUEST_TIMEOUT|INTERNAL_FAILURE|SERVICE_UNAVAILABLE"
    r"|UNAVAILABLE|DEADLINE_EXCEEDED|curlCode|timed? ?out|HTTP (status|response code):? *5\d\d"
    r"|resolve host|Connection (refused|reset)",
    re.IGNORECASE,
)
_NO_BUCKET = re.compile(r"NO_SUCH_BUCKET|bucket does not exist|container does not exist", re.I)
_ELSEWHERE = re.compile(
    r"HTTP status 301|PERMANENT_?REDIRECT|AUTHORIZATION_?HEADER_?MALFORMED", re.I
)
_NO_ACCESS = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN|EXPIRED_TOKEN"
    r"|UNRECOGNIZED_CLIENT|PERMISSION_DENIED|UNAUTHENTICATED|HTTP (status|response code):? *40[13]"
    r"|Forbidden",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """A file or folder of a store. mtime_ns: 0 where the store does not tell"""

    uri: Uri
    is_folder: bool
    nbytes: int = 0
    mtime_ns: int = 0


# ---- the store ---------------------------------------------------------------------------


@lru_cache(maxsize=32)
def _open_store(root: str) -> tuple[fs.FileSystem, str]:
    """The file system, and what its paths begin with."""
    if root.startswith(("gs://", "gcs://")) and "retry_limit_seconds=" not in root:
        root += f"{'&' if '?' in root else '?'}retry_limit_seconds={RETRY_S:g}"
    store, base = fs.FileSystem.from_uri(root)
    if store.type_name == "s3":
        # Its URIs have no words for these. Without them a silent server is waited for without end.
        # Retries are ours. A small object that need not be there before its content is one request.
        rebuild, (options,) = store.__reduce__()
        store = rebuild(
            options
            | {
                "connect_timeout": TIMEOUT_S,
                "request_timeout": TIMEOUT_S,
                "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=1),
                "allow_delayed_open": True,
            }
        )
    return store, base


def locate(uri: Uri) -> tuple[fs.FileSystem, str]:
    """The file system that holds a URI, and its path there.

    Raises StorageError: the store cannot be opened so.
    """
    store, base = _attempt(uri, lambda: _open_store(uri.root))
    return store, f"{base.rstrip('/')}/{uri.path}".rstrip("/")


def _attempt(uri: Uri, work: Callable[[], _T]) -> _T:
    """What a call to the store returns; what may pass is tried again for a while.

    Raises FileNotFoundError, StorageError.
    """
    started, pause_s = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            return work()
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(uri)) from error
        except (OSError, pa.ArrowException) as error:
            fault = explain(uri, error)
            late = time.monotonic() - started + pause_s > RETRY_S
            if late or not isinstance(fault, UnreachableError):
                raise fault from error
        time.sleep(pause_s)
        pause_s *= 2


def explain(uri: Uri, error: Exception) -> StorageError:
    """What a store's refusal means, and what to do."""
    text = " ".join(str(error).split())
    if _NO_BUCKET.search(text):
        return StorageError(
            f"{uri}: there is no bucket {uri.authority}; make it, or correct its name"
        )
    if _NO_ACCESS.search(text):
        code = _AWS_CODE.search(text)
        return StorageError(
            f"{uri}: the store refuses access ({code[1] if code else text}); give credentials that "
            "may read and write there, in the environment (AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE) or as the machine's role; a runner that is "
            "there has those it was started with: `ntx-batch runner stop` ends it"
        )
    if _ELSEWHERE.search(text):
        return StorageError(
            f"{uri}: the store has this bucket in another region: add region=NAME to the options "
            f"of the URI, or set AWS_REGION ({text})"
        )
    if _MAY_PASS.search(text):
        return UnreachableError(
            f"{uri}: the store does not answer: {text}; see whether it is up, and whether "
            "endpoint_override, scheme and region are right"
        )
    return StorageError(f"{uri}: {text}")


def each(work: Callable[[_I], _T], items: Iterable[_I]) -> list[_T]:
    """The results of calls that wait for a store, made several at a time, in order."""
    items = list(items)
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(MAX_CALLS, len(items)), "store") as pool:
        return list(pool.map(work, items))


# ---- reading -----------------------------------------------------------------------------


class RemoteFile(io.RawIOBase):
    """A file of a store, read by ranges.

    Raises FileNotFoundError, StorageError: when it is opened and when it is read.
    """

    def __init__(self, uri: Uri) -> None:
        super().__init__()
        self._uri = uri
        self._position = 0
        store, path = locate(uri)
        self._file: pa.NativeFile = _attempt(uri, lambda: store.open_input_file(path))
        self.nbytes: int = self._file.size()

    @property
    def etag(self) -> str | None:
        """How the store knows these bytes."""
        facts = self._file.metadata() or {}
        found = next((value for name, value in facts.items() if name.lower() == "etag"), None)
        return found.decode(errors="replace") if isinstance(found, bytes) else found

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.nbytes}
        self._position = bases[whence] + offset
        return self._position

    def read(self, nbytes: int | None = -1) -> bytes:
        left = max(0, self.nbytes - self._position)
        wanted = left if nbytes is None or nbytes < 0 else min(nbytes, left)
        if not wanted:
            return b""
        begin = self._position
        data: bytes = _attempt(self._uri, lambda: self._file.read_at(wanted, begin))
        if len(data) != wanted:
            raise StorageError(
                f"{self._uri}: {wanted} bytes at {begin} were asked for, {len(data)} came; it has "
                "changed, or the store is at fault"
            )
        self._position += wanted
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


# ---- looking -----------------------------------------------------------------------------


def look(uri: Uri) -> RemoteEntry | None:
    """What is there. Raises StorageError: also where there is not even the bucket."""
    store, path = locate(uri)
    (info,) = _attempt(uri, lambda: store.get_file_info([path]))
    if info.type != fs.FileType.NotFound:
        return _entry(uri, info)
    _refuse_absent_bucket(uri)
    return None


def _refuse_absent_bucket(uri: Uri) -> None:
    store, base = locate(uri.at(""))
    (info,) = _attempt(uri, lambda: store.get_file_info([base or "/"]))
    if info.type == fs.FileType.NotFound:
        raise StorageError(
            f"{uri}: there is no bucket {uri.authority}; make it, or correct its name"
        )


def _entry(uri: Uri, info: fs.FileInfo) -> RemoteEntry:
    if info.type == fs.FileType.Directory:
        return RemoteEntry(uri, is_folder=True)
    return RemoteEntry(uri, is_folder=False, nbytes=info.size or 0, mtime_ns=info.mtime_ns or 0)


def list_folder(uri: Uri, *, recursive: bool = False) -> list[RemoteEntry]:
    """What is in a folder, or anywhere below it, by name; nothing where it is not there."""
    store, path = locate(uri)
    selector = fs.FileSelector(path, allow_not_found=True, recursive=recursive)
    infos = _attempt(uri, lambda: store.get_file_info(selector))
    prefix = len(path) + 1
    found = [_entry(uri.at(f"{uri.path}/{info.path[prefix:]}"), info) for info in infos]
    return sorted(found, key=lambda entry: entry.uri.parts)


def expand(pattern: Uri) -> Iterator[RemoteEntry]:
    """What matches a pattern whose parts may have `*`, `[…]`, and `**` for any depth."""
    parts = pattern.parts
    fixed = next(number for number, part in enumerate(parts) if has_magic(part))
    yield from _expand(pattern.at("/".join(parts[:fixed])), parts[fixed:])


def _expand(folder: Uri, parts: tuple[str, ...]) -> Iterator[RemoteEntry]:
    part, rest = parts[0], parts[1:]
    if part == "**":
        below = [entry for entry in list_folder(folder, recursive=True) if _shown(folder, entry)]
        if not rest:
            yield RemoteEntry(folder, is_folder=True)
            yield from below
            return
        for inner in (folder, *(entry.uri for entry in below if entry.is_folder)):
            yield from _expand(inner, rest)
        return
    if not has_magic(part):
        entry = look(folder.at(f"{folder.path}/{part}"))
        matches = [] if entry is None else [entry]
    else:
        matches = [
            entry
            for entry in list_folder(folder)
            if fnmatchcase(entry.uri.parts[-1], part)
            and (part.startswith(".") or not entry.uri.parts[-1].startswith("."))
        ]
    for entry in matches:
        if not rest:
            yield entry
        elif entry.is_folder:
            yield from _expand(entry.uri, rest)


def _shown(folder: Uri, entry: RemoteEntry) -> bool:
    return not any(part.startswith(".") for part in entry.uri.parts[len(folder.parts) :])


# ---- writing -----------------------------------------------------------------------------


def put(uri: Uri, data: Buffer) -> None:
    """Make a file appear, whole; one that is there is replaced.

    Raises StorageError: nothing has appeared.
    """
    store, path = locate(uri)
    if store.type_name in OBJECT_STORES:
        _attempt(uri, lambda: _write(store, path, data))
    else:
        _attempt(uri, lambda: _write_and_rename(store, path, data))


def _write(store: fs.FileSystem, path: str, data: Buffer) -> None:
    # Not as a context, which would complete an upload that a write has failed in.
    sink = store.open_output_stream(path)
    sink.write(data)
    sink.close()


def _write_and_rename(store: fs.FileSystem, path: str, data: Buffer) -> None:
    folder, _, name = path.rpartition("/")
    above, _, own = folder.rpartition("/")
    temporary = f"{above}/.{own}.tmp"
    store.create_dir(folder, recursive=True)
    store.create_dir(temporary, recursive=True)
    _write(store, f"{temporary}/{name}", data)
    store.move(f"{temporary}/{name}", path)
    store.delete_dir(temporary)


def remove(uri: Uri) -> None:
    store, path = locate(uri)
    _attempt(uri, lambda: store.delete_file(path))


def open_remote(text: str) -> RemoteFile:
    return RemoteFile(parse_uri(text))
