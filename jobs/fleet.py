"""The engines that jobs share, each in an actor of its own: the driver's side of them."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import ray.exceptions

from engine import EngineConfig
from jobs.engine_actor import EngineHandle, FarBoard
from jobs.engine_loop import MakeEngine
from jobs.engine_places import Place
from jobs.messages import (
    ActorStarted,
    AddShard,
    EndJob,
    EngineLost,
    Event,
    JobFailed,
    PlaceEngines,
    RowsFailed,
    StartJob,
)
from jobs.processes import ProcessId
from jobs.records import JobError
from jobs.temp_folder import remove_worker_logs

POLL_TIMEOUT_S = 1.0
_LOST = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)

EngineCommand = StartJob | AddShard | EndJob


@dataclass(frozen=True, slots=True)
class EngineKey:
    """Jobs with equal keys can share engines. The model file is known by size and time too."""

    model: str
    nbytes: int
    mtime_ns: int
    config: EngineConfig
    num_engines: int | None

    @classmethod
    def of(cls, command: PlaceEngines) -> EngineKey:
        spec, stat = command.spec, os.stat(command.spec.model)
        return cls(spec.model, stat.st_size, stat.st_mtime_ns, spec.engine, spec.engines)


@dataclass(frozen=True, slots=True)
class Link:
    """What a fleet has of the driver around it.

    send: takes events, from any thread
    give_up: is called with an error that is no engine's own; it does not return
    ray_dir: where a Ray of our own keeps its logs; None for another
    """

    send: Callable[[Event], None]
    give_up: Callable[[Exception], None]
    ray_dir: Path | None


class Fleet:
    """The engines of jobs with one key. None is there before a job asks for it.

    make_engine: loads the engine of a job, in the actor
    link: to the runner
    """

    def __init__(
        self, key: EngineKey, places: Sequence[Place], make_engine: MakeEngine, link: Link
    ) -> None:
        self.key = key
        self._seats = [
            _Seat(number, len(places), place, make_engine, link)
            for number, place in enumerate(places)
        ]

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(seat.place.node.name for seat in self._seats)

    @property
    def processes(self) -> list[ProcessId]:
        """Of the actors that are on this machine."""
        handles = [seat.handle for seat in self._seats]
        return [handle.process for handle in handles if handle and handle.process]

    def send(self, command: EngineCommand) -> None:
        """Pass a command to the engine that it names; waits for nothing."""
        self._seats[command.engine].send(command)

    def close(self) -> None:
        """End all actors and wait until their processes are gone."""
        for seat in self._seats:
            seat.close()


class _Seat:
    """One engine: its actor, replaced when it is lost, what goes to it and what comes from it."""

    def __init__(
        self,
        number: int,
        num_engines: int,
        place: Place,
        make_engine: MakeEngine,
        link: Link,
    ) -> None:
        self.place = place
        self.handle: EngineHandle | None = None
        self._number = number
        self._num_engines = num_engines
        self._make_engine = make_engine
        self._link = link
        self._attempt = 0
        self._far_board: FarBoard | None = None
        # It is gone, or its engine may be missing or half-way through a sweep.
        self._is_spoilt = False
        self._commands: SimpleQueue[EngineCommand | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._obey, name=f"engine {number}", daemon=True)
        self._thread.start()

    def send(self, command: EngineCommand) -> None:
        self._commands.put(command)

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join()
        self._end_actor()

    # ---- from the runner to the actor ----------------------------------------------------

    def _obey(self) -> None:
        while (command := self._commands.get()) is not None:
            try:
                if isinstance(command, StartJob):
                    self._start(command)
                elif self.handle is not None:
                    self.handle.send(command)
            except JobError as error:
                detail = traceback.format_exc()
                self._link.send(JobFailed(command.attempt, str(error), detail, engine=self._number))
            except _LOST as error:
                self._is_spoilt = True
                self._link.send(self._lost(command.attempt, error))
            except Exception as error:
                self._link.give_up(error)

    def _start(self, command: StartJob) -> None:
        self._attempt = command.attempt
        if self.handle is not None and (self._is_spoilt or self.handle.is_gone):
            self._end_actor()
        handle = self.handle or self._new_actor()
        self._link.send(ActorStarted(command.attempt, handle.process, self._number))
        place = self.place
        handle.send(
            replace(
                command,
                spec=replace(command.spec, engine=place.config),
                board=command.board if handle.process else self._board_there(),
                num_engines=self._num_engines,
                counts_machine=place.counts_machine,
            )
        )

    def _board_there(self) -> str:
        """A board on the other machine that the engine is on."""
        if self._far_board is None:
            self._far_board = FarBoard(self.place.node.id, self._number)
        return self._far_board.create()

    def _lost(self, attempt: int, error: Exception) -> EngineLost:
        board = self._far_board
        rows = () if board is None else board.rows(attempt)
        return EngineLost(attempt, one_line(error), rows=rows, engine=self._number)

    def _new_actor(self) -> EngineHandle:
        place = self.place
        assert place.config.num_threads is not None
        handle = EngineHandle(
            place.node.id,
            place.node.name,
            place.config.num_threads,
            place.num_gpus,
            self._make_engine,
        )
        self.handle, self._is_spoilt = handle, False
        threading.Thread(target=self._relay, args=(handle,), daemon=True).start()
        return handle

    def _end_actor(self) -> None:
        handle, self.handle = self.handle, None
        if handle is None:
            return
        handle.kill()
        if handle.process is not None and self._link.ray_dir is not None:
            remove_worker_logs(self._link.ray_dir, handle.process.pid)

    # ---- from the actor to the runner ----------------------------------------------------

    def _relay(self, handle: EngineHandle) -> None:
        """Pass on what an actor says, until it is lost or replaced."""
        while True:
            try:
                events = handle.poll(POLL_TIMEOUT_S)
            except _LOST as error:
                if handle is self.handle:
                    self._is_spoilt = True
                    self._link.send(self._lost(self._attempt, error))
                return
            except Exception as error:
                self._link.give_up(error)
                return
            for event in events:
                if handle is self.handle and _spoils_engine(event):
                    self._is_spoilt = True
                self._link.send(event)


def _spoils_engine(event: Event) -> bool:
    if isinstance(event, RowsFailed):
        return event.loss.code == "out_of_memory"
    return isinstance(event, JobFailed)


def one_line(error: Exception) -> str:
    """The error's type and the first line of what it says; the log has the rest."""
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text}"
