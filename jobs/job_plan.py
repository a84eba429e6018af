"""The plan of a job: its model's sizes, what the machine was measured to do, and its own rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.gguf_file import GgufFile
from engine.hparams import Hparams
from engine.loading import make_planner
from engine.planner import Budget, Plan, Rates, Workload
from engine.requests import EngineConfig, MemoryBudgetError
from engine.weights import HEAD_TENSOR, layer_tensor_names
from kernels.ops import Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """rates, workload: what the plan was made for; None where it would not change it

    budget: what there was to divide
    probe_s: seconds that measuring took
    """

    plan: Plan
    budget: Budget
    rates: Rates | None
    workload: Workload | None
    probe_s: float


def plan_job(
    file: GgufFile,
    hparams: Hparams,
    config: EngineConfig,
    ops: Ops,
    *,
    sample: Callable[[], Workload],
    cache_dir: Path,
    always_probe: bool = False,
) -> JobPlan:
    """The best plan for a job. A model that fits is not measured: that takes seconds.

    sample: finds out what is to be done
    cache_dir: keeps what is known of disks
    always_probe: measure in any case, to predict

    Raises MemoryBudgetError, ReadError, and what `sample` raises.
    """
    planner = make_planner(file, hparams, config, ops)
    try:
        plan = planner.best()
    except MemoryBudgetError:
        # What the rows of this job need is more than any row needs: that is what to name.
        make_planner(file, hparams, config, ops, workload=sample()).best()
        raise
    on_device = planner.budget.host_nbytes is not None
    if not (plan.streams or always_probe or on_device):
        return JobPlan(plan=plan, budget=planner.budget, rates=None, workload=None, probe_s=0.0)
    workload = sample()
    if on_device and not plan.streams:
        # A device's memory is short: rows may need so much of it that layers have to stream.
        plan = make_planner(file, hparams, config, ops, workload=workload).best()
    measures = plan.streams or always_probe
    started = time.monotonic()
    rates = _probe(file, hparams, config, ops, plan, cache_dir) if measures else None
    probe_s = round(time.monotonic() - started, 3)
    planner = make_planner(file, hparams, config, ops, rates=rates, workload=workload)
    plan = planner.best() if plan.streams or on_device else planner.predicted(plan)
    return JobPlan(
        plan=plan, budget=planner.budget, rates=rates, workload=workload, probe_s=probe_s
    )


def _probe(
    file: GgufFile, hparams: Hparams, config: EngineConfig, ops: Ops, plan: Plan, cache_dir: Path
) -> Rates:
    # Numba comes with it: only what measures loads it.
    from engine.rates import probe_rates

    return probe_rates(
        ops,
        layer_types(file, hparams),
        # Measuring the disk drops the model from the page cache, from which it would load faster.
        file.paths if plan.disk_nbytes else (),
        cache_dir,
        hparams=hparams,
        head_type=file.tensors[head_tensor(hparams)].type_name,
        kv_type=config.kv_type,
        expand=plan.expand,
    )


def layer_types(file: GgufFile, hparams: Hparams) -> set[str]:
    """Types of the matrices of the layers."""
    names = [name for layer in range(hparams.num_layers) for name in layer_tensor_names(layer)]
    return {file.tensors[name].type_name for name in names}


def head_tensor(hparams: Hparams) -> str:
    """Name of the output head."""
    return "token_embd.weight" if hparams.tied_embeddings else HEAD_TENSOR


def product_types(file: GgufFile, hparams: Hparams) -> set[str]:
    """Types of all matrices that take part in products."""
    return layer_types(file, hparams) | {file.tensors[head_tensor(hparams)].type_name}
