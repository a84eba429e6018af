"""Reads through the page cache.

Copies with preadv rather than out of a mapping: touching a mapped page of a file that has become
shorter kills the process with SIGBUS, a read comes back short and can be reported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nvme.base import ReadError, ReadRequest

MAX_TRANSFER_NBYTES = 1 << 30  # Linux reads at most 2 GiB - 4 KiB in one call


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """A file as it was when the reader opened it."""

    path: Path
    fd: int
    nbytes: int
    mtime_ns: int
    inode: int


@dataclass(slots=True)
class MmapTicket:
    requests: list[ReadRequest] = field(default_factory=list)


class MmapReader:
    """Reader of files in the page cache: `submit` starts the kernel's readahead, `wait` copies.

    paths: files to read from; opened here, so that a later rename or deletion is noticed
    Raises ReadError where one cannot be opened.
    """

    name = "mmap"
    alignment = 1
    max_transfer_nbytes = MAX_TRANSFER_NBYTES
    reaches_device = False

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.paths: Sequence[Path] = tuple(Path(path) for path in paths)
        self._files: list[_OpenFile] = []
        try:
            for path in self.paths:
                self._files.append(_open(path))
        except ReadError:
            self.close()
            raise

    def submit(self, requests: Sequence[ReadRequest]) -> MmapTicket:
        """Check that files are unchanged and hold the ranges, and start readahead.

        Raises ReadError: a file changed since it was opened, or ends before a range does.
        """
        for file_idx in {request.file_idx for request in requests}:
            _check_unchanged(self._file(file_idx))
        for request in requests:
            file = self._file(request.file_idx)
            if request.offset < 0 or request.offset + request.out.nbytes > file.nbytes:
                raise _short(file, request, max(file.nbytes - request.offset, 0))
            os.posix_fadvise(file.fd, request.offset, request.out.nbytes, os.POSIX_FADV_WILLNEED)
        return MmapTicket(list(requests))

    def wait(self, ticket: MmapTicket) -> None:
        """Copy the bytes of a ticket; a second wait does nothing. Raises ReadError."""
        requests, ticket.requests = ticket.requests, []
        for request in requests:
            _fill(self._file(request.file_idx), request)
        for file_idx in {request.file_idx for request in requests}:
            _check_unchanged(self._file(file_idx))

    def close(self) -> None:
        """Release the files. Idempotent."""
        files, self._files = self._files, []
        for file in files:
            os.close(file.fd)

    def _file(self, file_idx: int) -> _OpenFile:
        if not self._files:
            raise ReadError(f"read of {self.paths[file_idx]} after the reader was closed")
        return self._files[file_idx]


def _open(path: Path) -> _OpenFile:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ReadError(f"{path}: cannot be opened: {error.strerror}") from error
    status = os.fstat(fd)
    return _OpenFile(path, fd, status.st_size, status.st_mtime_ns, status.st_ino)


def _check_unchanged(file: _OpenFile) -> None:
    """Compare what lies at the path, so that a file put in its place is noticed too."""
    then = (file.nbytes, file.mtime_ns, file.inode)
    try:
        status = os.stat(file.path)
    except OSError as error:
        raise ReadError(f"{file.path}: gone since it was opened: {error.strerror}") from error
    now = (status.st_size, status.st_mtime_ns, status.st_ino)
    if now != then:
        raise ReadError(
            f"{file.path}: changed since it was opened: (bytes, mtime in ns, inode) were {then}, "
            f"are {now}; leave model files alone while they are read"
        )


def _fill(file: _OpenFile, request: ReadRequest) -> None:
    view = request.out.data
    done = 0
    while done < len(view):
        try:
            piece = view[done : done + MAX_TRANSFER_NBYTES]
            got = os.preadv(file.fd, [piece], request.offset + done)
        except OSError as error:
            raise _failed(file, request, done, error.strerror or str(error)) from error
        if got == 0:
            raise _short(file, request, done)
        done += got


def _short(file: _OpenFile, request: ReadRequest, got: int) -> ReadError:
    return _failed(file, request, got, "the file ends")


def _failed(file: _OpenFile, request: ReadRequest, got: int, why: str) -> ReadError:
    return ReadError(
        f"{file.path}: wanted {request.out.nbytes} bytes at offset {request.offset}, "
        f"got {got}: {why}"
    )
