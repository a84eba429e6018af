"""What a job asks for and no machine, or not this one, could give: known before it is loaded."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Literal

from engine.budget import DEVICE_FIXED_NBYTES, HOST_PERCENT, most_host_nbytes
from engine.gguf_file import GgufFile
from engine.hparams import Hparams
from engine.loading import model_sizes
from engine.machine import all_memory_nbytes, usable_cores
from engine.model import kv_shape
from engine.planner import Budget, Planner
from engine.requests import EngineConfig, MemoryBudgetError
from jobs.engine_places import share_of
from jobs.gpus import survey_gpus
from jobs.ray_cluster import OBJECT_STORE_NBYTES, cluster_address
from jobs.records import SpecError
from kernels.cpu.pages import DEFAULT_KV_TYPE, page_nbytes, row_nbytes
from kernels.ops import PAGE_TOKENS, KvShape, KvType

DEFAULT_GPU_KV_TYPE: KvType = "f16"


def check_threads(config: EngineConfig) -> None:
    """Raise SpecError: there are fewer cores than worker threads."""
    wanted, cores = config.num_threads, usable_cores()
    if wanted is not None and wanted > cores:
        raise SpecError(f"threads is {wanted}, and this process may use {cores} cores: lower it")


def check_engines(
    config: EngineConfig, device: Literal["cpu", "gpu"], num_engines: int | None
) -> None:
    """Raise SpecError: this machine has fewer GPUs, or cores, than engines are asked for.

    Of a cluster's machines nothing is known here.
    """
    if num_engines is None or cluster_address(os.environ) is not None:
        return
    if device == "gpu":
        most, what = len(survey_gpus().gpus), "GPUs"
    else:
        most, what = config.num_threads or usable_cores(), "cores"
    if num_engines > most:
        raise SpecError(f"engines is {num_engines}, and there are {most} {what} for them: lower it")


def engines_here(device: Literal["cpu", "gpu"], num_engines: int | None) -> int:
    """How many engines a job has on this machine. num_engines: as in `JobSpec`"""
    return num_engines or (max(1, len(survey_gpus().gpus)) if device == "gpu" else 1)


def share_here(
    config: EngineConfig, device: Literal["cpu", "gpu"], num_engines: int | None
) -> EngineConfig:
    """What each of a job's engines has on this machine, were all of its memory free.

    num_engines: as in `JobSpec`
    """
    count = engines_here(device, num_engines)
    if count == 1 or cluster_address(os.environ) is not None:
        return config
    settled = replace(config, device=device, num_threads=config.num_threads or usable_cores())
    return share_of(
        settled,
        count,
        free_nbytes=all_memory_nbytes(),
        host_nbytes=most_host_nbytes(OBJECT_STORE_NBYTES),
    )


def check_budget(
    config: EngineConfig, device: Literal["cpu", "gpu"], file: GgufFile, hparams: Hparams
) -> None:
    """Refuse memory in which the model could not run on a device, were all of it free.

    What is free is looked at when the engine starts: until then another may hold it.

    Raises MemoryBudgetError: says the smallest that would do.
    """
    if device == "cpu":
        check_cpu_budget(config, file, hparams)
    else:
        check_gpu_budget(config, file, hparams)


def check_cpu_budget(config: EngineConfig, file: GgufFile, hparams: Hparams) -> None:
    """See `check_budget`."""
    if config.memory_nbytes is None:
        return
    kv_type = config.kv_type or DEFAULT_KV_TYPE
    shape = kv_shape(hparams)
    sizes = model_sizes(file, hparams, page_nbytes(shape, kv_type), row_nbytes(shape, kv_type))
    budget = Budget(device_nbytes=config.memory_nbytes)
    Planner(hparams, replace(config, kv_type=kv_type), sizes, budget=budget).best()


def check_gpu_budget(config: EngineConfig, file: GgufFile, hparams: Hparams) -> None:
    """The same by what is known of any GPU; what its products need for themselves comes on top."""
    device_nbytes = config.memory_nbytes
    if device_nbytes is None:
        gpus = survey_gpus().gpus
        if not gpus:
            return
        device_nbytes = gpus[0].memory_nbytes
    kv_type = config.kv_type or DEFAULT_GPU_KV_TYPE
    sizes = model_sizes(file, hparams, _least_page_nbytes(kv_shape(hparams), kv_type), 0)
    budget = Budget(
        device_nbytes=device_nbytes,
        host_nbytes=config.host_memory_nbytes or most_host_nbytes(),
        fixed_nbytes=DEVICE_FIXED_NBYTES,
        embedding_in_host=True,
    )
    try:
        Planner(hparams, replace(config, kv_type=kv_type), sizes, budget=budget).best()
    except MemoryBudgetError as error:
        raise MemoryBudgetError(
            f"on a GPU {error}; what its products need for themselves comes on top"
        ) from error


def check_host_memory(config: EngineConfig) -> None:
    """Refuse more pinned memory than this machine may give beside Ray's object store.

    Of a cluster's machines nothing is known here.
    """
    asked_nbytes = config.host_memory_nbytes
    if asked_nbytes is None or cluster_address(os.environ) is not None:
        return
    most_nbytes = most_host_nbytes(OBJECT_STORE_NBYTES)
    if asked_nbytes > most_nbytes:
        raise MemoryBudgetError(
            f"host_memory of {asked_nbytes:,} bytes: this machine can pin {most_nbytes:,}, which "
            f"with Ray's object store is {HOST_PERCENT} % of its memory; lower it, or leave it out"
        )


def beside_object_store(config: EngineConfig, store_nbytes: int) -> EngineConfig:
    """The configuration with host memory that leaves room for Ray's object store."""
    if config.device != "gpu":
        return config
    most_nbytes, asked_nbytes = most_host_nbytes(store_nbytes), config.host_memory_nbytes
    nbytes = most_nbytes if asked_nbytes is None else min(asked_nbytes, most_nbytes)
    return replace(config, host_memory_nbytes=nbytes)


def _least_page_nbytes(shape: KvShape, kv_type: KvType) -> int:
    """Of a KV page without padding."""
    value_nbytes = {"f32": 4, "f16": 2, "int8": 1}[kv_type]
    token_len = shape.key_length + shape.value_length
    return shape.num_layers * shape.num_kv_heads * PAGE_TOKENS * token_len * value_nbytes
