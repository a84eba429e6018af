"""The Ray actor that holds an engine: a thread that sweeps, and two methods to talk to it."""

from __future__ import annotations

import threading

import ray

from engine import Engine, EngineConfig
from jobs.engine_loop import EngineLoop
from jobs.messages import Command, Event
from jobs.processes import ProcessId

# `poll` waits for events; commands must not wait behind it.
_GROUPS = {"events": 1, "commands": 1}


class EngineActor:
    """Runs an `EngineLoop` in a thread of its own; both methods return quickly or wait asleep."""

    def __init__(self) -> None:
        self._loop = EngineLoop(load_engine)
        threading.Thread(target=self._loop.run, name="engine", daemon=True).start()

    @ray.method(concurrency_group="commands")
    def process(self) -> ProcessId:
        return ProcessId.current()

    @ray.method(concurrency_group="commands")
    def send(self, command: Command) -> None:
        self._loop.send(command)

    @ray.method(concurrency_group="events")
    def poll(self, timeout_s: float) -> list[Event]:
        return self._loop.poll(timeout_s)


def load_engine(model: str, config: EngineConfig) -> Engine:
    return Engine(model, config)


def start_actor(num_cpus: int) -> ray.actor.ActorHandle:
    """Start an engine actor that Ray never restarts and whose calls it never repeats.

    num_cpus: cores the engine will use
    """
    actor_class = ray.remote(
        num_cpus=num_cpus,
        max_restarts=0,
        max_task_retries=0,
        concurrency_groups=_GROUPS,
    )(EngineActor)
    return actor_class.remote()
