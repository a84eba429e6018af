"""Time that passes on the device."""

from __future__ import annotations

from collections import deque
from typing import Any

import cupy as cp


class DeviceClock:
    """Seconds between events, read once the device has passed them.

    copies: (begin, end) of copies, added by who makes them
    """

    def __init__(self) -> None:
        self.copy_s = self.wait_s = 0.0
        self.copies: deque[tuple[Any, Any]] = deque()
        self._waits: deque[tuple[Any, Any]] = deque()

    def wait_for(self, event: Any) -> None:
        """Let the current stream wait, and time that."""
        stream = cp.cuda.get_current_stream()
        before, after = cp.cuda.Event(), cp.cuda.Event()
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._waits.append((before, after))

    def read(self) -> None:
        """Add what is over to `copy_s` and `wait_s`."""
        self.copy_s += _elapsed_s(self.copies)
        self.wait_s += _elapsed_s(self._waits)


def _elapsed_s(spans: deque[tuple[Any, Any]]) -> float:
    """Of the spans that are over, which are taken out."""
    milliseconds = 0.0
    while spans and spans[0][1].done:
        milliseconds += cp.cuda.get_elapsed_time(*spans.popleft())
    return milliseconds / 1e3
