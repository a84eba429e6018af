"""The planner: budgets hold, more memory is never slower, refusals name what works."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.gguf_file import GgufFile
from engine.hparams import Hparams, read_hparams
from engine.planner import (
    AS_GOOD,
    DEFAULT_KV_NBYTES,
    Budget,
    ModelSizes,
    Part,
    Plan,
    Planner,
    Rates,
    Workload,
)
from engine.prediction import MAX_BALANCE
from engine.requests import EngineConfig, MemoryBudgetError
from tests.golden import GOLDEN

MIB = 1 << 20
TINY = read_hparams(GgufFile.open(GOLDEN / "llama-q4_0.gguf"))


def sized_hparams(num_layers: int) -> Hparams:
    return replace(
        TINY, num_layers=num_layers, hidden=2048, ffn=8192, vocab_size=32_000, context_length=4096
    )


def part(num_values: int, slack: int = 4096) -> Part:
    nbytes = 2 * num_values
    return Part(stored_nbytes=nbytes, slot_nbytes=nbytes + slack, values={"F16": num_values})


def sizes(num_layers: int, layer_values: int, head_values: int | None, page: int) -> ModelSizes:
    return ModelSizes(
        embedding=part(head_values or 4 * MIB),
        layers=(part(layer_values),) * num_layers,
        head=None if head_values is None else part(head_values),
        vectors_nbytes=MIB,
        page_nbytes=page,
    )


models = st.builds(
    sizes,
    st.integers(1, 40),
    st.integers(MIB, 64 * MIB),
    st.one_of(st.none(), st.integers(MIB, 64 * MIB)),
    st.sampled_from([MIB // 4, 2 * MIB, 5 * MIB]),
)
rates = st.builds(
    lambda disk, values, flops: Rates(
        disk_nbytes_per_s=disk, values_per_s={"F16": values, "expanded": values}, flops_per_s=flops
    ),
    st.floats(1e8, 1e10),
    st.floats(1e8, 1e11),
    st.floats(1e10, 1e14),
)
workloads = st.builds(
    lambda rows, prompt, output: Workload(
        num_rows=rows, prompt_tokens=prompt, output_tokens=output
    ),
    st.integers(1, 100_000),
    st.floats(0, 2000),
    st.floats(1, 1000),
)
budgets = st.integers(100 * MIB, 12_000 * MIB)


def best(
    model: ModelSizes,
    free_nbytes: int,
    *,
    rates: Rates | None = None,
    workload: Workload | None = None,
    **config: object,
) -> Plan:
    settings = EngineConfig(memory_nbytes=free_nbytes, **config)  # type: ignore[arg-type]
    planner = Planner(
        sized_hparams(len(model.layers)),
        settings,
        model,
        budget=Budget(device_nbytes=free_nbytes),
        workload=workload,
        **({"rates": rates} if rates else {}),
    )
    return planner.best()


def used_nbytes(plan: Plan) -> int:
    return plan.weights_nbytes + plan.ring_nbytes + plan.activations_nbytes + plan.kv_nbytes


@given(models, budgets, rates, workloads, st.sampled_from([None, 64, 512]))
def test_no_plan_takes_more_than_the_budget(
    model: ModelSizes, free: int, rates: Rates, workload: Workload, sweep_tokens: int | None
) -> None:
    try:
        plan = best(model, free, rates=rates, workload=workload, sweep_tokens=sweep_tokens)
    except MemoryBudgetError:
        assume(False)
    assert used_nbytes(plan) <= free
    assert plan.kv_pages >= 1
    assert plan.kv_nbytes == plan.kv_pages * model.page_nbytes <= DEFAULT_KV_NBYTES
    resident = [p for p, stays in zip(model.layers, plan.resident, strict=True) if stays]
    if not plan.expand:
        assert plan.weights_nbytes >= sum(p.stored_nbytes for p in resident)
    streamed = [
        p.slot_nbytes for p, stays in zip(model.layers, plan.resident, strict=True) if not stays
    ]
    streamed += [model.head.slot_nbytes] if model.head and not plan.head_resident else []
    assert plan.streamed_nbytes == sum(streamed)
    assert plan.streams == bool(streamed)
    assert not streamed or plan.ring_nbytes >= max(streamed)


@given(
    models,
    st.tuples(budgets, budgets).map(sorted),
    rates,
    workloads,
    st.sampled_from([16, 128, 512, 2048]),
)
def test_more_memory_never_predicts_a_slower_job(
    model: ModelSizes, two: list[int], rates: Rates, workload: Workload, sweep_tokens: int
) -> None:
    options = {"rates": rates, "workload": workload, "sweep_tokens": sweep_tokens}
    try:
        less = best(model, two[0], expand="never", **options)  # type: ignore[arg-type]
    except MemoryBudgetError:
        assume(False)
    more = best(model, two[1], expand="never", **options)  # type: ignore[arg-type]
    estimated_s = Planner(
        sized_hparams(len(model.layers)),
        EngineConfig(),
        model,
        budget=Budget(device_nbytes=0),
        rates=rates,
        workload=workload,
    ).estimated_job_s
    assert estimated_s(more) <= estimated_s(less) * AS_GOOD * (1 + 1e-9)


@given(
    models,
    st.integers(0, 4000 * MIB),
    st.one_of(st.none(), st.integers(5 * MIB, 500 * MIB)),
    st.one_of(st.none(), st.integers(MIB, 300 * MIB)),
    st.one_of(st.none(), st.integers(1, 1000)),
    st.sampled_from(["auto", "never", "always"]),
)
def test_a_refusal_names_the_smallest_memory_that_works(
    model: ModelSizes,
    free: int,
    kv_memory: int | None,
    ring: int | None,
    sweep_tokens: int | None,
    expand: str,
) -> None:
    options = {
        "kv_memory_nbytes": kv_memory,
        "ring_nbytes": ring,
        "sweep_tokens": sweep_tokens,
        "expand": expand,
    }
    with pytest.raises(MemoryBudgetError) as refused:
        best(model, min(free, MIB), **options)
    named = re.search(r"the smallest that works here is ([\d,]+)", str(refused.value))
    assert named is not None
    smallest = int(named[1].replace(",", ""))
    assert used_nbytes(best(model, smallest, **options)) <= smallest
    with pytest.raises(MemoryBudgetError):
        best(model, smallest - 1, **options)


def test_kv_comes_first_when_the_model_does_not_fit() -> None:
    """On a fast disk with slow computing, memory goes to rows on board and not to layers."""
    model = sizes(30, 60 * MIB, 64 * MIB, 2 * MIB)
    fast_disk = Rates(disk_nbytes_per_s=5e9, values_per_s={"F16": 1e10}, flops_per_s=1e13)
    work = Workload(num_rows=100_000, prompt_tokens=64, output_tokens=64)
    plan = best(model, 1536 * MIB, rates=fast_disk, workload=work)
    assert sum(plan.resident) == 0
    assert plan.kv_nbytes > 1536 * MIB - plan.ring_nbytes - plan.weights_nbytes - 400 * MIB
    assert plan.predicted["rows_limited_by"] == "kv"
    few = best(model, 1536 * MIB, rates=fast_disk, workload=replace(work, num_rows=4))
    assert sum(few.resident) > 3
    assert few.predicted["rows_limited_by"] == "rows"


def test_a_model_that_fits_does_not_stream_for_nothing() -> None:
    model = sizes(12, 40 * MIB, 40 * MIB, MIB)
    for expand in ("auto", "never"):
        plan = best(model, 8000 * MIB, expand=expand)
        assert not plan.streams
        assert plan.expand == (expand == "auto")


def test_resident_layers_lie_between_streamed_ones() -> None:
    model = sizes(12, 40 * MIB, None, MIB)
    plan = best(model, 1000 * MIB, workload=Workload(num_rows=2))
    letters = plan.placement.partition(" ")[0]
    assert set(letters) == {"r", "d"}
    assert "rrr" not in letters or "ddd" not in letters
    assert plan.record()["resident_layers"] == letters.count("r")
    assert plan.record()["streamed_parcels"] == letters.count("d")


@given(models, rates)
def test_tokens_at_balance_make_computing_take_as_long_as_reading(
    model: ModelSizes, rates: Rates
) -> None:
    try:
        plan = best(model, 700 * MIB, rates=rates)
    except MemoryBudgetError:
        assume(False)
    predicted = plan.predicted
    balance, used = predicted["tokens_at_balance"], predicted["sweep_used_tokens"]
    assert predicted["disk_s"] == pytest.approx(plan.streamed_nbytes / rates.disk_nbytes_per_s)
    computing = predicted["pass_s"] + used * predicted["token_s"]
    assert predicted["compute_s"] == pytest.approx(computing, rel=0.1)
    layers = sum(p.num_values for p in model.layers)
    head = (model.head or model.embedding).num_values
    # Each token costs its layers; the head runs for some of them only.
    assert 2 * layers / rates.flops_per_s <= predicted["token_s"] * (1 + 1e-9)
    assert predicted["pass_s"] <= (layers + head) / rates.values_per_s["F16"]
    if 1 < balance < MAX_BALANCE:
        share = 128 / (256 + 128 - 1)
        head_s = head / rates.values_per_s["F16"] + 2 * head * share * balance / rates.flops_per_s
        layers_s = layers / rates.values_per_s["F16"] + 2 * layers * balance / rates.flops_per_s
        assert layers_s + head_s == pytest.approx(predicted["disk_s"], rel=0.06)


def test_predictions_are_of_rows_and_sweeps() -> None:
    """100 rows, 10 at once, each on board for 50 sweeps; the disk decides what a sweep takes."""
    model = sizes(10, 10 * MIB, None, MIB)
    slow = Rates(disk_nbytes_per_s=1e6, values_per_s={"F16": 1e12}, flops_per_s=1e15)
    work = Workload(num_rows=100, prompt_tokens=14, output_tokens=50)
    plan = best(
        model, 500 * MIB, rates=slow, workload=work, kv_memory_nbytes=20 * MIB, expand="never"
    )
    streaming = replace(plan, streamed_nbytes=10**8, disk_nbytes=10**8)
    planner = Planner(
        sized_hparams(10),
        EngineConfig(),
        model,
        budget=Budget(device_nbytes=0),
        rates=slow,
        workload=work,
    )
    predicted = planner.predicted(streaming).predicted
    assert predicted["rows_on_board"] == 10  # 20 pages, two for each row
    assert predicted["sweep_s"] == pytest.approx(100)
    assert predicted["num_sweeps"] == 500
    assert predicted["job_s"] == pytest.approx(50_000)
    assert predicted["tokens_per_s"] == pytest.approx(0.1)
    assert predicted["limited_by"] == "disk"


def test_a_ring_that_holds_no_layer_is_refused_with_what_works() -> None:
    model = sizes(10, 40 * MIB, None, MIB)
    with pytest.raises(MemoryBudgetError, match="--ring-memory"):
        best(model, 500 * MIB, ring_nbytes=10 * MIB)
    plan = best(model, 500 * MIB, ring_nbytes=90 * MIB)
    assert plan.ring_nbytes == 90 * MIB
