"""The one runner of a state folder, as seen from outside: is it there, start it, stop it.

The lock decides: whoever holds `flock` on runner.lock is the runner, and the kernel lets go of it
when that process dies, however it dies. What is written into the file only informs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from jobs.home import HOME_VARIABLE, Home
from jobs.processes import INSTANCE_VARIABLE, ProcessId, boot_id
from jobs.ray_cluster import cluster_address, probe_cluster
from jobs.records import RunnerError
from jobs.uris import mask

START_TIMEOUT_S = 20.0
_LOCK_TIMEOUT_S = 2.0
NOTE_NBYTES = 4096
_POLL_INTERVAL_S = 0.02
_PACKAGE_ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT_KEYS = ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
# Which store a URI means, and as whom; no secrets.
STORE_KEYS = (
    *("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"),
    *("AWS_ENDPOINT_URL_S3", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"),
    "GOOGLE_APPLICATION_CREDENTIALS",
)


@dataclass(frozen=True, slots=True)
class RunnerStatus:
    """pid: None where none runs; environment: the part of it that jobs depend on"""

    state: Literal["running", "stopping", "absent"]
    pid: int | None = None
    environment: Mapping[str, str] | None = None


class RunnerLock:
    """The right to be the runner of a state folder, held until `release` or the process's end."""

    def __init__(self, home: Home) -> None:
        """Take it. Raises RunnerError: another process holds it."""
        self._fd = os.open(home.lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        # Who looks whether a runner is there, or notes that one died, holds a shared lock briefly.
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while not _try_lock(self._fd, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                self.release()
                raise RunnerError(
                    f"{home.path} already has a runner (pid {runner_status(home).pid}); stop it "
                    "with `ntx-batch runner stop`, or choose another state folder with $NTX_HOME"
                )
            time.sleep(_POLL_INTERVAL_S)
        self.note("running")

    def note(self, state: Literal["running", "stopping"]) -> None:
        """Write who holds it, for `runner_status`."""
        me = ProcessId.current()
        facts = {
            "pid": me.pid,
            "start_time": me.start_time,
            "boot_id": boot_id(),
            "state": state,
            "environment": environment_of(os.environ),
        }
        # In place and of one length: on a full disk there would be no room for it again.
        os.pwrite(self._fd, json.dumps(facts).encode().ljust(NOTE_NBYTES), 0)

    def release(self) -> None:
        """Let go. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def environment_of(environ: Mapping[str, str], *, stores: bool = True) -> dict[str, str]:
    """The variables that a job depends on, stored with it at submit.

    stores: its input or its results are in a store
    """
    keys = (*ENVIRONMENT_KEYS, *STORE_KEYS) if stores else ENVIRONMENT_KEYS
    return {key: mask(environ[key]) for key in keys if key in environ}


def check_environment(
    status: RunnerStatus, environ: Mapping[str, str], *, stores: bool = False
) -> None:
    """Refuse a job that the running runner would run elsewhere than asked.

    stores: its input or its results are in a store

    Raises RunnerError: a variable that jobs depend on differs; says both values. Or no Ray
        answers at RAY_ADDRESS.
    """
    wanted = environment_of(environ, stores=stores)
    if address := cluster_address(wanted):
        probe_cluster(address)
    if status.environment is None:
        return
    for key in (*ENVIRONMENT_KEYS, *STORE_KEYS) if stores else ENVIRONMENT_KEYS:
        here, there = wanted.get(key), status.environment.get(key)
        if here != there:
            raise RunnerError(
                f"{key} is {_shown(here)} here and {_shown(there)} in the running runner (pid "
                f"{status.pid}); make them equal, or stop it with `ntx-batch runner stop`"
            )


def _shown(value: str | None) -> str:
    return "not set" if value is None else repr(value)


def runner_status(home: Home) -> RunnerStatus:
    """Whether a runner holds the lock, and what it wrote about itself."""
    try:
        fd = os.open(home.lock_path, os.O_RDONLY)
    except FileNotFoundError:
        return RunnerStatus("absent")
    try:
        return RunnerStatus("absent") if _try_lock(fd, fcntl.LOCK_SH) else _read_holder(fd)
    finally:
        os.close(fd)


def _read_holder(fd: int) -> RunnerStatus:
    try:
        facts: dict[str, Any] = json.loads(os.pread(fd, 65536, 0))
        holder = ProcessId(facts["pid"], facts["start_time"])
        if facts["boot_id"] == boot_id() and holder.is_running():
            return RunnerStatus(facts["state"], holder.pid, facts["environment"])
    except (ValueError, KeyError):
        pass
    # It has the lock and has not yet written who it is.
    return RunnerStatus("running")


@contextlib.contextmanager
def runner_kept_away(home: Home) -> Iterator[bool]:
    """Yields whether a runner was here and is gone; within it, none can start."""
    try:
        fd = os.open(home.lock_path, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        yield _try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def ensure_runner(
    home: Home, *, idle_exit_s: float | None = None, unload_after_s: float | None = None
) -> RunnerStatus:
    """Start a runner where none runs; returns once one holds the lock.

    idle_exit_s, unload_after_s: the new runner, or its engine, ends after this long without a job;
        None takes the default
    The runner gets a session of its own, so it outlives the terminal; it logs to runner.log.

    Raises RunnerError: the environment differs from the running runner's, or the new one
    did not start; says the end of its log.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    # One that is stopping found the queue empty before our job was in it: wait for its end.
    while (status := runner_status(home)).state == "stopping" and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
    check_environment(status, os.environ)
    if status.state != "absent":
        return status
    settings = {"--idle-exit-s": idle_exit_s, "--unload-after-s": unload_after_s}
    child = ProcessId.of(_spawn(home, settings))
    while (status := runner_status(home)).pid is None:
        gone = child is None or not child.is_running()
        if time.monotonic() > deadline or (gone and status.state == "absent"):
            raise RunnerError(
                f"the runner did not start; the end of {home.log_path}:\n{_tail(home.log_path)}"
            )
        time.sleep(_POLL_INTERVAL_S)
    return status


def _spawn(home: Home, settings: Mapping[str, float | None]) -> int:
    arguments = [sys.executable, "-P", "-m", "jobs.runner", "--home", str(home.path)]
    for flag, value in settings.items():
        arguments += [] if value is None else [flag, str(value)]
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        sys.executable,
        arguments,
        child_environment() | {HOME_VARIABLE: str(home.path)},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(home.log_path), append, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def child_environment() -> dict[str, str]:
    """Environment in which a child finds our packages, whatever its working directory."""
    environment = {key: value for key, value in os.environ.items() if key != INSTANCE_VARIABLE}
    if _PACKAGE_ROOT.name in ("site-packages", "dist-packages"):
        return environment
    paths = [str(_PACKAGE_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}


def _tail(path: Path, num_chars: int = 2000) -> str:
    try:
        return path.read_text(errors="replace")[-num_chars:]
    except OSError as error:
        return f"(unreadable: {error})"


def stop_runner(home: Home, *, timeout_s: float = 30.0) -> bool:
    """Ask the runner to stop and wait until it has; False where none runs.

    Its job becomes `interrupted` and goes on when the next runner starts.

    Raises RunnerError: it is still there after `timeout_s` seconds.
    """
    status = runner_status(home)
    if status.state == "absent":
        return False
    process = None if status.pid is None else ProcessId.of(status.pid)
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while runner_status(home).state != "absent" or (process and process.is_running()):
        if time.monotonic() > deadline:
            raise RunnerError(
                f"the runner (pid {status.pid}) is still there {timeout_s:.0f} s after SIGTERM; "
                f"see {home.log_path}, and end it with `kill -9 {status.pid}` if it hangs"
            )
        time.sleep(_POLL_INTERVAL_S)
    return True
