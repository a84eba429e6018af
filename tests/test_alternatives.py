"""Plans beside the chosen one: one decision differs, budgets hold, and none is clearly better."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.alternatives import Alternative, alternatives, of_kv_type
from engine.planner import AS_GOOD, Budget, ModelSizes, Plan, Planner, Rates, Workload
from engine.requests import EngineConfig, MemoryBudgetError
from tests.test_planner import MIB, budgets, models, rates, sized_hparams, sizes, workloads

MODEL = sizes(30, 60 * MIB, 64 * MIB, 2 * MIB)
FAST_DISK = Rates(disk_nbytes_per_s=5e9, values_per_s={"F16": 1e10}, flops_per_s=1e13)
WORK = Workload(num_rows=10_000, prompt_tokens=64, output_tokens=64)


def planner(
    model: ModelSizes = MODEL,
    free: int = 1536 * MIB,
    speed: Rates = FAST_DISK,
    work: Workload = WORK,
    **config: object,
) -> Planner:
    return Planner(
        sized_hparams(len(model.layers)),
        EngineConfig(memory_nbytes=free, **config),  # type: ignore[arg-type]
        model,
        budget=Budget(device_nbytes=free),
        rates=speed,
        workload=work,
    )


def by_decision(found: list[Alternative], decision: str) -> list[Alternative]:
    return [each for each in found if each.decision == decision]


def differing(a: Plan, b: Plan) -> set[str]:
    """Which decisions differ; how many rows and pages there are follows from the others."""
    names = ("expand", "resident", "head_resident", "sweep_tokens")
    return {name for name in names if getattr(a, name) != getattr(b, name)}


@settings(max_examples=40)
@given(models, budgets, rates, workloads)
def test_one_decision_differs_and_the_budget_holds(
    model: ModelSizes, free: int, speed: Rates, work: Workload
) -> None:
    planning = planner(model, free, speed, work)
    try:
        plan = planning.best()
    except MemoryBudgetError:
        assume(False)
    for other in alternatives(planning, plan):
        assert (other.plan is None) == bool(other.refusal)
        if other.plan is not None:
            assert other.plan.device_nbytes <= free
            assert len(differing(plan, other.plan)) == (other.decision != "KV pages")
            assert other.plan.predicted["job_s"] > 0


@settings(max_examples=40)
@given(models, budgets, rates, workloads)
def test_none_that_the_planner_could_take_is_clearly_shorter(
    model: ModelSizes, free: int, speed: Rates, work: Workload
) -> None:
    planning = planner(model, free, speed, work)
    try:
        plan = planning.best()
    except MemoryBudgetError:
        assume(False)
    assume(plan.streams)
    for other in alternatives(planning, plan):
        if other.plan is not None and other.decision in ("resident layers", "sweep tokens"):
            assert other.plan.predicted["job_s"] * AS_GOOD >= plan.predicted["job_s"]


def test_layers_rows_sweeps_and_weights_are_all_looked_at() -> None:
    planning = planner()
    plan = planning.best()
    found = alternatives(planning, plan)
    layers = by_decision(found, "resident layers")
    assert {int(each.instead) for each in layers} >= {sum(plan.resident) + 1}
    assert all(each.chosen == str(sum(plan.resident)) for each in layers)
    sweeps = [int(each.instead) for each in by_decision(found, "sweep tokens")]
    assert sweeps and plan.sweep_tokens not in sweeps
    fewer, more = by_decision(found, "KV pages")
    assert fewer.plan is not None and fewer.plan.kv_pages == plan.kv_pages // 2
    assert fewer.plan.predicted["rows_on_board"] < plan.predicted["rows_on_board"]
    assert fewer.plan.predicted["tokens_per_s"] < plan.predicted["tokens_per_s"]
    over = re.fullmatch(r"([\d,]+) bytes more than there are", more.refusal)
    assert over is not None
    (weights,) = by_decision(found, "weights")
    assert weights.instead == "as float32" and "bytes more than there are" in weights.refusal


def test_a_refusal_tells_exactly_what_is_missing() -> None:
    plan = planner().best()
    _, refusal = planner().with_pages(plan, 2 * plan.kv_pages)
    over = int(refusal.split()[0].replace(",", ""))
    larger = planner(free=1536 * MIB + over)
    assert larger.with_pages(plan, 2 * plan.kv_pages)[0] is not None
    assert planner(free=1536 * MIB + over - 1).with_pages(plan, 2 * plan.kv_pages)[0] is None


def test_too_few_pages_for_a_row_are_no_alternative() -> None:
    long = replace(WORK, longest_tokens=3000)
    planning = planner(work=long)
    plan = planning.best()
    assert plan.kv_pages >= -(-3000 // 32)
    assert planning.with_pages(plan, 90) == (None, "a row may take 94 pages")


def test_what_was_asked_for_is_said_to_be() -> None:
    planning = planner(sweep_tokens=100, kv_memory_nbytes=200 * MIB, expand="never")
    found = alternatives(planning, planning.best())
    asked = {each.decision for each in found if each.is_asked}
    assert asked == {"sweep tokens", "KV pages", "weights"}
    assert {each.instead for each in by_decision(found, "sweep tokens")} == {"64", "128"}


def test_weights_that_nobody_measured_are_not_predicted() -> None:
    """The rates know F16 alone; kept as float32 they could be anything."""
    planning = planner(free=40_000 * MIB, expand="never")
    assert not by_decision(alternatives(planning, planning.best()), "weights")
    both = replace(FAST_DISK, values_per_s={"F16": 1e10, "expanded": 2e10})
    planning = planner(free=40_000 * MIB, speed=both, expand="never")
    (other,) = by_decision(alternatives(planning, planning.best()), "weights")
    assert other.plan is not None and other.plan.expand


def test_another_kv_type_is_the_users_choice() -> None:
    planning = planner(kv_type="f32")
    plan = planning.best()
    halves = planner(replace(MODEL, page_nbytes=MIB), kv_type="f16")
    other = of_kv_type(halves, plan, chosen="f32", kv_type="f16")
    assert (other.chosen, other.instead, other.is_asked) == ("f32", "f16", True)
    assert other.plan is not None and other.plan.kv_pages > 1.8 * plan.kv_pages
    assert plan.streams and other.plan.predicted["tokens_per_s"] > plan.predicted["tokens_per_s"]


# ---- what rows share, and the longest of them ------------------------------------------------


@given(
    st.integers(1, 400),
    st.integers(1, 200),
    st.floats(0, 1),
    st.integers(1, 5000),
)
def test_rows_on_board_fit_with_their_shared_pages_counted_once(
    prompt: int, output: int, share: float, num_pages: int
) -> None:
    work = replace(WORK, prompt_tokens=prompt, output_tokens=output)
    own = planner(work=work)._predictor
    shared = planner(work=replace(work, reused_pages=share * (prompt // 32)))._predictor
    rows = shared.rows_in(num_pages)
    assert rows >= own.rows_in(num_pages)
    pages = rows * (shared.mean_pages - shared.shared_pages) + shared.shared_pages
    assert rows == 0 or pages <= num_pages * (1 + 1e-9)
    assert num_pages // own.row_pages <= own.rows_in(num_pages) <= num_pages // own.mean_pages


def test_what_is_shared_brings_more_rows_on_board_and_a_shorter_job() -> None:
    """1,000 of 1,020 prompt tokens are one prefix's."""
    alone = replace(WORK, prompt_tokens=1020, output_tokens=16, num_rows=2000)
    shared = replace(alone, reused_tokens=999.5, reused_pages=31)
    without, with_reuse = (planner(work=work).best().predicted for work in (alone, shared))
    assert with_reuse["computed_prompt_tokens"] == 20.5
    assert with_reuse["rows_on_board"] > 3 * without["rows_on_board"]
    assert with_reuse["job_s"] < without["job_s"] / 3
    off = planner(work=shared, reuse_prefixes=False).best().predicted
    assert off["job_s"] == without["job_s"]
    # KV of 8 bits shares whole pages alone: 1,020 - 31 · 32 tokens are left.
    eight = planner(work=shared, kv_type="int8").best().predicted
    assert eight["computed_prompt_tokens"] == 28


def test_a_plan_holds_the_longest_row_where_any_does() -> None:
    mean = planner().best()
    long = planner(work=replace(WORK, longest_tokens=32 * 300)).best()
    assert long.kv_pages >= 300
    # 900 pages of 2 MiB are more than there is: then the others at least.
    none = planner(work=replace(WORK, longest_tokens=32 * 900)).best()
    assert none.kv_pages == mean.kv_pages < 900
