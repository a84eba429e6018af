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
    out: (nbytes,) uint8, contiguous, kept alive by the caller until `wait` returns
    """

    file_idx: int
    offset: int
    out: npt.NDArray[np.uint8]


class Reader(Protocol):
    """Reads from a fixed list of files.

    name: "mmap", "direct", …
    alignment: bytes to which offset and buffer address should be aligned for full speed
    max_transfer_nbytes: largest single transfer
    reaches_device: whether `out` may be device memory
    """

    name: str
    paths: Sequence[Path]
    alignment: int
    max_transfer_nbytes: int
    reaches_device: bool

    def submit(self, requests: Sequence[ReadRequest]) -> Any:
        """Start reads; returns a ticket for `wait`."""

    def wait(self, ticket: Any) -> None:
        """Return when all reads of the ticket are complete. Raises ReadError."""

    def close(self) -> None:
        """Release files. Idempotent; tickets not waited for are abandoned."""
