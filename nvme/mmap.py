"""Reads through the page cache.

Copies with preadv rather than out of a mapping: touching a mapped page of a file that has become
shorter kills the process with SIGBUS, a read comes back short and can be reported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nvme.base import ReadError, ReadRequest, ReadStats
from nvme.files import (
    OpenFile,
    after_close,
    came_short,
    check_request,
    check_unchanged,
    failed,
    open_file,
)

MAX_TRANSFER_NBYTES = 1 << 30  # Linux reads at most 2 GiB - 4 KiB in one call


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
    path_taken = "page cache"

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.paths: Sequence[Path] = tuple(Path(path) for path in paths)
        self._files: list[OpenFile] = []
        self._nbytes = 0
        self._busy_s = 0.0
        try:
            for path in self.paths:
                self._files.append(open_file(path))
        except ReadError:
            self.close()
            raise

    def submit(self, requests: Sequence[ReadRequest]) -> MmapTicket:
        """Check that files are unchanged and hold the ranges, and start readahead.

        Raises ReadError: a file changed since it was opened, or ends before a range does.
        """
        for file_idx in {request.file_idx for request in requests}:
            check_unchanged(self._file(file_idx))
        for request in requests:
            file = self._file(request.file_idx)
            check_request(file, request)
            os.posix_fadvise(file.fd, request.offset, request.out.nbytes, os.POSIX_FADV_WILLNEED)
        return MmapTicket(list(requests))

    def done(self, ticket: MmapTicket) -> bool:
        """Always: the bytes are copied by the thread that waits."""
        return True

    def wait(self, ticket: MmapTicket) -> None:
        """Copy the bytes of a ticket; a second wait does nothing. Raises ReadError."""
        requests, ticket.requests = ticket.requests, []
        started = time.perf_counter()
        for request in requests:
            _fill(self._file(request.file_idx), request)
            self._nbytes += request.out.nbytes
        for file_idx in {request.file_idx for request in requests}:
            check_unchanged(self._file(file_idx))
        self._busy_s += time.perf_counter() - started

    def stats(self) -> ReadStats:
        """Bytes copied and the time it took; readahead by the kernel is not seen."""
        return ReadStats(nbytes_buffered=self._nbytes, busy_s=self._busy_s)

    def close(self) -> None:
        """Release the files. Idempotent."""
        files, self._files = self._files, []
        for file in files:
            os.close(file.fd)

    def _file(self, file_idx: int) -> OpenFile:
        if not self._files:
            raise after_close(self.paths[file_idx])
        return self._files[file_idx]


def _fill(file: OpenFile, request: ReadRequest) -> None:
    view = request.out.data
    done = 0
    while done < len(view):
        try:
            piece = view[done : done + MAX_TRANSFER_NBYTES]
            got = os.preadv(file.fd, [piece], request.offset + done)
        except OSError as error:
            raise failed(file, request, done, error.strerror or str(error)) from error
        if got == 0:
            raise came_short(file, request, done)
        done += got
