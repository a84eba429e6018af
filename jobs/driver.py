"""The driver: the process that talks to Ray, a child of the runner.

`python -m jobs.driver --fd N --temp-dir DIR`: N is the child's end of a socket pair. Its main
thread starts Ray and then carries events from the engine actor to the runner; a second thread
carries commands the other way. When the pipe ends, the runner is gone or wants us gone: then
everything of Ray is killed, and this process ends.
"""

from __future__ import annotations

import argparse
import logging
import os
import threading
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import psutil
import ray
import ray.exceptions

from engine import DeviceError, EngineConfig
from engine.devices import DeviceChoice
from engine.machine import usable_cores
from jobs.budget import beside_object_store
from jobs.engine_actor import EngineHandle
from jobs.engine_load import load_engine
from jobs.engine_loop import MakeEngine
from jobs.gpus import name_each_gpu_once, survey_gpus
from jobs.home import HOME_VARIABLE
from jobs.job_device import choose_job_device
from jobs.messages import (
    ActorStarted,
    AddShard,
    Command,
    DriverFailed,
    DriverReady,
    EndJob,
    Event,
    JobFailed,
    RowsFailed,
    StartJob,
)
from jobs.processes import INSTANCE_VARIABLE, ProcessId, kill_all, kill_instance
from jobs.ray_cluster import (
    OBJECT_STORE_NBYTES,
    cluster_address,
    is_on_loopback,
    probe_cluster,
    refused_by_cluster,
)
from jobs.records import JobError, RunnerError

POLL_TIMEOUT_S = 1.0
JOIN_TIMEOUT_S = 30.0
_CORE_PROCESSES = ("raylet", "gcs_server")

log = logging.getLogger("jobs.driver")


@dataclass(frozen=True, slots=True)
class EngineKey:
    """Jobs with equal keys can share an engine. The model file is known by size and time too."""

    model: str
    nbytes: int
    mtime_ns: int
    config: EngineConfig

    @classmethod
    def of(cls, command: StartJob) -> EngineKey:
        stat = os.stat(command.spec.model)
        return cls(command.spec.model, stat.st_size, stat.st_mtime_ns, command.spec.engine)


class Driver:
    """Keeps one engine actor and passes messages between it and the runner.

    make_engine: loads the engine of a job, in the actor
    """

    def __init__(
        self, pipe: Connection, temp_dir: Path, make_engine: MakeEngine = load_engine
    ) -> None:
        self._make_engine = make_engine
        self._pipe = pipe
        self._pipe_lock = threading.Lock()
        self._temp_dir = temp_dir
        self._actor: EngineHandle | None = None
        self._key: EngineKey | None = None
        self._actor_changed = threading.Condition()

    def run(self) -> NoReturn:
        """Serve until the pipe ends or Ray is lost; never returns."""
        try:
            self._start_ray()
            threading.Thread(target=self._obey, name="commands", daemon=True).start()
            while True:
                self._relay_events()
        except Exception as error:
            log.exception("the driver ends")
            if isinstance(error, RunnerError):
                self._send(DriverFailed(str(error), is_final=True))
                end_instance(1)
            engine_died = isinstance(error, ray.exceptions.RayActorError)
            self._send(DriverFailed(one_line(error), engine_died))
        end_instance(1)

    def _start_ray(self) -> None:
        started = time.monotonic()
        if address := cluster_address(os.environ):
            self._join_cluster(address)
        else:
            self._start_own_ray()
        self._send(DriverReady(round(time.monotonic() - started, 3), ray_processes()))

    def _join_cluster(self, address: str) -> None:
        def give_up() -> None:
            error = f"nothing came of it in {JOIN_TIMEOUT_S:.0f} s"
            reason = refused_by_cluster(address, error, os.environ)
            self._send(DriverFailed(reason, is_final=True))
            end_instance(1)

        # Ray may try for minutes.
        timer = threading.Timer(JOIN_TIMEOUT_S, give_up)
        timer.daemon = True
        timer.start()
        join_cluster(address)
        timer.cancel()

    def _start_own_ray(self) -> None:
        ray.init(
            address="local",
            num_cpus=usable_cores(),
            num_gpus=len(survey_gpus().gpus),
            object_store_memory=OBJECT_STORE_NBYTES,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(self._temp_dir),
            _node_ip_address="127.0.0.1",
        )

    def _send(self, event: Event) -> None:
        with self._pipe_lock:
            try:
                self._pipe.send(event)
            except OSError:
                end_instance(0)

    # ---- from the actor to the runner ----------------------------------------------------

    def _relay_events(self) -> None:
        with self._actor_changed:
            self._actor_changed.wait_for(lambda: self._actor is not None)
            actor = self._actor
        assert actor is not None
        try:
            events = actor.poll(POLL_TIMEOUT_S)
        except ray.exceptions.RayActorError:
            if actor is not self._actor:
                return  # it was replaced while we waited for it
            raise
        for event in events:
            if _spoils_engine(event) and actor is self._actor:
                # Its engine may be missing or half-way through a sweep: load afresh next time.
                self._key = None
            self._send(event)

    # ---- from the runner to the actor ----------------------------------------------------

    def _obey(self) -> None:
        try:
            while True:
                command: Command = self._pipe.recv()
                match command:
                    case StartJob():
                        self._start_job(command)
                    case AddShard() | EndJob():
                        self._forward(command)
        except (EOFError, OSError):
            # In a cluster that is not ours, nothing else would lead to the actor.
            kill_all([self._actor.process] if self._actor else [], timeout_s=3.0)
            end_instance(0)
        except Exception as error:
            log.exception("a command failed")
            self._send(DriverFailed(one_line(error)))
            end_instance(1)

    def _start_job(self, command: StartJob) -> None:
        try:
            command = leave_object_store(use_own_device(use_own_cores(command)))
            key = EngineKey.of(command)
            if key != self._key:
                self._replace_actor(key)
        except (JobError, OSError) as error:
            self._send(JobFailed(command.attempt, str(error), traceback.format_exc()))
            return
        assert self._actor is not None
        self._send(ActorStarted(command.attempt, self._actor.process))
        self._forward(command)

    def _replace_actor(self, key: EngineKey) -> None:
        num_cpus, num_gpus = key.config.num_threads, int(key.config.device == "gpu")
        assert num_cpus is not None
        with self._actor_changed:
            old, self._actor, self._key = self._actor, None, None
        if old is not None:
            old.kill()
        with self._actor_changed:
            self._actor, self._key = EngineHandle(num_cpus, num_gpus, self._make_engine), key
            self._actor_changed.notify_all()

    def _forward(self, command: Command) -> None:
        if self._actor is not None:
            self._actor.send(command)


