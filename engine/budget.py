"""The memory that an engine may divide: what is free now, within what was asked for."""

from __future__ import annotations

import functools

from engine.gguf_file import GgufFile
from engine.hparams import Hparams
from engine.machine import RESERVE_SHARE, all_memory_nbytes, free_memory_nbytes
from engine.plan import Budget
from engine.requests import EngineConfig
from engine.weights import HEAD_TENSOR, LAYER_PARTS
from kernels.ops import Ops

HOST_PERCENT = 85  # of this machine's memory, most that is pinned or in an object store
DEVICE_FIXED_NBYTES = 960 << 20  # the driver's context, kernels, workspaces of the library


def free_budget(file: GgufFile, hparams: Hparams, config: EngineConfig, ops: Ops) -> Budget:
    """The memory that is free now."""
    if ops.name == "cpu":
        return Budget(device_nbytes=free_memory_nbytes(config.memory_nbytes))
    free_nbytes, _ = ops.memory_info()
    kept_nbytes = free_nbytes - free_nbytes // RESERVE_SHARE  # for the display, and others
    return Budget(
        device_nbytes=min(free_nbytes, config.memory_nbytes or kept_nbytes),
        host_nbytes=host_budget_nbytes(config.host_memory_nbytes),
        fixed_nbytes=DEVICE_FIXED_NBYTES,
        scratch_nbytes=functools.partial(ops.scratch_nbytes, product_shapes(file, hparams)),
        embedding_in_host=True,
    )


def most_host_nbytes(beside_nbytes: int = 0) -> int:
    """What may be pinned beside a GPU: it cannot be swapped, so some is left to all others.

    beside_nbytes: of the same share, what an object store may take
    """
    return max(0, all_memory_nbytes() * HOST_PERCENT // 100 - beside_nbytes)


def host_budget_nbytes(asked_nbytes: int | None) -> int:
    """What may be pinned now: what was asked for, as far as it is free and may be taken."""
    allowed_nbytes = min(free_memory_nbytes(), most_host_nbytes())
    return allowed_nbytes if asked_nbytes is None else min(asked_nbytes, allowed_nbytes)


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
