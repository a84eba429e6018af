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
from jobs.driver import node_resources, use_own_device
from jobs.engine_actor import EngineHandle
from jobs.messages import Event, JobFailed, StartJob
from jobs.records import JobError, JobSpec, Manifest

SPEC = JobSpec(input="in.parquet", model="model.gguf")


def tell(command: StartJob) -> tuple[Engine, Mapping[str, Any]]:
    """Instead of an engine: what this process sees, and what it was told."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise JobError(f"{visible} {command.spec.engine.device}")


def start(device: Any) -> StartJob:
    engine = EngineConfig(device=device, num_threads=1)
    return StartJob(1, replace(SPEC, engine=engine), Manifest(files=()), 0.0)


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
    found: dict[str, Any] = {"gpus_of_node": node_resources().get("GPU")}
    both = [EngineHandle(1, 1, importable) for _ in range(2)]
    found["both"] = sorted(seen(handle, start("gpu")) for handle in both)
    auto = use_own_device(start("auto"))
    found["auto"] = [auto.spec.engine.device, auto.device_reason]
    on_cpu = EngineHandle(1, 0, importable)
    found["on_cpu"] = seen(on_cpu, auto)
    try:
        EngineHandle(1, 1, importable, start_timeout_s=2.0)
    except JobError as error:
        found["third"] = str(error)
    both[0].kill()
    found["next"] = seen(EngineHandle(1, 1, importable), start("gpu"))
    print(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main()
