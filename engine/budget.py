"""The memory that an engine may divide: what is free now, within what was asked for."""

from __future__ import annotations

import functools

from engine.gguf_file import GgufFile
from engine.hparams import Hparams
from engine.machine import RESERVE_SHARE, free_memory_nbytes
from engine.plan import Budget
from engine.requests import EngineConfig
from engine.weights import HEAD_TENSOR, LAYER_PARTS
from kernels.ops import Ops

DEVICE_FIXED_NBYTES = 960 << 20  # the driver's context, kernels, workspaces of the library


def free_budget(file: GgufFile, hparams: Hparams, config: EngineConfig, ops: Ops) -> Budget:
    """The memory that is free now."""
    if ops.name == "cpu":
        return Budget(device_nbytes=free_memory_nbytes(config.memory_nbytes))
    free_nbytes, _ = ops.memory_info()
    kept_nbytes = free_nbytes - free_nbytes // RESERVE_SHARE  # for the display, and others
    return Budget(
        device_nbytes=min(free_nbytes, config.memory_nbytes or kept_nbytes),
        host_nbytes=free_memory_nbytes(config.host_memory_nbytes),
        fixed_nbytes=DEVICE_FIXED_NBYTES,
        scratch_nbytes=functools.partial(ops.scratch_nbytes, product_shapes(file, hparams)),
        embedding_in_host=True,
    )


def product_shapes(file: GgufFile, hparams: Hparams) -> list[tuple[int, int]]:
    """(num_outputs, num_inputs) of all matrices, stacked as they are multiplied."""
    stacks = [
        [f"blk.{layer}.{part}.weight" for part in parts]
        for layer in range(hparams.num_layers)
        for parts in LAYER_PARTS.values()
    ]
    stacks.append(["token_embd.weight" if hparams.tied_embeddings else HEAD_TENSOR])
    found = {
        (sum(file.tensors[n].shape[0] for n in names), file.tensors[names[0]].shape[1])
        for names in stacks
    }
    return sorted(found)
