"""Engine actors of a Ray that counts two GPUs, there or not: what each of them sees.

`python -m tests.gpu_actors TEMP_DIR` prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray

from engine import Engine, EngineConfig
from jobs.driver import choose_device
from jobs.engine_actor import EngineHandle
from jobs.engine_loop import MakeEngine
from jobs.engine_places import Place, place_engines
from jobs.messages import Event, JobFailed, PlaceEngines, StartJob
from jobs.node_facts import Wanted
from jobs.ray_nodes import survey_nodes
from jobs.records import JobError, JobSpec, Manifest

SPEC = JobSpec(input="in.parquet", model="model.gguf")


def tell(command: StartJob) -> tuple[Engine, Mapping[str, Any]]:
    """Instead of an engine: what this process sees, and what it was told."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise JobError(f"{visible} {command.spec.engine.device}")


def start(device: Any) -> StartJob:
    engine = EngineConfig(device=device, num_threads=1)
    return StartJob(1, replace(SPEC, engine=engine), Manifest(files=()), 0.0)


def handle_at(place: Place, make_engine: MakeEngine, **options: Any) -> EngineHandle:
    threads = place.config.num_threads
    assert threads is not None
    node = place.node
    return EngineHandle(node.id, node.name, threads, place.num_gpus, make_engine, **options)


def seen(handle: EngineHandle, command: StartJob) -> str:
    handle.send(command)
    events: list[Event] = []
    while not events:
        events = handle.poll(1.0)
    (failed,) = events
    assert isinstance(failed, JobFailed), failed
    return failed.reason


def main() -> None:
    from tests.gpu_actors import tell as importable

    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=2,
        object_store_memory=80 << 20,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=sys.argv[1],
        _node_ip_address="127.0.0.1",
    )
    nothing = Wanted(model="/dev/null", model_nbytes=0, manifest=Manifest(files=()))
    nodes = survey_nodes(nothing)
    found: dict[str, Any] = {"gpus_of_node": nodes[0].num_gpus}
    config = EngineConfig(device="gpu", num_threads=2)
    places = place_engines(nodes, config, None)
    both = [handle_at(place, importable) for place in places]
    found["both"] = sorted(seen(handle, start("gpu")) for handle in both)
    auto = choose_device(PlaceEngines(1, SPEC, Manifest(files=())), nodes)
    found["auto"] = [auto.device, auto.reason]
    on_cpu = handle_at(replace(places[0], num_gpus=0), importable)
    found["on_cpu"] = seen(on_cpu, start(auto.device))
    try:
        handle_at(places[0], importable, start_timeout_s=2.0)
    except JobError as error:
        found["third"] = str(error)
    both[0].kill()
    found["next"] = seen(handle_at(places[0], importable), start("gpu"))
    print(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main()
