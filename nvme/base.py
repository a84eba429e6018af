"""The contract of a reader: bytes of files into buffers, nothing about what they mean.

ReadError       a read that failed or came short: file, offset, bytes wanted and got
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class ReadError(OSError):
    """A read failed, came short, or the file changed since it was opened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRequest:
    """Fill `out` with the bytes [offset, offset + out.nbytes) of file `file_idx`.

    file_idx: index into the paths that the reader was opened with
    offset: bytes
    out: (nbytes,) uint8, contiguous, kept alive and left alone by the caller until `wait` or
        `close` returns
    """

    file_idx: int
    offset: int
    out: npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadStats:
    """What a reader has done since it was opened.

    nbytes_direct: bytes delivered past the page cache
    nbytes_buffered: bytes delivered through it
    busy_s: time in which there was something to read
    """

    nbytes_direct: int = 0
    nbytes_buffered: int = 0
    busy_s: float = 0.0

    @property
    def nbytes(self) -> int:
        return self.nbytes_direct + self.nbytes_buffered

    def __sub__(self, earlier: ReadStats) -> ReadStats:
        return ReadStats(
            nbytes_direct=self.nbytes_direct - earlier.nbytes_direct,
            nbytes_buffered=self.nbytes_buffered - earlier.nbytes_buffered,
            busy_s=self.busy_s - earlier.busy_s,
        )


class Reader(Protocol):
    """Reads from a fixed list of files. One thread submits, waits and closes.

    Tickets are served in the order of submission, and the bytes of several may be under way at
    once; they can be waited for in any order.

    name: "mmap", "direct", …
    path_taken: how bytes travel, and what kept them from a faster way
    alignment: bytes to which offset and buffer address should be aligned for full speed
    max_transfer_nbytes: largest single transfer
    reaches_device: whether `out` may be device memory
    """

    name: str
    paths: Sequence[Path]
    alignment: int
    max_transfer_nbytes: int
    reaches_device: bool

    @property
    def path_taken(self) -> str: ...

    def submit(self, requests: Sequence[ReadRequest]) -> Any:
        """Start reads; returns a ticket for `wait`. Raises ReadError: the file cannot serve it."""

    def done(self, ticket: Any) -> bool:
        """Whether `wait` would return, or raise, without waiting for another thread."""

    def wait(self, ticket: Any) -> None:
        """Return when all reads of the ticket are complete. Raises ReadError.

        Nothing writes into the buffers of the ticket after this, whether it returns or raises.
        """

    def stats(self) -> ReadStats:
        """Bytes and time so far."""

    def close(self) -> None:
        """Release files. Idempotent; reads that have not begun are abandoned, the others end."""
