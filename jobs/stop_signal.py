"""SIGTERM and SIGINT as something that a loop can look at and wait for."""

from __future__ import annotations

import contextlib
import signal
import socket
from typing import Self


class StopSignal:
    """SIGTERM and SIGINT as a flag, and as a descriptor that becomes readable."""

    def __init__(self) -> None:
        self.is_set = False
        self._is_installed = False
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)

    def install(self) -> Self:
        """From here to the end of this process; main thread only."""
        self._is_installed = True
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.set())
        # A terminal that closes is no reason to stop.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return self

    def set(self) -> None:
        self.is_set = True

    def fileno(self) -> int:
        return self._read.fileno()

    def wait(self, timeout_s: float) -> None:
        self._read.settimeout(timeout_s)
        with contextlib.suppress(TimeoutError):
            self._read.recv(64)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_installed:
            signal.set_wakeup_fd(-1)
        self._read.close()
        self._write.close()
