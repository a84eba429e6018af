"""The runner's end of its driver: a child process, a pipe to it, and the pids to watch."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from jobs.control import child_environment
from jobs.home import HOME_VARIABLE, Home
from jobs.messages import ActorStarted, Command, DriverReady, Event, StartJob
from jobs.processes import (
    INSTANCE_VARIABLE,
    ProcessId,
    kill_instance,
    read_leader,
    write_leader,
)

# A Unix socket's path has at most 107 bytes; ours and Ray's names come after the temp folder.
_SOCKET_NAME = "/session_2000-01-01_00-00-00_000000_1234567/sockets/plasma_store"
MAX_TEMP_ROOT_LEN = 107 - len("/ntx-0123456789ab-01234567") - len(_SOCKET_NAME)
LAST_WORDS_CHARS = 2000


class EngineLostError(Exception):
    """The driver, Ray or the engine actor is gone."""


class DriverProcess:
    """A driver, from its start until `close`, after which nothing of it is left."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._marker = f"{home.key}-{secrets.token_hex(8)}"
        self._temp_dir = _make_temp_dir(home)
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "jobs.driver"),
                    *("--fd", str(theirs.fileno())),
                    *("--temp-dir", str(self._temp_dir)),
                ],
                cwd="/",
                env=self._environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )
        self._pipe = Connection(ours.detach())
        driver = ProcessId.of(self._child.pid)
        assert driver is not None
        write_leader(home.driver_path, driver)
        self._leader = driver
        self._lost: str | None = None
        self._watched: dict[str, tuple[ProcessId, ...]] = {"the driver": (driver,)}

    def _environment(self) -> dict[str, str]:
        inherited = child_environment()
        ours = {key: value for key, value in inherited.items() if not key.startswith("RAY_")}
        return ours | {
            INSTANCE_VARIABLE: self._marker,
            HOME_VARIABLE: str(self._home.path),
            # On one machine this is what makes Ray bind all its sockets to loopback.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(_make_token(self._home.ray_token_path)),
            # The engine's own budget bounds memory; Ray's monitor would kill the actor instead.
            "RAY_memory_monitor_refresh_ms": "0",
            # One actor is all that runs: no workers are wanted beside it.
            "RAY_prestart_worker_first_driver": "0",
        }

    def send(self, command: Command) -> None:
        """Raises EngineLostError: the driver is gone."""
        if isinstance(command, StartJob):
            # Another model takes another actor; ActorStarted will say which it is.
            self._watched.pop("the engine actor", None)
        try:
            self._pipe.send(command)
        except OSError as error:
            raise EngineLostError(f"the driver process is gone ({error})") from error

    def wait(self, timeout_s: float, others: Sequence[int] = ()) -> list[Event]:
        """Events that have come; waits for the first at most `timeout_s`.

        others: file descriptors that end the wait too

        Raises EngineLostError: a process that the work needs is gone, or says that it is lost.
        """
        events: list[Event] = []
        if self._lost is None:
            ready = multiprocessing.connection.wait([self._pipe, *others], timeout=timeout_s)
            self._lost = self._take_events(events, ready)
        # What came before the end still counts; the end is told at the next call.
        if self._lost is not None and not events:
            raise EngineLostError(self._lost)
        return events

    def _take_events(self, events: list[Event], ready: Sequence[object]) -> str | None:
        """Receive what has come; returns what is lost, if anything is."""
        try:
            while self._pipe in ready:
                events.append(self._receive())
                ready = [self._pipe] if self._pipe.poll() else []
        except (EOFError, OSError):
            return "the driver process ended; see runner.log"
        return self._lost_process()

    def _receive(self) -> Event:
        event: Event = self._pipe.recv()
        match event:
            case DriverReady(processes=processes):
                self._watched["Ray"] = processes
            case ActorStarted(process=process):
                self._watched["the engine actor"] = (process,)
        return event

    def _lost_process(self) -> str | None:
        for role, processes in self._watched.items():
            for process in processes:
                if not process.is_running():
                    return f"a process of {role} (pid {process.pid}) is gone"
        return None

    def last_words(self) -> str:
        """The end of what the engine actor wrote to its standard error, for the log."""
        texts = []
        for path in (self._temp_dir / "session_latest" / "logs").glob("worker-*.err"):
            with contextlib.suppress(OSError):
                texts.append(path.read_text(errors="replace")[-LAST_WORDS_CHARS:].strip())
        return "\n".join(filter(None, texts))

    def close(self) -> None:
        """End the driver and all below it, and wait until they are gone. Idempotent."""
        self._pipe.close()
        kill_instance(self._marker, [self._leader])
        self._child.wait()
        shutil.rmtree(self._temp_dir, ignore_errors=True)


def clear_leftovers(home: Home) -> list[ProcessId]:
    """End what dead runners of this state folder left behind; the caller holds its lock.

    Returns processes that would not end.
    """
    leader = read_leader(home.driver_path)
    left = kill_instance(f"{home.key}-", [leader] if leader else [])
    for folder in _temp_root().glob(f"ntx-{home.key}-*"):
        shutil.rmtree(folder, ignore_errors=True)
    return left


def _temp_root() -> Path:
    root = tempfile.gettempdir()
    return Path(root if len(os.fsencode(root)) <= MAX_TEMP_ROOT_LEN else "/tmp")


def _make_temp_dir(home: Home) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"ntx-{home.key}-", dir=_temp_root()))


def _make_token(path: Path) -> Path:
    """A token that only this user can read; each driver gets a new one."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        os.fchmod(fd, 0o600)
        file.write(secrets.token_hex(32))
    return path
