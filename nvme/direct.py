"""Reads past the page cache: O_DIRECT from a small pool of threads, into place where aligned."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from nvme.alignment import BLOCK_NBYTES, Piece, align_down, align_up, cut_request
from nvme.base import ReadError, ReadRequest, ReadStats
from nvme.files import (
    OpenFile,
    after_close,
    came_short,
    check_request,
    check_unchanged,
    failed,
    mount_of,
    open_file,
)
from nvme.memory import page_aligned

Preadv = Callable[[int, Sequence[Any], int], int]
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Transfer:
    """How reads are cut and how many are in flight.

    chunk_nbytes: bytes of one call, a multiple of BLOCK_NBYTES
    num_threads: calls at once
    """

    chunk_nbytes: int
    num_threads: int


DEFAULT_TRANSFER = Transfer(chunk_nbytes=4 << 20, num_threads=4)


@dataclass(frozen=True, slots=True)
class Source:
    """An open file. refusal: what keeps it from direct reads, None where they work"""

    file: OpenFile
    refusal: str | None


@dataclass(slots=True, eq=False)
class DirectTicket:
    """Reads submitted together; fields belong to the reader and change under its lock."""

    file_idxs: frozenset[int]
    remaining: int
    error: Exception | None = None
    finished: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class _Job:
    ticket: DirectTicket
    source: Source
    request: ReadRequest
    piece: Piece


def open_direct(path: Path, preadv: Preadv = os.preadv) -> Source:
    """Open for direct reads, or for buffered ones where the file system refuses those.

    Raises ReadError: the file cannot be opened.
    """
    refusal = _refusal(path, preadv)
    return Source(open_file(path, 0 if refusal else os.O_DIRECT), refusal)


def _refusal(path: Path, preadv: Preadv) -> str | None:
    file_system, _ = mount_of(path)
    if file_system in MEMORY_FILE_SYSTEMS:
        return f"{file_system} keeps files in memory"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        # Anything but EINVAL keeps buffered reads away too, and is reported by that open.
        return f"{file_system} refuses O_DIRECT" if error.errno == errno.EINVAL else None
    try:
        preadv(fd, [page_aligned(BLOCK_NBYTES)], 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return f"{file_system} refuses O_DIRECT reads of {BLOCK_NBYTES} bytes"
    finally:
        os.close(fd)
    return None


class DirectReader:
    """Reader that leaves the page cache alone.

    paths: files to read from, opened here
    transfer: size and number of the reads in flight
    preadv: the system call, os.preadv unless the caller has reasons
    Requests whose offset and address agree modulo 4096 are read into place; of others all bytes
    are copied once. File systems that refuse O_DIRECT are read through the page cache, whose pages
    are dropped behind; `path_taken` and `stats` say so.
    Raises ReadError where a file cannot be opened.
    """

    name = "direct"
    alignment = BLOCK_NBYTES
    reaches_device = False

    def __init__(
        self,
        paths: Sequence[str | Path],
        transfer: Transfer = DEFAULT_TRANSFER,
        *,
        preadv: Preadv = os.preadv,
    ) -> None:
        self.paths: Sequence[Path] = tuple(Path(path) for path in paths)
        self.transfer = transfer
        self.max_transfer_nbytes = transfer.chunk_nbytes
        self._preadv = preadv
        self._sources: list[Source] = []
        try:
            for path in self.paths:
                self._sources.append(open_direct(path, preadv))
        except ReadError:
            _close_all(self._sources)
            raise
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()  # of the fields below and of those of tickets
        self._num_pending = 0
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._nbytes_direct = 0
        self._nbytes_buffered = 0
        self._threads = [
            threading.Thread(target=self._serve, name=f"nvme-direct-{number}", daemon=True)
            for number in range(transfer.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def path_taken(self) -> str:
        """ "direct", or "buffered (reason)", or how many files go which way."""
        refusals = [source.refusal for source in self._sources if source.refusal]
        if not refusals:
            return "direct"
        reasons = "; ".join(sorted(set(refusals)))
        if len(refusals) == len(self._sources):
            return f"buffered ({reasons})"
        return f"direct, {len(refusals)} of {len(self._sources)} files buffered ({reasons})"

    def submit(self, requests: Sequence[ReadRequest]) -> DirectTicket:
        """Queue reads behind those submitted before.

        Raises ReadError: a file changed since it was opened, or ends before a range does.
        """
        if self._closed and requests:
            raise after_close(self.paths[requests[0].file_idx])
        file_idxs = frozenset(request.file_idx for request in requests)
        for file_idx in file_idxs:
            check_unchanged(self._sources[file_idx].file)
        cuts = [(request, self._cut(request)) for request in requests]
        ticket = DirectTicket(file_idxs, sum(len(pieces) for _, pieces in cuts))
        self._begin(ticket)
        for request, pieces in cuts:
            source = self._sources[request.file_idx]
            for piece in pieces:
                self._jobs.put(_Job(ticket, source, request, piece))
        return ticket

    def done(self, ticket: DirectTicket) -> bool:
        """Whether all reads of the ticket have ended."""
        return ticket.finished.is_set()

    def wait(self, ticket: DirectTicket) -> None:
        """Return when all reads of the ticket have ended.

        Raises ReadError: one failed or came short, a file changed since it was opened, or the
        reader was closed.
        """
        ticket.finished.wait()
        if ticket.error is not None:
            raise ticket.error
        for file_idx in ticket.file_idxs:
            check_unchanged(self._sources[file_idx].file)

    def stats(self) -> ReadStats:
        """Bytes and time so far."""
        with self._lock:
            now = time.perf_counter() - self._busy_since if self._num_pending else 0.0
            return ReadStats(
                nbytes_direct=self._nbytes_direct,
                nbytes_buffered=self._nbytes_buffered,
                busy_s=self._busy_s + now,
            )

    def close(self) -> None:
        """Abandon what has not begun, let the calls in flight end, release files. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        _close_all(self._sources)

    def _cut(self, request: ReadRequest) -> list[Piece]:
        out = request.out
        assert out.dtype == np.uint8 and out.ndim == 1 and out.flags.c_contiguous, out.dtype
        check_request(self._sources[request.file_idx].file, request)
        return cut_request(
            request.offset,
            out.nbytes,
            out.__array_interface__["data"][0],
            max_nbytes=self.transfer.chunk_nbytes,
        )

    def _begin(self, ticket: DirectTicket) -> None:
        if ticket.remaining == 0:
            ticket.finished.set()
            return
        with self._lock:
            if self._num_pending == 0:
                self._busy_since = time.perf_counter()
            self._num_pending += ticket.remaining

    def _end(self, job: _Job, error: Exception | None) -> None:
        ticket, nbytes = job.ticket, job.piece.end - job.piece.begin
        with self._lock:
            if error is not None:
                ticket.error = ticket.error or error
            elif job.source.refusal is None:
                self._nbytes_direct += nbytes
            else:
                self._nbytes_buffered += nbytes
            self._num_pending -= 1
            if self._num_pending == 0:
                self._busy_s += time.perf_counter() - self._busy_since
            ticket.remaining -= 1
            if ticket.remaining == 0:
                ticket.finished.set()

    # ---- in the threads of the pool --------------------------------------------------------

    def _serve(self) -> None:
        bounce = page_aligned(self.transfer.chunk_nbytes)
        while (job := self._jobs.get()) is not None:
            error: Exception | None = job.ticket.error
            try:
                if self._closed:
                    error = after_close(job.source.file.path)
                elif error is None:
                    self._read(job, bounce)
            except Exception as caught:  # raised again in the thread that waits
                error = caught
            self._end(job, error)

    def _read(self, job: _Job, bounce: npt.NDArray[np.uint8]) -> None:
        request, piece = job.request, job.piece
        begin, end = request.offset + piece.begin, request.offset + piece.end
        if job.source.refusal is not None:
            got = self._fill(job, request.out.data[piece.begin : piece.end], begin, block=1)
            _drop_pages(job.source.file.fd, begin, end)
        elif piece.in_place:
            got = self._fill(job, request.out.data[piece.begin : piece.end], begin)
        else:
            first = align_down(begin)
            filled = self._fill(job, bounce.data[: align_up(end) - first], first)
            got = min(max(first + filled - begin, 0), end - begin)
            at = begin - first
            request.out[piece.begin : piece.begin + got] = bounce[at : at + got]
        if got < end - begin:
            raise came_short(job.source.file, request, piece.begin + got)

    def _fill(self, job: _Job, view: memoryview, offset: int, block: int = BLOCK_NBYTES) -> int:
        """Bytes read into a view; fewer than it holds only where the file ends."""
        got = 0
        while got < len(view):
            try:
                nbytes = self._preadv(job.source.file.fd, [view[got:]], offset + got)
            except OSError as error:
                reached = max(offset + got - job.request.offset, 0)
                why = error.strerror or str(error)
                raise failed(job.source.file, job.request, reached, why) from error
            got += nbytes
            if nbytes == 0 or got % block:
                break
        return got


def _drop_pages(fd: int, begin: int, end: int) -> None:
    first = align_down(begin)
    os.posix_fadvise(fd, first, align_up(end) - first, os.POSIX_FADV_DONTNEED)


def _close_all(sources: Sequence[Source]) -> None:
    for source in sources:
        os.close(source.file.fd)