def use_own_cores(command: StartJob) -> StartJob:
    """Let the engine use the cores that it reserves: those asked for, or all of this node.

    Raises JobError: more are asked for than there are.
    """
    most = min(usable_cores(), int(node_resources().get("CPU", 0)))
    wanted = command.spec.engine.num_threads or most
    if not 1 <= wanted <= most:
        raise JobError(
            f"the engine is to use {wanted} cores and Ray lets us use {most} of this machine's "
            f"{usable_cores()}; lower --threads"
        )
    engine = replace(command.spec.engine, num_threads=wanted)
    return replace(command, spec=replace(command.spec, engine=engine))


def use_own_device(command: StartJob) -> StartJob:
    """Settle where the engine computes, for the actor gets what that takes.

    Raises JobError: a GPU is asked for, and none can be used, or Ray has none on this node.
    """
    config = command.spec.engine
    try:
        choice = choose_job_device(config)
    except DeviceError as error:
        because = f"; {command.device_reason}" if command.device_reason else ""
        raise JobError(f"{error}{because}") from error
    if choice.device == "gpu" and not node_resources().get("GPU"):
        lacking = "Ray has no GPU on this node (`ray start --num-gpus` tells it of one)"
        if config.device == "gpu":
            raise JobError(f"--device gpu: {lacking}; or take --device cpu")
        choice = DeviceChoice("cpu", lacking)
    return replace(
        command,
        spec=replace(command.spec, engine=replace(config, device=choice.device)),
        device_reason=command.device_reason or choice.reason,
    )


def leave_object_store(command: StartJob) -> StartJob:
    """Count Ray's object store on this node into what is pinned beside a GPU."""
    store_nbytes = int(node_resources().get("object_store_memory", 0))
    config = beside_object_store(command.spec.engine, store_nbytes)
    return replace(command, spec=replace(command.spec, engine=config))


def node_resources() -> dict[str, float]:
    """What Ray has on this node, used or not."""
    node_id = ray.get_runtime_context().get_node_id()
    (node,) = [node for node in ray.nodes() if node["NodeID"] == node_id]
    resources: dict[str, float] = node["Resources"]
    return resources


def _spoils_engine(event: Event) -> bool:
    if isinstance(event, RowsFailed):
        return event.loss.code == "out_of_memory"
    return isinstance(event, JobFailed)


def join_cluster(address: str) -> None:
    """Be a driver of a cluster that is not ours. Raises RunnerError: it does not let us."""
    probe_cluster(address)
    host = address.rpartition(":")[0]
    passed_on = ("PYTHONPATH", HOME_VARIABLE, INSTANCE_VARIABLE)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"env_vars": {k: os.environ[k] for k in passed_on if k in os.environ}},
            _node_ip_address=host if is_on_loopback(address) else None,
        )
    except Exception as error:
        raise RunnerError(refused_by_cluster(address, one_line(error), os.environ)) from error


def one_line(error: Exception) -> str:
    """The error's type and the first line of what it says; the log has the rest."""
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text}"


def ray_processes() -> tuple[ProcessId, ...]:
    """Those processes of our Ray that it cannot live without."""
    children = psutil.Process().children()
    found = [ProcessId.of(child.pid) for child in children if child.name() in _CORE_PROCESSES]
    return tuple(process for process in found if process is not None)


def end_instance(status: int) -> NoReturn:
    """Kill all other processes of this driver, then end this one without ceremony."""
    kill_instance(os.environ[INSTANCE_VARIABLE], [ProcessId.current()], timeout_s=3.0)
    os._exit(status)


def main(make_engine: MakeEngine = load_engine) -> NoReturn:
    """Be the driver process. make_engine: as for `Driver`"""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--temp-dir", type=Path, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    name_each_gpu_once(os.environ)
    Driver(Connection(options.fd), options.temp_dir, make_engine).run()


if __name__ == "__main__":
    main()
