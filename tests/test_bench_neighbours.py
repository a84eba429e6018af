"""The benchmark of a plan and its neighbours: which it takes, and that it runs them all."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from engine.alternatives import Alternative
from engine.plan import Plan
from scripts.bench_neighbours import CHOSEN, NUM_NEIGHBOURS, bench_neighbours, neighbours
from scripts.synth_gguf import Shape, write_model
from tests.test_alternatives import planner

SHAPE = Shape(num_layers=12, hidden=256, ffn=1024, num_heads=4, vocab_size=2000, context_length=512)


def alternative(plan: Plan, decision: str, instead: int, job_s: float) -> Alternative:
    found = replace(plan, predicted={"job_s": job_s})
    return Alternative(decision=decision, chosen="8", instead=str(instead), plan=found)


def test_the_farthest_each_way_and_the_best_of_them_are_run() -> None:
    plan = planner().best()
    found = [
        alternative(plan, "resident layers", 7, 5.0),
        alternative(plan, "resident layers", 4, 6.0),
        alternative(plan, "resident layers", 9, 7.0),
        alternative(plan, "sweep tokens", 4, 9.0),
        alternative(plan, "sweep tokens", 16, 8.0),
        alternative(plan, "KV pages", 4, 10.0),
        alternative(plan, "weights", 0, 1.0),
        Alternative(decision="KV pages", chosen="8", instead="16", plan=None, refusal="no room"),
    ]
    assert [*neighbours(found)] == [
        "resident layers 8 to 4",
        "resident layers 8 to 9",
        "sweep tokens 8 to 16",
        "sweep tokens 8 to 4",
    ]


def test_all_plans_run_all_rows(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", SHAPE, type_name="F16")
    options = argparse.Namespace(
        model=tmp_path / "model.gguf",
        device="cpu",
        kv_type="f16",
        threads=None,
        memory="78MiB",
        reader="auto",
        job_rows=6,
        context=8,
        new_tokens=4,
        repeats=2,
    )
    report = bench_neighbours(options)
    names = [name.removesuffix(": s") for name in report.samples if name.endswith(": s")]
    assert names[0] == CHOSEN and 2 <= len(names) <= 1 + NUM_NEIGHBOURS
    for turn in range(options.repeats):
        ratios = [report.samples[f"{name}: / best"][turn] for name in names]
        assert min(ratios) == 1
    assert all(len(report.samples[f"{name}: predicted / achieved"]) == 2 for name in names)
