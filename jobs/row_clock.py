"""How long each row is on board, and which of them are so for too long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from engine import RowError

RowKey = tuple[int, int]  # row index, sample index


class RowClock:
    """Watches the rows of one job.

    timeout_s: the longest time on board; None is no limit
    clock: seconds, from anywhere
    """

    def __init__(
        self, timeout_s: float | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._since: dict[RowKey, float] = {}

    def late_rows(self, on_board: Iterable[RowKey]) -> Iterator[tuple[RowKey, RowError]]:
        """Those that must end, with the error of each; a row counts from the first call with it."""
        if self._timeout_s is None:
            return
        now = self._clock()
        self._since = {key: self._since.get(key, now) for key in on_board}
        for key, since in self._since.items():
            if now - since > self._timeout_s:
                yield (
                    key,
                    RowError(
                        "timeout",
                        f"the row was on board for {now - since:.1f} s, --row-timeout is "
                        f"{self._timeout_s:g} s; lower max_tokens, or allow more",
                    ),
                )
