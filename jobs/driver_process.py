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
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from jobs.board import create_board, read_board
from jobs.control import child_environment
from jobs.home import HOME_VARIABLE, Home
from jobs.isolation import LossCode, RowLoss
from jobs.memory import num_oom_kills, private_nbytes
from jobs.messages import (
    ActorStarted,
    Command,
    DriverFailed,
    DriverReady,
    Event,
    JobReady,
    StartJob,
)
from jobs.processes import (
    INSTANCE_VARIABLE,
    ProcessId,
    find_instance,
    kill_all,
    kill_instance,
    read_leader,
    write_leader,
)
from jobs.ray_cluster import cluster_address, is_on_loopback
from jobs.records import RunnerError
from jobs.temp_folder import (
    PREFIX,
    RAY_FOLDER,
    clear_abandoned_folders,
    clear_temp_folders,
    hold_folder,
    make_temp_folder,
)

LAST_WORDS_CHARS = 2000
MAX_RAY_LOG_NBYTES = 4 << 20
WATCHDOG_S = 600.0
WATCHDOG_STEPS = 10.0
_DRIVER, _RAY, _ACTOR = "the driver", "Ray", "the engine actor"


class EngineLostError(Exception):
    """The driver, Ray or the engine actor is gone.

    code: what that is for the rows on board, where these may be the cause
    """

    def __init__(self, reason: str, code: LossCode | None = None) -> None:
        super().__init__(reason)
        self.code = code

    @property
    def loss(self) -> RowLoss | None:
        return None if self.code is None else RowLoss(self.code, str(self))


