"""The rows on board, noted by the engine actor in a file that outlives it.

What is written stays in the kernel's page cache however the actor dies, so that the runner knows
which rows were on board and since when the engine has been at work on them.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

# attempt, rows, start of the step on the monotonic clock or 0, mean seconds of a step
_HEADER = struct.Struct("<qqdd")
_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BoardState:
    """rows: on board; began_at: of the step under way, by the monotonic clock; None between steps

    mean_step_s: of the steps so far, 0 before the first
    """

    rows: tuple[int, ...]
    began_at: float | None
    mean_step_s: float


class Board:
    """The actor's side. Steps, each with its rows, follow each other; between them is nobody.

    Raises OSError: the file is not there.
    """

    def __init__(self, path: str | Path, attempt: int) -> None:
        self._fd = os.open(path, os.O_WRONLY)
        self._attempt = attempt
        self._began_at = 0.0
        self._steps_s = 0.0
        self._num_steps = 0

    def begin(self, rows: Sequence[int]) -> None:
        """A step begins: preparing one row, or a sweep with all these."""
        self._began_at = time.monotonic()
        self._write(rows, self._began_at)

    def end(self) -> None:
        """The step is over; preparing counts as none."""
        self._steps_s += time.monotonic() - self._began_at
        self._num_steps += 1
        self.clear()

    def clear(self) -> None:
        self._write((), 0.0)

    def _write(self, rows: Sequence[int], began_at: float) -> None:
        rows = rows[: (_NBYTES - _HEADER.size) // 8]
        mean_s = self._steps_s / self._num_steps if self._num_steps else 0.0
        header = _HEADER.pack(self._attempt, len(rows), began_at, mean_s)
        os.pwrite(self._fd, header + np.asarray(rows, np.int64).tobytes(), 0)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def create_board(path: Path) -> None:
    """Make the file, with room on the disk for all that may be noted. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(fd, 0, _NBYTES)
        os.pwrite(fd, bytes(_HEADER.size), 0)
    finally:
        os.close(fd)


def read_board(path: Path, attempt: int) -> BoardState | None:
    """What the actor noted last in this attempt; None where it noted nothing."""
    try:
        data = path.read_bytes()
        owner, num_rows, began_at, mean_s = _HEADER.unpack_from(data)
    except (OSError, struct.error):
        return None
    if owner != attempt:
        return None
    rows = np.frombuffer(data, np.int64, num_rows, _HEADER.size)
    return BoardState(tuple(rows.tolist()), began_at or None, mean_s)
