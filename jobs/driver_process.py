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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from jobs.board import BoardState, create_board, read_board
from jobs.control import child_environment
from jobs.home import HOME_VARIABLE, Home
from jobs.isolation import LossCode
from jobs.memory import num_oom_kills, private_nbytes
from jobs.messages import (
    ActorStarted,
    Command,
    DriverFailed,
    DriverReady,
    EngineLost,
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
_DRIVER, _RAY = "the driver", "Ray"


class DriverLostError(Exception):
    """The driver or Ray is gone, and with it all engines."""


@dataclass(slots=True)
class _Watched:
    """An engine as the runner sees it from outside, in one attempt.

    board: what its actor notes the rows on board in
    process: the actor's; None before it is there, and where it is on another machine
    memory_limit_nbytes: what that may take; None where nothing bounds it
    num_oom_kills: of this machine, before
    """

    attempt: int
    board: Path
    num_oom_kills: int
    process: ProcessId | None = None
    memory_limit_nbytes: int | None = None

    @property
    def state(self) -> BoardState | None:
        return read_board(self.board, self.attempt)

    @property
    def death_code(self) -> LossCode:
        return "out_of_memory" if num_oom_kills() > self.num_oom_kills else "worker_crashed"


class DriverProcess:
    """A driver, from its start until `close`, after which nothing of it is left.

    module: the driver's program
    watchdog_s: an engine is lost when a sweep takes longer, and ten times longer than the others
    """

    def __init__(
        self, home: Home, *, module: str = "jobs.driver", watchdog_s: float = WATCHDOG_S
    ) -> None:
        self._home = home
        self._watchdog_s = watchdog_s
        self._engines: dict[int, _Watched] = {}
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
        self._lost: DriverLostError | None = None
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
            # Actors are all that runs: no workers are wanted beside them.
            "RAY_prestart_worker_first_driver": "0",
        }

    def send(self, command: Command) -> None:
        """Raises DriverLostError: the driver is gone."""
        if isinstance(command, StartJob):
            command = self._prepare(command)
        try:
            self._pipe.send(command)
        except OSError as error:
            raise DriverLostError(f"the driver process is gone ({error})") from error

    def _prepare(self, command: StartJob) -> StartJob:
        # Another model takes another actor; ActorStarted will say which it is.
        board = self._home.board_path(command.engine)
        create_board(board)
        self._engines[command.engine] = _Watched(command.attempt, board, num_oom_kills())
        return replace(command, board=str(board))

    def wait(self, timeout_s: float, others: Sequence[int] = ()) -> list[Event]:
        """Events that have come; waits for the first at most `timeout_s`.

        others: file descriptors that end the wait too

        Raises DriverLostError: a process that all engines need is gone, or says that it is lost.
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

    def _take_events(self, events: list[Event], ready: Sequence[object]) -> DriverLostError | None:
        """Receive what has come; returns what is lost, if anything is."""
        try:
            while self._pipe in ready:
                event = self._receive()
                if isinstance(event, DriverFailed):
                    if event.is_final:
                        raise RunnerError(event.reason)
                    return DriverLostError(event.reason)
                if event is not None:
                    events.append(event)
                ready = [self._pipe] if self._pipe.poll() else []
        except (EOFError, OSError):
            return DriverLostError("the driver process ended; see runner.log")
        if (lost := self._lost_process()) is not None:
            return lost
        events += self._lost_engines()
        return None

    def _receive(self) -> Event | None:
        """The next event, with what is known here; None: it says what has been told before."""
        event: Event = self._pipe.recv()
        match event:
            case DriverReady(processes=processes):
                self._watched[_RAY] = processes
            case ActorStarted() | JobReady() | EngineLost():
                return self._note(event)
        return event

    def _note(self, event: ActorStarted | JobReady | EngineLost) -> Event | None:
        engine = self._engines.get(event.engine)
        if engine is None or engine.attempt != event.attempt:
            return None if isinstance(event, EngineLost) else event
        match event:
            case ActorStarted(process=process):
                engine.process = process
            case JobReady(record=record):
                engine.memory_limit_nbytes = record.get("memory_limit_nbytes")
            case EngineLost(reason=reason) if engine.process is not None:
                return self._end_engine(event.engine, reason, engine.death_code)
            case EngineLost():
                del self._engines[event.engine]
        return event

    def _lost_process(self) -> DriverLostError | None:
        for role, processes in self._watched.items():
            for process in processes:
                if not process.is_running():
                    return DriverLostError(f"a process of {role} (pid {process.pid}) is gone")
        return None

    def _lost_engines(self) -> Iterator[EngineLost]:
        """Engines that are gone or must go; those that must are gone afterwards."""
        for number, engine in list(self._engines.items()):
            for look in (_death, _excess_memory, self._overdue_sweep):
                if (found := look(engine)) is not None:
                    yield self._end_engine(number, *found)
                    break

    def _end_engine(self, number: int, reason: str, code: LossCode) -> EngineLost:
        engine = self._engines.pop(number)
        words = ""
        if engine.process is not None:
            kill_all([engine.process])
            words = self._last_words(engine.process)
        state = engine.state
        rows = state.rows if state else ()
        return EngineLost(engine.attempt, reason, code, rows, words, number)

    def _overdue_sweep(self, engine: _Watched) -> tuple[str, LossCode] | None:
        board = engine.state
        if not board or board.began_at is None:
            return None
        allowed_s = max(self._watchdog_s, WATCHDOG_STEPS * board.mean_step_s)
        took_s = time.monotonic() - board.began_at
        if took_s <= allowed_s:
            return None
        return (
            f"a sweep is not over after {took_s:.0f} s; those before took {board.mean_step_s:.1f} "
            f"s, and {allowed_s:.0f} s are allowed",
            "worker_crashed",
        )

    def _last_words(self, process: ProcessId) -> str:
        """The end of what an engine actor wrote to its standard error, for the log."""
        texts = []
        logs = self._ray_dir / "session_latest" / "logs"
        for path in logs.glob(f"worker-*-{process.pid}.err"):
            with contextlib.suppress(OSError):
                lines = path.read_text(errors="replace")[-LAST_WORDS_CHARS:].splitlines()
                # Ray heads each file with lines like `:job_id:01000000`.
                texts.append("\n".join(line for line in lines if not line.startswith(":")))
        return "\n".join(filter(None, texts))

    def close(self) -> None:
        """End the driver and all below it, and wait until they are gone. Idempotent."""
        self._pipe.close()
        # In a cluster that is not ours the actors are in nobody's session that we know.
        kill_all(engine.process for engine in self._engines.values() if engine.process)
        kill_instance(self._marker, [self._leader])
        self._child.wait()
        shutil.rmtree(self._temp_dir, ignore_errors=True)
        if self._temp_lock >= 0:
            os.close(self._temp_lock)
            self._temp_lock = -1


def _death(engine: _Watched) -> tuple[str, LossCode] | None:
    process = engine.process
    if process is None or process.is_running():
        return None
    code = engine.death_code
    why = ", killed for want of memory" if code == "out_of_memory" else ""
    return f"the process of the engine actor (pid {process.pid}) is gone{why}", code


def _excess_memory(engine: _Watched) -> tuple[str, LossCode] | None:
    """More memory than the job allows the engine actor."""
    limit, process = engine.memory_limit_nbytes, engine.process
    if not limit or process is None or (used := private_nbytes(process.pid)) <= limit:
        return None
    return (
        f"the engine actor has {used:,} bytes of memory; its limit under --memory is {limit:,}",
        "out_of_memory",
    )


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
