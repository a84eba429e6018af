"""The plan of a job: its model's sizes, what the machine was measured to do, and its own rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from engine.alternatives import Alternative, alternatives, of_kv_type
from engine.devices import kv_type as kv_type_of
from engine.devices import kv_type_refusal
from engine.gguf_file import GgufFile
from engine.hparams import Hparams
from engine.kv_cache import pages_for
from engine.loading import make_planner
from engine.planner import Budget, Plan, Planner, Rates, Workload
from engine.requests import EngineConfig, MemoryBudgetError
from engine.ways import way_of
from engine.weights import HEAD_TENSOR, layer_tensor_names
from kernels.ops import KvType, Ops


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

    Its rows are looked at where the plan depends on them: where weights stream, on a GPU, and
    where its KV cache might not hold one of them.

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
    holds_all = plan.total_kv_pages >= pages_for(hparams.context_length)
    if not (plan.streams or always_probe or on_device) and holds_all:
        return JobPlan(plan=plan, budget=planner.budget, rates=None, workload=None, probe_s=0.0)
    workload = sample()
    depends = on_device or plan.total_kv_pages < pages_for(workload.longest_tokens)
    if depends and not plan.streams:
        # Memory is short: rows may need so much of it that layers have to stream.
        plan = make_planner(file, hparams, config, ops, workload=workload).best()
    measures = plan.streams or always_probe
    started = time.monotonic()
    rates = None
    if measures:
        expand = None if always_probe and _may_expand(planner, plan) else plan.expand
        rates = _probe(file, hparams, config, ops, plan, cache_dir, expand)
    probe_s = round(time.monotonic() - started, 3)
    planner = make_planner(file, hparams, config, ops, rates=rates, workload=workload)
    plan = planner.best() if plan.streams or depends else planner.predicted(plan)
    return JobPlan(
        plan=plan, budget=planner.budget, rates=rates, workload=workload, probe_s=probe_s
    )


def plan_alternatives(
    planned: JobPlan, file: GgufFile, hparams: Hparams, config: EngineConfig, ops: Ops
) -> list[Alternative]:
    """What else there was to choose from, for a plan whose rates and workload are known.

    KV types are the user's choice; they are among these so that one sees what another would give.
    """

    def planner(kv_type: KvType) -> Planner:
        return make_planner(
            file,
            hparams,
            replace(config, kv_type=kv_type),
            ops,
            rates=planned.rates,
            workload=planned.workload,
            budget=planned.budget,
        )

    chosen = kv_type_of(config)
    found = alternatives(planner(chosen), planned.plan)
    for other in get_args(KvType):
        if other != chosen and kv_type_refusal(other, ops) is None:
            found.append(of_kv_type(planner(other), planned.plan, chosen=chosen, kv_type=other))
    return found


def _may_expand(planner: Planner, plan: Plan) -> bool:
    """Whether weights could be kept either way, on a machine where that is looked at."""
    whole = replace(way_of(plan), num_resident=len(plan.resident), head_resident=True)
    on_device = planner.budget.host_nbytes is not None
    both = (planner.plan_of(replace(whole, expand=expand)) for expand in (False, True))
    return not on_device and None not in both


def _probe(
    file: GgufFile,
    hparams: Hparams,
    config: EngineConfig,
    ops: Ops,
    plan: Plan,
    cache_dir: Path,
    expand: bool | None,
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
        expand=expand,
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
