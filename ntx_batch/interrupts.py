"""Ctrl-C for what has something to do about it: no second one cuts that short."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Inside it, the first of some signals raises KeyboardInterrupt; later ones do nothing.

    After `renew` the next one raises again. Signals that are ignored stay so, and outside the main
    thread, which alone gets signals, nothing changes.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}
        self._raised = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                # None is a handler that Python did not set and could not put back.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._raise_once)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def renew(self) -> None:
        """Let the next signal raise."""
        self._raised = False

    def _raise_once(self, number: int, frame: FrameType | None) -> None:
        if not self._raised:
            self._raised = True
            raise KeyboardInterrupt
