"""The driver: the process that talks to Ray, a child of the runner.

`python -m jobs.driver --fd N --temp-dir DIR`: N is the child's end of a socket pair. Its main
thread starts Ray and then takes commands from the runner; the threads of a fleet pass them on to
its engine actors, and carry events the other way. When the pipe ends, the runner is gone or wants
us gone: then everything of Ray is killed, and this process ends.
"""

from __future__ import annotations

import argparse
import logging
import os
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import psutil
import ray

from engine import DeviceError
from engine.devices import DeviceChoice
from engine.machine import usable_cores
from jobs.engine_load import load_engine
from jobs.engine_loop import MakeEngine
from jobs.engine_places import Node, place_engines
from jobs.fleet import EngineKey, Fleet, Link, one_line
from jobs.gpus import name_each_gpu_once, survey_gpus
from jobs.home import HOME_VARIABLE
from jobs.job_device import choose_job_device
from jobs.messages import (
    Command,
    DriverFailed,
    DriverReady,
    EnginesPlaced,
    Event,
    JobFailed,
    PlaceEngines,
)
from jobs.node_facts import Wanted
from jobs.processes import INSTANCE_VARIABLE, ProcessId, kill_all, kill_instance
from jobs.ray_cluster import (
    OBJECT_STORE_NBYTES,
    cluster_address,
    is_on_loopback,
    probe_cluster,
    refused_by_cluster,
)
from jobs.ray_nodes import survey_nodes
from jobs.records import JobError, RunnerError

JOIN_TIMEOUT_S = 30.0
_CORE_PROCESSES = ("raylet", "gcs_server")

log = logging.getLogger("jobs.driver")


class Driver:
    """Keeps a fleet of engine actors and passes messages between it and the runner.

    make_engine: loads the engine of a job, in the actor
    """

    def __init__(
        self, pipe: Connection, temp_dir: Path, make_engine: MakeEngine = load_engine
    ) -> None:
        self._make_engine = make_engine
        self._pipe = pipe
        self._pipe_lock = threading.Lock()
        self._temp_dir = temp_dir
        self._fleet: Fleet | None = None
        self._device_reason = ""

    def run(self) -> NoReturn:
        """Serve until the pipe ends or Ray is lost; never returns."""
        try:
            self._start_ray()
            while (command := self._receive()) is not None:
                self._obey(command)
        except Exception as error:
            self._give_up(error)
        # In a cluster that is not ours, nothing else would lead to the actors.
        kill_all(self._fleet.processes if self._fleet else [], timeout_s=3.0)
        end_instance(0)

    def _receive(self) -> Command | None:
        """The next command; None when the pipe has ended."""
        try:
            command: Command = self._pipe.recv()
        except (EOFError, OSError):
            return None
        return command

    def _give_up(self, error: Exception) -> NoReturn:
        log.error("the driver ends", exc_info=error)
        if isinstance(error, RunnerError):
            self._send(DriverFailed(str(error), is_final=True))
        else:
            self._send(DriverFailed(one_line(error)))
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

    def _obey(self, command: Command) -> None:
        if isinstance(command, PlaceEngines):
            try:
                self._place(command)
            except (JobError, OSError) as error:
                self._send(JobFailed(command.attempt, str(error), traceback.format_exc()))
        elif self._fleet is not None:
            self._fleet.send(command)

    def _place(self, command: PlaceEngines) -> None:
        """Have the engines that a job wants: those that are there, or others in their place."""
        key = EngineKey.of(command)
        if self._fleet is None or self._fleet.key != key:
            old, self._fleet = self._fleet, None
            if old is not None:
                old.close()
            wanted = Wanted(model=key.model, model_nbytes=key.nbytes, manifest=command.manifest)
            nodes = survey_nodes(wanted)
            choice = choose_device(command, nodes)
            config = replace(command.spec.engine, device=choice.device)
            places = place_engines(nodes, config, command.spec.engines)
            self._fleet = Fleet(key, places, self._make_engine, self._link())
            self._device_reason = choice.reason
        reason = command.device_reason or self._device_reason
        self._send(EnginesPlaced(command.attempt, self._fleet.node_names, reason))

    def _link(self) -> Link:
        is_own = cluster_address(os.environ) is None
        return Link(self._send, self._give_up, self._temp_dir if is_own else None)


def choose_device(command: PlaceEngines, nodes: Sequence[Node]) -> DeviceChoice:
    """Settle where the engines compute, for their actors get what that takes.

    Raises JobError: GPUs are asked for, and none can be used, or Ray has none.
    """
    config = command.spec.engine
    elsewhere = [node.name for node in nodes[1:] if node.num_gpus]
    if config.device != "cpu" and elsewhere and not nodes[0].num_gpus:
        return DeviceChoice("gpu", f"one is there, on {elsewhere[0]}")
    try:
        choice = choose_job_device(config)
    except DeviceError as error:
        because = f"; {command.device_reason}" if command.device_reason else ""
        raise JobError(f"{error}{because}") from error
    if choice.device == "gpu" and not any(node.num_gpus for node in nodes):
        lacking = "Ray has no GPU (`ray start --num-gpus` tells it of those of a node)"
        if config.device == "gpu":
            raise JobError(f"--device gpu: {lacking}; or take --device cpu")
        choice = DeviceChoice("cpu", lacking)
    return choice


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
