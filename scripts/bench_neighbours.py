"""The plan that was chosen against plans beside it, all of them run on the same rows."""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine import EngineConfig, Request, SamplingParams
from engine.alternatives import Alternative
from engine.devices import open_ops, resolved
from engine.engine import Engine
from engine.gguf_file import GgufFile
from engine.hparams import read_hparams
from engine.planner import Plan, Rates, Workload
from jobs.job_plan import JobPlan, plan_alternatives, plan_job
from ntx_batch.spec import parse_size
from scripts.bench_report import Report

CHOSEN = "chosen"
NUM_NEIGHBOURS = 4
DECISIONS = ("resident layers", "sweep tokens", "KV pages")


def neighbours(found: Sequence[Alternative], num: int = NUM_NEIGHBOURS) -> dict[str, Plan]:
    """Of the alternatives that fit, the farthest each way of a decision; the best of these."""
    farthest: dict[tuple[str, bool], Alternative] = {}
    for each in found:
        if each.plan is None or each.decision not in DECISIONS:
            continue
        step = int(each.instead) - int(each.chosen)
        key = (each.decision, step > 0)
        if key not in farthest or abs(step) > _step(farthest[key]):
            farthest[key] = each
    plans = {
        f"{each.decision} {each.chosen} to {each.instead}": each.plan
        for each in farthest.values()
        if each.plan is not None
    }
    best = sorted(plans, key=lambda name: float(plans[name].predicted["job_s"]))[:num]
    return {name: plans[name] for name in best}


def _step(each: Alternative) -> int:
    return abs(int(each.instead) - int(each.chosen))


def engine_config(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        device=options.device,
        kv_type=options.kv_type,
        num_threads=options.threads,
        memory_nbytes=None if options.memory is None else parse_size(options.memory),
        reader=options.reader,
    )


def make_plans(
    options: argparse.Namespace, config: EngineConfig, work: Workload
) -> tuple[JobPlan, dict[str, Plan]]:
    """The plan of a job as `ntx-batch plan` makes it, and the plans to run."""
    file = GgufFile.open(options.model)
    hparams, ops = read_hparams(file), open_ops(config)
    config = resolved(config, ops)
    try:
        with tempfile.TemporaryDirectory() as folder:
            planned = plan_job(
                file,
                hparams,
                config,
                ops,
                sample=lambda: work,
                cache_dir=Path(folder),
                always_probe=True,
            )
        found = plan_alternatives(planned, file, hparams, config, ops)
    finally:
        ops.close()
    return planned, {CHOSEN: planned.plan, **neighbours(found)}


def run_s(
    options: argparse.Namespace, config: EngineConfig, plan: Plan, rates: Rates | None
) -> float:
    """Seconds of all rows under a plan, in an engine that is loaded and warm."""
    with Engine(options.model, config, plan=plan, rates=rates) as engine:
        low, high = 10, engine.tokenizer.num_tokens - 10
        shape = (options.job_rows, options.context)
        prompts = np.random.default_rng(5).integers(low, high, shape).astype(np.int32)
        _run(engine, prompts[:1, :2], 2)
        started = time.perf_counter()
        _run(engine, prompts, options.new_tokens)
        return time.perf_counter() - started


def _run(engine: Engine, prompts: np.ndarray, new_tokens: int) -> None:
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    for index, token_ids in enumerate(prompts):
        engine.add(Request(row_index=index, token_ids=token_ids, params=params))
    finished = 0
    while engine.has_work:
        finished += sum(row.status == "ok" for row in engine.sweep())
    assert finished == len(prompts), "a row failed"


def bench_neighbours(options: argparse.Namespace) -> Report:
    """Seconds of each plan, over the fastest of the round, and predicted over achieved."""
    rows = options.job_rows
    title = f"a plan and its neighbours, {rows} rows, {options.context} in"
    report = Report(f"{title}, {options.new_tokens} out, memory {options.memory}")
    work = Workload(
        num_rows=rows,
        prompt_tokens=options.context,
        output_tokens=options.new_tokens,
        longest_tokens=options.context + options.new_tokens - 1,
    )
    config = engine_config(options)
    planned, plans = make_plans(options, config, work)
    for name, plan in plans.items():
        report.facts[name] = (
            f"{sum(plan.resident)} layers, {plan.kv_pages} pages, {plan.max_rows} rows, "
            f"{plan.sweep_tokens} tokens; predicted {plan.predicted['job_s']:.1f} s"
        )
    for number in range(options.repeats):
        names = [*plans]
        turned = names[number % len(names) :] + names[: number % len(names)]
        taken = {}
        for name in turned:
            taken[name] = run_s(options, config, plans[name], planned.rates)
            gc.collect()  # an engine's memory before the next one's
        for name in names:
            report.add(f"{name}: s", taken[name])
            report.add(f"{name}: / best", taken[name] / min(taken.values()))
            predicted_s = plans[name].predicted["job_s"]
            report.add(f"{name}: predicted / achieved", predicted_s / taken[name])
    return report
