"""Which backend an engine computes on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from engine.machine import usable_cores
from engine.requests import DeviceError, EngineConfig
from kernels.ops import (
    PAGE_TOKENS,
    KernelError,
    KvShape,
    KvType,
    Ops,
    shares_partial_pages,
)

_ANY_SHAPE = KvShape(num_layers=1, num_kv_heads=1, key_length=32, value_length=32)
MOST_FEW_TOKENS = 8  # sweeps of no more go by products of few tokens on a GPU


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """device: what computes; reason: why that one, for the job's record."""

    device: Literal["cpu", "gpu"]
    reason: str


def choose_device(config: EngineConfig) -> DeviceChoice:
    """The device that a configuration leads to on this machine; loads no backend.

    Raises DeviceError: a GPU was asked for, and none can be used.
    """
    if config.device == "cpu":
        return DeviceChoice("cpu", "asked for")
    from kernels.cuda import refusal

    refused = refusal()
    if config.device == "gpu":
        if refused is not None:
            raise DeviceError(f"--device gpu: {refused}")
        return DeviceChoice("gpu", "asked for")
    if refused is not None:
        return DeviceChoice("cpu", f"no GPU can be used: {refused}")
    return DeviceChoice("gpu", "one is there")


def open_ops(config: EngineConfig) -> Ops:
    """The backend for a configuration. Raises DeviceError."""
    if choose_device(config).device == "cpu":
        from kernels.cpu import CpuOps

        return CpuOps(config.num_threads or usable_cores())
    from kernels.cuda import cuda_ops

    few = config.sweep_tokens is not None and config.sweep_tokens <= MOST_FEW_TOKENS
    try:
        return cuda_ops(products="few" if few else "tiles")
    except KernelError as error:
        raise DeviceError(str(error)) from error


def kv_type(config: EngineConfig) -> KvType:
    """The KV cache's element type of a resolved configuration."""
    assert config.kv_type is not None, "resolved() fills it in"
    return config.kv_type


def chunk_page_tokens(kv_type: KvType) -> int:
    """Tokens of the pages that chunks must mind, as in `engine.scheduler`; 1: they need not."""
    return 1 if shares_partial_pages(kv_type) else PAGE_TOKENS


def resolved(config: EngineConfig, ops: Ops) -> EngineConfig:
    """The configuration with what the backend decides filled in.

    Raises DeviceError: the backend has no KV cache of the type that was asked for.
    """
    kv_type = config.kv_type or ops.default_kv_type
    if (refused := kv_type_refusal(kv_type, ops)) is not None:
        raise DeviceError(f"--kv-type {kv_type}: {refused}")
    return replace(config, kv_type=kv_type)


def kv_type_refusal(kv_type: KvType, ops: Ops) -> str | None:
    """Why the backend has no KV cache of a type; None where it has."""
    try:
        ops.kv_page_nbytes(_ANY_SHAPE, kv_type)
    except KernelError as error:
        return str(error)
    return None
