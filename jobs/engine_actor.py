"""The Ray actor that holds an engine, and the handle through which the driver talks to it."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jobs.board import create_board, read_board
from jobs.engine_loop import EngineLoop, MakeEngine
from jobs.home import Home
from jobs.messages import Command, Event
from jobs.node_facts import machine_id
from jobs.processes import ProcessId
from jobs.records import JobError

START_TIMEOUT_S = 120.0
LOOK_TIMEOUT_S = 10.0
# `poll` waits asleep for events, in a thread of its own; commands must not wait behind it.
_EVENTS, _COMMANDS = "events", "commands"


class EngineActor:
    """Runs an `EngineLoop` in a thread of its own; none of these methods computes anything.

    make_engine: loads the engine of a job
    """

    def __init__(self, make_engine: MakeEngine) -> None:
        self._loop = EngineLoop(make_engine)
        threading.Thread(target=self._loop.run, name="engine", daemon=True).start()

    def process(self) -> tuple[ProcessId, str]:
        """Its process, and the machine that this is on."""
        return ProcessId.current(), machine_id()

    def send(self, command: Command) -> None:
        self._loop.send(command)

    def poll(self, timeout_s: float) -> list[Event]:
        return self._loop.poll(timeout_s)


class BoardKeeper:
    """Keeps the board of an engine on another machine, in a process that outlives the engine's."""

    def create(self, engine: int) -> str:
        """Make it, and say where."""
        path = Home.open().board_path(engine)
        create_board(path)
        return str(path)

    def rows(self, engine: int, attempt: int) -> tuple[int, ...]:
        """Rows on board when the engine last noted them."""
        state = read_board(Home.open().board_path(engine), attempt)
        return state.rows if state else ()


class FarBoard:
    """The board of an engine on another machine. Raises ray.exceptions.RayError."""

    def __init__(self, node_id: str, engine: int) -> None:
        keeper_class = ray.remote(
            num_cpus=0,
            max_restarts=0,
            enable_task_events=False,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )(BoardKeeper)
        self._keeper: Any = keeper_class.remote()
        self._engine = engine

    def create(self) -> str:
        path: str = ray.get(self._keeper.create.remote(self._engine), timeout=START_TIMEOUT_S)
        return path

    def rows(self, attempt: int) -> tuple[int, ...]:
        """Rows on board when the engine last noted them; none where the whole machine is gone."""
        try:
            rows: tuple[int, ...] = ray.get(
                self._keeper.rows.remote(self._engine, attempt), timeout=LOOK_TIMEOUT_S
            )
        except ray.exceptions.RayError:
            return ()
        return rows


class EngineHandle:
    """An engine actor that Ray never restarts and whose calls it never repeats.

    node_id, node_name: where it runs
    num_cpus: cores that the engine will use; there must be as many
    num_gpus: GPUs that it will use, which are then its alone: it sees no others
    make_engine: runs in the actor

    Raises ray.exceptions.RayActorError, also from `poll`: the actor is gone.
    Raises JobError: others use the cores or the GPU.
    """

    def __init__(
        self,
        node_id: str,
        node_name: str,
        num_cpus: int,
        num_gpus: int,
        make_engine: MakeEngine,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        actor_class = ray.remote(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=0,
            max_task_retries=0,
            enable_task_events=False,  # else the GCS keeps one for each `poll`
            concurrency_groups={_EVENTS: 1, _COMMANDS: 1},
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )(EngineActor)
        self._actor: Any = actor_class.remote(make_engine)
        process = self._actor.process.options(concurrency_group=_COMMANDS)
        try:
            own, machine = ray.get(process.remote(), timeout=start_timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            ray.kill(self._actor)
            free = ray.available_resources()
            raise JobError(
                f"an engine actor did not start on {node_name} within {start_timeout_s:.0f} s: it "
                f"asks for {num_cpus} CPUs and {num_gpus} GPUs of it, and all that Ray has free is "
                f"{free.get('CPU', 0):.0f} CPUs and {free.get('GPU', 0):.0f} GPUs; lower "
                "--threads or --engines, take --device cpu, or wait"
            ) from error
        # On another machine its pid says nothing here.
        self.process: ProcessId | None = own if machine == machine_id() else None

    @property
    def is_gone(self) -> bool:
        """Whether its process is known to have ended."""
        return self.process is not None and not self.process.is_running()

    def send(self, command: Command) -> None:
        self._actor.send.options(concurrency_group=_COMMANDS).remote(command)

    def poll(self, timeout_s: float) -> list[Event]:
        """Events that have come; waits for the first at most `timeout_s`."""
        poll = self._actor.poll.options(concurrency_group=_EVENTS)
        events: list[Event] = ray.get(poll.remote(timeout_s))
        return events

    def kill(self) -> None:
        """End the actor and wait until its process, and with it its memory, is gone."""
        ray.kill(self._actor)
        while self.process is not None and self.process.is_running():
            time.sleep(0.02)
