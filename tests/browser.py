"""A headless Chromium, told what to do over a pipe, with nothing between it and the test."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


class Page:
    """One page of the browser.

    requests: addresses of all that it asked for
    complaints: what the browser wrote to the page's console
    """

    def __init__(self, commands: int, events: int) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._commands = commands
        self._events = os.fdopen(events, "rb", closefd=False)
        self._session: str | None = None
        self._number = 0
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log"):
            self._call(f"{domain}.enable")

    def show(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Open a file as a screen of this width shows it."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=path.as_uri())
        self._read_until(lambda message: message.get("method") == "Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, as JSON has it."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self) -> bytes:
        """The whole page as PNG."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        answer = self._read_until(lambda message: message.get("id") == number)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _read_until(self, is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            message = self._read()
            match message.get("method"):
                case "Network.requestWillBeSent":
                    self.requests.append(message["params"]["request"]["url"])
                case "Log.entryAdded":
                    self.complaints.append(message["params"]["entry"]["text"])
            if is_wanted(message):
                return message

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._events.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        message: dict[str, Any] = json.loads(text)
        return message


@contextmanager
def open_browser(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile in a folder; it is gone in the end."""
    assert CHROMIUM is not None
    commands_out, commands_in = os.pipe()
    events_out, events_in = os.pipe()
    # It reads commands from 3 and writes events to 4; ours may lie there.
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (commands_out, events_in)]
    pid = os.posix_spawn(
        CHROMIUM,
        [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, theirs[0], 3),
            (os.POSIX_SPAWN_DUP2, theirs[1], 4),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ],
    )
    for fd in (commands_out, events_in, *theirs):
        os.close(fd)
    try:
        yield Page(commands_in, events_out)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for fd in (commands_in, events_out):
            os.close(fd)
