"""Where a job computes: chosen before its engine's process starts, and told with the reason."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

from engine.devices import DeviceChoice, choose_device
from engine.requests import DeviceError, EngineConfig
from jobs.gpus import VISIBLE_VARIABLE, driver_version, each_gpu_once, survey_gpus
from kernels.ops import Ops


def choose_job_device(config: EngineConfig) -> DeviceChoice:
    """The device of a job on this machine, under this process's CUDA_VISIBLE_DEVICES.

    Raises DeviceError: a GPU was asked for, and none can be used; says why.
    """
    problem = "" if config.device == "cpu" else survey_gpus().problem
    if not problem:
        with each_gpu_once(os.environ):
            return choose_device(config)
    if config.device == "gpu":
        raise DeviceError(f"--device gpu: {problem}; --device cpu computes without one")
    return DeviceChoice("cpu", f"no GPU can be used: {problem}")


def device_notes(
    config: EngineConfig, choice: DeviceChoice, num_engines: int | None = None
) -> Iterator[str]:
    """What the job's owner may want to know of its device when it is submitted.

    num_engines: as in `JobSpec`

    Nothing where no choice was left, or where this machine has no other.
    """
    if config.device != "auto":
        return
    if choice.device == "cpu" and config.host_memory_nbytes is not None:
        yield "host_memory has no effect: there is no GPU that it could serve"
    if choice.device == "cpu" and config.host_kv == "never":
        yield "host_kv has no effect: there is no GPU whose KV pages would leave it"
    gpus = survey_gpus().gpus
    if choice.device == "gpu":
        count = num_engines or len(gpus)
        which = "the GPU" if count == 1 else f"{count} GPUs, the first of which is"
        yield f"computes on {which} {gpus[0].name}" if gpus else "computes on a GPU"
    elif gpus or importlib.util.find_spec("cupy") is not None:
        yield f"computes on the CPU; {choice.reason}"


def device_facts(ops: Ops, config: EngineConfig) -> dict[str, Any]:
    """What the job's record says of the device that computes.

    device_name: "cpu", or the GPU's name
    cuda_visible_devices: as the engine's process has it; None where it is not set
    driver_version, driver_cuda, cuda_runtime: of a GPU: the driver's own version, the newest CUDA
        that it runs, and the one that is used
    device_nbytes, device_free_nbytes: a GPU's memory, and what of it no process had
    device_budget_nbytes: what --memory allows of it; None for what is free
    """
    facts: dict[str, Any] = {
        "device_name": getattr(ops, "device_name", ops.name),
        "cuda_visible_devices": os.environ.get(VISIBLE_VARIABLE),
    }
    if ops.name != "cpu":
        gpu: Any = ops
        free_nbytes, nbytes = gpu.memory_info()
        facts |= {
            "driver_version": driver_version(),
            "driver_cuda": gpu.driver_version(),
            "cuda_runtime": gpu.runtime_version(),
            "device_nbytes": nbytes,
            "device_free_nbytes": free_nbytes,
            "device_budget_nbytes": config.memory_nbytes,
        }
    return facts
