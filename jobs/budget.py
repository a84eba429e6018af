"""Memory budgets that no machine could work with, known before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

from engine.gguf_file import GgufFile
from engine.hparams import Hparams
from engine.loading import model_sizes
from engine.model import kv_shape
from engine.planner import Budget, Planner
from engine.requests import EngineConfig
from kernels.cpu.pages import DEFAULT_KV_TYPE, page_nbytes, row_nbytes


def check_cpu_budget(config: EngineConfig, file: GgufFile, hparams: Hparams) -> None:
    """Refuse a --memory in which the model could not run on a CPU, were all of it free.

    What is free is looked at when the engine starts: until then another may hold it.

    Raises MemoryBudgetError: says the smallest that would do.
    """
    if config.memory_nbytes is None:
        return
    kv_type = config.kv_type or DEFAULT_KV_TYPE
    shape = kv_shape(hparams)
    sizes = model_sizes(file, hparams, page_nbytes(shape, kv_type), row_nbytes(shape, kv_type))
    budget = Budget(device_nbytes=config.memory_nbytes)
    Planner(hparams, replace(config, kv_type=kv_type), sizes, budget=budget).best()
