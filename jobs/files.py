"""Files and folders by path or URI, for code that need not know which it has."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from jobs import remote
from jobs.uris import is_uri, parse_uri

READ_BUFFER_NBYTES = 4 << 20  # of a text file in a store: the smallest range that is asked for


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells a file from one written later. etag: how a store knows it; None on this machine"""

    nbytes: int
    mtime_ns: int
    etag: str | None = None


def file_state(path: str) -> FileState:
    """Raises OSError, StorageError: it cannot be looked at."""
    if not is_uri(path):
        stat = os.stat(path)
        return FileState(stat.st_size, stat.st_mtime_ns)
    with remote.open_remote(path) as source:
        if source.etag is not None:
            return FileState(source.nbytes, 0, source.etag)
    entry = remote.look(parse_uri(path))
    if entry is None:
        raise FileNotFoundError(f"there is no file {path}")
    return FileState(entry.nbytes, entry.mtime_ns)


def open_file(path: str) -> BinaryIO:
    """Open for reading. Raises OSError, StorageError."""
    if not is_uri(path):
        return open(path, "rb")
    return cast(BinaryIO, io.BufferedReader(remote.open_remote(path), READ_BUFFER_NBYTES))


def open_unbuffered(path: str) -> io.RawIOBase:
    """Open for reads that each go to the file. Raises OSError, StorageError."""
    return remote.open_remote(path) if is_uri(path) else open(path, "rb", buffering=0)


def exists(path: str) -> bool:
    """Raises StorageError."""
    return remote.look(parse_uri(path)) is not None if is_uri(path) else os.path.exists(path)


def is_file(path: str) -> bool:
    """Raises StorageError."""
    if not is_uri(path):
        return os.path.isfile(path)
    entry = remote.look(parse_uri(path))
    return entry is not None and not entry.is_folder


def names_in(folder: str) -> list[str]:
    """Names of what a folder holds, sorted; none where it is not there.

    Raises OSError, StorageError.
    """
    if is_uri(folder):
        return [entry.uri.parts[-1] for entry in remote.list_folder(parse_uri(folder))]
    return sorted(os.listdir(folder)) if os.path.exists(folder) else []


def remove_file(path: str) -> None:
    """Raises OSError, StorageError."""
    if is_uri(path):
        remote.remove(parse_uri(path))
    else:
        Path(path).unlink()
