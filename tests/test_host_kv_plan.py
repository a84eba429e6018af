"""Plans with KV pages in host memory: budgets hold, and jobs take what is forecast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.alternatives import alternatives
from engine.costs import Curve, Load, SweepCost
from engine.forecast import OUT_SHARE, Board, Pace, Travel, Workload, forecast
from engine.plan import Budget
from engine.planner import LOCKED_NBYTES_PER_S, ModelSizes, Planner
from engine.requests import EngineConfig, MemoryBudgetError
from engine.ways import way_of
from kernels.ops import STAGED_LAYERS, KvType
from scripts.simulated_machine import Machine
from scripts.simulated_rows import Rows, random_prompts
from scripts.simulator import Simulator
from scripts.synth_gguf import Shape, write_model
from tests.test_planner import MIB, budgets, models, rates, sized_hparams, workloads
from tests.test_tiers import GIB, LARGE, large_sizes
from tests.test_tiers import planner as planner_of

JOB = Workload(num_rows=1000, prompt_tokens=512, output_tokens=128)
SHAPE = Shape(num_layers=32, hidden=4096, ffn=14_336, num_heads=32, num_kv_heads=8, vocab_size=4000)
ROWS = Workload(num_rows=600, prompt_tokens=250, output_tokens=70)


def planner(
    model: ModelSizes, device_nbytes: int, host_nbytes: int, work: Workload, **config: object
) -> Planner:
    hparams = LARGE if len(model.layers) == 80 else None
    return planner_of(model, device_nbytes, host_nbytes, hparams, workload=work, **config)


# ---- budgets -----------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    models,
    st.integers(150 * MIB, 3000 * MIB),
    st.integers(500 * MIB, 9000 * MIB),
    workloads,
    st.sampled_from([None, 256]),
)
def test_no_plan_and_none_beside_it_takes_more_than_there_is(
    model: ModelSizes, device: int, host: int, work: Workload, sweep_tokens: int | None
) -> None:
    planning = planner(model, device, host, work, sweep_tokens=sweep_tokens)
    try:
        chosen = planning.best()
    except MemoryBudgetError:
        assume(False)
    beside = [other.plan for other in alternatives(planning, chosen) if other.plan is not None]
    for plan in [chosen, *beside]:
        kv_nbytes = plan.host_kv_pages * model.page_nbytes
        staging = STAGED_LAYERS * kv_nbytes / len(model.layers)
        assert staging <= plan.kv_staging_nbytes <= staging + STAGED_LAYERS
        parts = plan.weights_nbytes + plan.ring_nbytes + plan.activations_nbytes + plan.kv_nbytes
        assert parts + plan.kv_staging_nbytes == plan.device_nbytes <= device
        assert plan.host_kv_nbytes == kv_nbytes <= plan.host_nbytes <= host
        assert plan.kv_pages >= 1 and plan.max_rows <= plan.sweep_tokens
        assert not plan.host_kv_pages or (plan.streams and not plan.disk_nbytes)


@given(models, budgets, rates, workloads)
def test_a_cpu_has_no_pages_in_host_memory(
    model: ModelSizes, free: int, speed: object, work: Workload
) -> None:
    try:
        plan = Planner(
            sized_hparams(len(model.layers)),
            EngineConfig(memory_nbytes=free, host_kv="auto"),
            model,
            budget=Budget(device_nbytes=free),
            rates=speed,  # type: ignore[arg-type]
            workload=work,
        ).best()
    except MemoryBudgetError:
        assume(False)
    assert plan.host_kv_pages == plan.kv_staging_nbytes == plan.host_nbytes == 0
    assert plan.predicted["host_kv_pages"] == plan.predicted["host_kv_s"] == 0


# ---- decisions ---------------------------------------------------------------------------


def test_never_keeps_all_pages_on_the_device() -> None:
    """The plan that there was before any page could be elsewhere."""
    model = large_sizes()
    asked = planner(model, 24 * GIB, 100 * GIB, JOB, host_kv="never").best()
    assert (sum(asked.resident), asked.sweep_tokens, asked.max_rows) == (2, 1536, 154)
    assert (asked.kv_pages, asked.host_kv_pages) == (2061, 0)
    assert asked.host_nbytes == model.head.stored_nbytes + 78 * model.layers[0].slot_nbytes


def test_a_plan_is_shown_beside_those_with_fewer_pages_in_host_memory_and_none() -> None:
    planning = planner(large_sizes(), 24 * GIB, 95 * GIB, JOB)
    plan = planning.best()
    found = [each for each in alternatives(planning, plan) if each.decision == "host KV pages"]
    assert all(each.chosen == f"{plan.host_kv_pages}" for each in found)
    none, *others = found
    assert none.instead == "none: KV on the device alone"
    assert none.plan is not None and none.plan.host_kv_pages == 0
    assert none.plan.predicted["job_s"] > 1.2 * plan.predicted["job_s"]
    assert others and all(each.plan is not None for each in others)
    assert {each.plan.host_kv_pages for each in others if each.plan} == {
        int(each.instead) for each in others
    }
    without = planner(large_sizes(), 24 * GIB, 95 * GIB, JOB, host_kv="never")
    assert not [e for e in alternatives(without, without.best()) if e.decision == "host KV pages"]


def test_a_short_job_does_not_wait_for_host_memory() -> None:
    """It takes longer to lock than it would spare."""
    work = Workload(num_rows=150, prompt_tokens=512, output_tokens=16)
    planning = planner(large_sizes(), 24 * GIB, 95 * GIB, work)
    plan = planning.best()
    spared_s = planning.best_on_device().predicted["job_s"] - plan.predicted["job_s"]
    assert plan.host_kv_nbytes / LOCKED_NBYTES_PER_S <= spared_s
    assert plan.host_kv_nbytes < 4 * GIB


def test_the_plan_is_about_as_good_as_any_tried() -> None:
    """Against every eighth of host memory, and every sweep budget, by the forecast."""
    planning = planner(large_sizes(), 24 * GIB, 95 * GIB, JOB)
    best = planning.best().predicted["job_s"]
    tried = [
        planning.predicted(plan).predicted["job_s"]
        for way in planning.ways.with_host_kv(planning._most_host_pages)
        if way.num_resident % 16 == 0 and (plan := planning.plan_of(way)) is not None
    ]
    assert len(tried) > 100
    assert best <= 1.03 * min(tried)


# ---- forecast ----------------------------------------------------------------------------


def test_pages_beyond_those_of_the_device_cross_the_link() -> None:
    """Two rows of 64 and 3 tokens, 4 pages on the device: each decoding sweep reads one more."""
    free = SweepCost(layers=Curve.line(0.0, 0.0), head=Curve.line(0.0, 0.0))
    pace = Pace(cost=free, streams={"link": 10.0}, host_page_s=1.0)
    work = Workload(num_rows=2, prompt_tokens=64, output_tokens=4)
    board = Board(sweep_tokens=128, max_rows=2, kv_pages=4)
    found = forecast(work, board, pace)
    # 2 prompts, then 65, 66 and 67 positions of each: 2 pages and, in the mean, half of one more.
    held = 2 * (66 / 32 + 0.5)
    assert found.num_sweeps == 4
    assert found.travel.read == pytest.approx(3 * (held - 4))
    assert found.travel.written == pytest.approx(3 * 2 * (held - 4) / held)
    travel_s = found.travel.read + OUT_SHARE * found.travel.written
    assert found.seconds == pytest.approx(4 * 10.0 + travel_s)
    assert found.limited_s == {"link": pytest.approx(found.seconds)}
    of_8_bits = forecast(work, replace(board, page_tokens=32), pace)
    assert of_8_bits.travel.read == pytest.approx(3 * (held - 2) * (held - 4) / held)
    assert of_8_bits.travel.written == pytest.approx(found.travel.written / 32)
    assert pace.sweep_s(Load(2, 0, 0, 2), travel=Travel(3.0, 0.0)) == (13.0, "link")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_model(path, SHAPE, type_name="Q4_K", hollow=True)
    return path


@pytest.fixture(scope="module")
def rows() -> Rows:
    num_rows, prompt_tokens, output_tokens = 600, 250, 70
    assert (
        Workload(num_rows=num_rows, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        == ROWS
    )
    return Rows(
        prompts=random_prompts(num_rows, prompt_tokens, SHAPE.vocab_size, seed=1),
        lengths=np.full(num_rows, output_tokens),
        max_tokens=np.full(num_rows, output_tokens),
    )


def simulator(model: Path, kv_type: KvType) -> Simulator:
    machine = Machine(
        layers_s=((1.0, 0.05), (2000.0, 0.3)),
        link_nbytes_per_s=5.5e9,
        device_nbytes=3 * GIB,
        host_nbytes=16 * GIB,
        fixed_nbytes=256 * MIB,
    )
    return Simulator(model, machine, EngineConfig(kv_type=kv_type, memory_nbytes=3 * GIB))


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
@pytest.mark.parametrize("share", [0.6, 1.0])
def test_jobs_take_what_is_forecast(model: Path, rows: Rows, kv_type: KvType, share: float) -> None:
    """Through the engine's own admission, sweeps and pages, some of which are in host memory."""
    simulated = simulator(model, kv_type)
    planning = simulated.planner(ROWS)
    way = way_of(planning.best())
    assert way.host_kv_pages > 1000
    found = planning.plan_of(replace(way, host_kv_pages=round(share * way.host_kv_pages)))
    assert found is not None
    plan = planning.predicted(found)
    outcome, predicted = simulated.run(plan, rows).outcome, plan.predicted
    assert outcome.num_rows == len(rows)
    assert outcome.num_sweeps == pytest.approx(predicted["num_sweeps"], rel=0.05)
    assert outcome.seconds == pytest.approx(predicted["job_s"], rel=0.05)
    assert outcome.mean_host_pages == pytest.approx(predicted["host_kv_pages"], rel=0.15)


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
def test_more_rows_on_board_make_a_job_shorter(model: Path, rows: Rows, kv_type: KvType) -> None:
    simulated = simulator(model, kv_type)
    beside = simulated.run(simulated.plan(ROWS), rows).outcome
    without = simulated.run(simulated.plan(ROWS, host_kv="never"), rows).outcome
    assert without.mean_host_pages == 0
    assert beside.mean_board > 1.3 * without.mean_board
    assert beside.seconds < 0.97 * without.seconds