class DriverProcess:
    """A driver, from its start until `close`, after which nothing of it is left.

    module: the driver's program
    watchdog_s: the engine is lost when a sweep takes longer, and ten times longer than the others
    """

    def __init__(
        self, home: Home, *, module: str = "jobs.driver", watchdog_s: float = WATCHDOG_S
    ) -> None:
        self._home = home
        self._watchdog_s = watchdog_s
        self._job: StartJob | None = None
        self._num_oom_kills = 0
        self._memory_limit_nbytes: int | None = None
        self._marker = f"{home.key}-{secrets.token_hex(8)}"
        self._temp_dir = make_temp_folder(_temp_prefix(home), os.environ)
        self._temp_lock = hold_folder(self._temp_dir)
        # Ray opens its own folder to everybody; inside ours nobody else gets that far.
        self._ray_dir = self._temp_dir / RAY_FOLDER
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", module),
                    *("--fd", str(theirs.fileno())),
                    *("--temp-dir", str(self._ray_dir)),
                ],
                cwd="/",
                env=self._environment(),
                # While the driver lives its folder is in use, whatever becomes of this process.
                pass_fds=[theirs.fileno(), self._temp_lock],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )
        self._pipe = Connection(ours.detach())
        driver = ProcessId.of(self._child.pid)
        assert driver is not None
        write_leader(home.driver_path, driver)
        self._leader = driver
        self._lost: EngineLostError | None = None
        self._watched: dict[str, tuple[ProcessId, ...]] = {_DRIVER: (driver,)}

    def _environment(self) -> dict[str, str]:
        inherited = child_environment()
        if address := cluster_address(inherited):
            loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if is_on_loopback(address) else {}
            return (
                inherited
                | loopback
                | {
                    INSTANCE_VARIABLE: self._marker,
                    HOME_VARIABLE: str(self._home.path),
                    "RAY_USAGE_STATS_ENABLED": "0",
                    # Seconds for which Ray tries to join; a wrong token is wrong at once.
                    "RAY_NUM_REDIS_GET_RETRIES": "5",
                }
            )
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
            "RAY_ROTATION_MAX_BYTES": str(MAX_RAY_LOG_NBYTES),
            "RAY_ROTATION_BACKUP_COUNT": "1",
            # One actor is all that runs: no workers are wanted beside it.
            "RAY_prestart_worker_first_driver": "0",
        }

    def send(self, command: Command) -> None:
        """Raises EngineLostError: the driver is gone."""
        if isinstance(command, StartJob):
            command = self._prepare(command)
        try:
            self._pipe.send(command)
        except OSError as error:
            raise EngineLostError(f"the driver process is gone ({error})") from error

    def _prepare(self, command: StartJob) -> StartJob:
        # Another model takes another actor; ActorStarted will say which it is.
        self._watched.pop(_ACTOR, None)
        self._memory_limit_nbytes = None
        create_board(self._home.board_path)
        self._num_oom_kills = num_oom_kills()
        self._job = replace(command, board=str(self._home.board_path))
        return self._job

    def rows_on_board(self) -> tuple[int, ...]:
        """Rows on board, or in preparation, when the actor last noted them."""
        state = self._job and read_board(self._home.board_path, self._job.attempt)
        return state.rows if state else ()

    def wait(self, timeout_s: float, others: Sequence[int] = ()) -> list[Event]:
        """Events that have come; waits for the first at most `timeout_s`.

        others: file descriptors that end the wait too

        Raises EngineLostError: a process that the work needs is gone, or says that it is lost.
        Raises RunnerError: it is lost, and another would be too.
        """
        events: list[Event] = []
        if self._lost is None:
            ready = multiprocessing.connection.wait([self._pipe, *others], timeout=timeout_s)
            self._lost = self._take_events(events, ready)
        # What came before the end still counts; the end is told at the next call.
        if self._lost is not None and not events:
            raise self._lost
        return events

    def _take_events(self, events: list[Event], ready: Sequence[object]) -> EngineLostError | None:
        """Receive what has come; returns what is lost, if anything is."""
        try:
            while self._pipe in ready:
                event = self._receive()
                if isinstance(event, DriverFailed):
                    if event.is_final:
                        raise RunnerError(event.reason)
                    code = self._death_code() if event.engine_died else None
                    return EngineLostError(event.reason, code)
                events.append(event)
                ready = [self._pipe] if self._pipe.poll() else []
        except (EOFError, OSError):
            return EngineLostError("the driver process ended; see runner.log")
        return self._lost_process() or self._excess_memory() or self._overdue_sweep()

    def _receive(self) -> Event:
        event: Event = self._pipe.recv()
        match event:
            case DriverReady(processes=processes):
                self._watched[_RAY] = processes
            case ActorStarted(process=process):
                self._watched[_ACTOR] = (process,)
            case JobReady(record=record):
                self._memory_limit_nbytes = record.get("memory_limit_nbytes")
        return event

    def _lost_process(self) -> EngineLostError | None:
        for role, processes in self._watched.items():
            for process in processes:
                if not process.is_running():
                    code = self._death_code() if role == _ACTOR else None
                    why = ", killed for want of memory" if code == "out_of_memory" else ""
                    return EngineLostError(
                        f"a process of {role} (pid {process.pid}) is gone{why}", code
                    )
        return None

    def _death_code(self) -> LossCode:
        return "out_of_memory" if num_oom_kills() > self._num_oom_kills else "worker_crashed"

    def _excess_memory(self) -> EngineLostError | None:
        """More memory than the job allows the engine actor."""
        limit = self._memory_limit_nbytes
        for process in self._watched.get(_ACTOR, ()) if limit else ():
            used = private_nbytes(process.pid)
            if limit and used > limit:
                return EngineLostError(
                    f"the engine actor has {used:,} bytes of memory; its limit under --memory is "
                    f"{limit:,}",
                    "out_of_memory",
                )
        return None

    def _overdue_sweep(self) -> EngineLostError | None:
        board = self._job and read_board(self._home.board_path, self._job.attempt)
        if not board or board.began_at is None:
            return None
        allowed_s = max(self._watchdog_s, WATCHDOG_STEPS * board.mean_step_s)
        took_s = time.monotonic() - board.began_at
        if took_s <= allowed_s:
            return None
        return EngineLostError(
            f"a sweep is not over after {took_s:.0f} s; those before took {board.mean_step_s:.1f} "
            f"s, and {allowed_s:.0f} s are allowed",
            "worker_crashed",
        )

    def last_words(self) -> str:
        """The end of what the engine actor wrote to its standard error, for the log."""
        texts = []
        for path in (self._ray_dir / "session_latest" / "logs").glob("worker-*.err"):
            with contextlib.suppress(OSError):
                lines = path.read_text(errors="replace")[-LAST_WORDS_CHARS:].splitlines()
                # Ray heads each file with lines like `:job_id:01000000`.
                texts.append("\n".join(line for line in lines if not line.startswith(":")))
        return "\n".join(filter(None, texts))

    def close(self) -> None:
        """End the driver and all below it, and wait until they are gone. Idempotent."""
        self._pipe.close()
        # In a cluster that is not ours the actor is in nobody's session that we know.
        kill_all(self._watched.get(_ACTOR, ()))
        kill_instance(self._marker, [self._leader])
        self._child.wait()
        shutil.rmtree(self._temp_dir, ignore_errors=True)
        if self._temp_lock >= 0:
            os.close(self._temp_lock)
            self._temp_lock = -1


def clear_leftovers(home: Home) -> list[ProcessId]:
    """End what dead runners of this state folder left behind; the caller holds its lock.

    Folders that runs of other state folders left, and nobody uses, go too.

    Returns processes that would not end.
    """
    leader = read_leader(home.driver_path)
    left = kill_instance(f"{home.key}-", [leader] if leader else [])
    clear_temp_folders(_temp_prefix(home), os.environ)
    clear_abandoned_folders(os.environ, lambda key: bool(find_instance(f"{key}-")))
    return left


def _temp_prefix(home: Home) -> str:
    return f"{PREFIX}{home.key}-"


def _make_token(path: Path) -> Path:
    """A token that only this user can read; each driver gets a new one."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        os.fchmod(fd, 0o600)
        file.write(secrets.token_hex(32))
    return path
