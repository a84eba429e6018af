"""Plans of three tiers: no budget is passed, every part is somewhere once, disk comes last."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.division import LINK_RING_PARCELS, STAGING_PARCELS, activations_nbytes
from engine.hparams import Hparams
from engine.planner import Budget, ModelSizes, Plan, Planner, Rates, Workload
from engine.requests import EngineConfig, MemoryBudgetError
from kernels.ops import STAGED_LAYERS
from tests.test_planner import MIB, models, part, sized_hparams, sizes, workloads

GIB = 1 << 30
GPU = Rates(
    disk_nbytes_per_s=1.6e9,
    values_per_s={"F16": 1e12},
    flops_per_s=6e14,
    link_nbytes_per_s=5.5e10,
    tile_tokens=256,
)
# 80 layers, hidden 8192, ffn 28672, 64/8 heads, as Q4_K: 41 GB.
LARGE = replace(
    sized_hparams(80),
    hidden=8192,
    ffn=28_672,
    num_heads=64,
    num_kv_heads=8,
    key_length=128,
    value_length=128,
    vocab_size=128_256,
)


def large_sizes() -> ModelSizes:
    layer = replace(part(855 * 10**6), stored_nbytes=500 * 10**6, slot_nbytes=500 * 10**6)
    head = replace(part(1050 * 10**6), stored_nbytes=862 * 10**6, slot_nbytes=862 * 10**6)
    return ModelSizes(
        embedding=head, layers=(layer,) * 80, head=head, vectors_nbytes=MIB, page_nbytes=10 * MIB
    )


def scratch_nbytes(num_tokens: int) -> int:
    return 64 * MIB + 1000 * num_tokens


def planner(
    model: ModelSizes,
    device_nbytes: int,
    host_nbytes: int,
    hparams: Hparams | None = None,
    *,
    workload: Workload | None = None,
    embedding_in_host: bool = True,
    **config: object,
) -> Planner:
    return Planner(
        hparams or sized_hparams(len(model.layers)),
        EngineConfig(memory_nbytes=device_nbytes, **config),  # type: ignore[arg-type]
        model,
        budget=Budget(
            device_nbytes=device_nbytes,
            host_nbytes=host_nbytes,
            fixed_nbytes=10 * MIB,
            scratch_nbytes=scratch_nbytes,
            embedding_in_host=embedding_in_host,
        ),
        rates=GPU,
        workload=workload,
    )


def best(*arguments: Any, **options: Any) -> Plan:
    """By a `planner` of these arguments."""
    return planner(*arguments, **options).best()


@given(
    models,
    st.integers(100 * MIB, 6000 * MIB),
    st.integers(0, 6000 * MIB),
    workloads,
    st.sampled_from([None, 64, 512]),
    st.booleans(),
    st.sampled_from(["auto", "never"]),
)
def test_no_tier_takes_more_than_its_budget_and_every_part_is_in_one(
    model: ModelSizes,
    device: int,
    host: int,
    workload: Workload,
    sweep_tokens: int | None,
    embedding_in_host: bool,
    host_kv: str,
) -> None:
    try:
        plan = best(
            model,
            device,
            host,
            workload=workload,
            sweep_tokens=sweep_tokens,
            embedding_in_host=embedding_in_host,
            host_kv=host_kv,
        )
    except MemoryBudgetError:
        assume(False)
    used = plan.weights_nbytes + plan.ring_nbytes + plan.activations_nbytes + plan.kv_nbytes
    layer_nbytes = plan.host_kv_pages * model.page_nbytes / len(model.layers)
    assert used + STAGED_LAYERS * layer_nbytes <= plan.device_nbytes <= device
    assert plan.host_nbytes <= host
    if plan.host_kv_pages:  # they travel with layers, all of which are in host memory
        assert host_kv == "auto" and plan.streams and plan.disk_nbytes == 0
    hparams = sized_hparams(len(model.layers))
    buffers = activations_nbytes(hparams, plan.sweep_tokens, plan.max_rows, runs_in_order=True)
    assert plan.activations_nbytes == buffers + 10 * MIB + scratch_nbytes(plan.sweep_tokens)
    assert 1 <= plan.max_rows <= plan.sweep_tokens

    near = plan.host or (False,) * len(plan.resident)
    assert not any(stays and in_host for stays, in_host in zip(plan.resident, near, strict=True))
    assert not (plan.head_resident and plan.head_in_host)
    placed = list(zip(model.layers, plan.resident, near, strict=True))
    if model.head is not None:
        placed.append((model.head, plan.head_resident, plan.head_in_host))
    streamed = [part.slot_nbytes for part, stays, _ in placed if not stays]
    far = [part.slot_nbytes for part, stays, in_host in placed if not (stays or in_host)]
    assert plan.streamed_nbytes == sum(streamed)
    assert plan.disk_nbytes == sum(far)
    assert not streamed or plan.ring_nbytes <= LINK_RING_PARCELS * max(streamed)

    embedding = model.embedding.stored_nbytes if embedding_in_host and model.head else 0
    staging = STAGING_PARCELS * max(streamed) if far else 0
    kv_nbytes = plan.host_kv_pages * model.page_nbytes
    assert plan.host_nbytes == embedding + sum(streamed) - sum(far) + staging + kv_nbytes
    if far:  # host memory has no room for one of them more
        assert plan.host_nbytes + max(far) > host or sum(far) > host - plan.host_nbytes


def test_a_model_larger_than_the_device_streams_from_host_memory() -> None:
    work = Workload(num_rows=1000, prompt_tokens=512, output_tokens=128)
    plan = best(large_sizes(), 24 * GIB, 100 * GIB, LARGE, workload=work, host_kv="never")
    assert plan.host_kv_pages == plan.kv_staging_nbytes == 0
    assert plan.disk_nbytes == 0
    assert "d" not in plan.placement and plan.placement.count("h") > 70
    assert plan.sweep_tokens >= 1024
    predicted = plan.predicted
    assert predicted["link_s"] == pytest.approx(plan.streamed_nbytes / 5.5e10)
    assert predicted["disk_s"] == 0
    assert predicted["limited_by"] in ("link", "compute")
    # Most of the memory is for rows, which may be more than those of the mean length.
    assert plan.kv_nbytes > 12 * GIB
    rows = plan.kv_pages // 20
    assert rows < plan.max_rows <= 1.5 * rows + 1


def test_kv_pages_in_host_memory_bring_more_rows_on_board() -> None:
    """Each sweep takes longer, and there are fewer of them."""
    work = Workload(num_rows=1000, prompt_tokens=512, output_tokens=128)
    settings = {"workload": work, "hparams": LARGE}
    plan = best(large_sizes(), 24 * GIB, 95 * GIB, **settings)  # type: ignore[arg-type]
    without = best(
        large_sizes(),
        24 * GIB,
        95 * GIB,
        host_kv="never",
        **settings,  # type: ignore[arg-type]
    )
    assert plan.host_kv_nbytes > 40 * GIB and plan.disk_nbytes == 0
    found, before = plan.predicted, without.predicted
    assert found["rows_on_board"] > 2.5 * before["rows_on_board"]
    assert found["job_s"] < 0.75 * before["job_s"]
    assert found["sweep_s"] > 1.5 * before["sweep_s"]
    assert 1000 < found["host_kv_pages"] <= plan.host_kv_pages
    read_s = found["host_kv_pages"] * large_sizes().page_nbytes / 5.5e10
    assert read_s < found["host_kv_s"] < 1.1 * read_s, "what is written holds it up a little"
    weights_s = plan.streamed_nbytes / 5.5e10
    assert found["link_s"] == pytest.approx(weights_s + found["host_kv_s"])
    assert before["host_kv_pages"] == before["host_kv_s"] == 0
    assert found["limited_by"] == "link"


def test_no_kv_pages_go_to_host_memory_where_rows_need_none() -> None:
    few = Workload(num_rows=20, prompt_tokens=512, output_tokens=128)
    assert best(large_sizes(), 24 * GIB, 95 * GIB, LARGE, workload=few).host_kv_pages == 0
    many = Workload(num_rows=1000, prompt_tokens=512, output_tokens=128)
    fits = best(large_sizes(), 220 * GIB, 95 * GIB, LARGE, workload=many)
    assert not fits.streams and fits.host_kv_pages == 0
    asked = 8 * GIB
    plan = best(large_sizes(), 24 * GIB, 95 * GIB, LARGE, workload=many, kv_memory_nbytes=asked)
    assert plan.host_kv_pages == 0, "the size of the whole cache was asked for"


def test_disk_layers_lie_between_the_others_and_are_as_few_as_can_be() -> None:
    """Host memory holds half of the layers, beside two staging buffers and the embedding."""
    plan = best(large_sizes(), 12 * GIB, 24 * GIB, LARGE, workload=Workload(num_rows=1000))
    letters = plan.placement.partition(" ")[0]
    assert set(letters) >= {"h", "d"}
    longest = max(len(list(run)) for letter, run in groupby(letters) if letter == "d")
    assert longest <= -(-letters.count("d") // max(1, letters.count("h"))) + 1
    assert plan.predicted["disk_s"] == pytest.approx(plan.disk_nbytes / 1.6e9)
    assert plan.host_nbytes > 24 * GIB - 500 * 10**6


def test_a_model_that_fits_the_device_is_resident_and_not_expanded() -> None:
    model = sizes(12, 40 * MIB, 40 * MIB, MIB)
    plan = best(model, 16 * GIB, 4 * GIB)
    assert not plan.streams and not plan.expand
    assert plan.host_nbytes == model.embedding.stored_nbytes
    assert plan.host == ()


def test_a_refusal_for_lack_of_host_memory_names_what_works() -> None:
    model = sizes(40, 60 * MIB, 60 * MIB, MIB)
    with pytest.raises(MemoryBudgetError, match="--host-memory") as refused:
        best(model, 1500 * MIB, 200 * MIB)
    named = re.search(r"--host-memory of at least ([\d,]+)", str(refused.value))
    assert named is not None
    least = int(named[1].replace(",", ""))
    assert best(model, 1500 * MIB, least).disk_nbytes > 0
    with pytest.raises(MemoryBudgetError, match="pinned host memory is 0 bytes"):
        best(model, 1500 * MIB, 0)


def test_without_a_host_tier_everything_streams_from_disk() -> None:
    model = sizes(10, 40 * MIB, None, MIB)
    config = EngineConfig(memory_nbytes=500 * MIB)
    planner = Planner(sized_hparams(10), config, model, budget=Budget(device_nbytes=500 * MIB))
    plan = planner.best()
    assert plan.disk_nbytes == plan.streamed_nbytes > 0
    assert (plan.host, plan.head_in_host, plan.host_nbytes) == ((), False, 0)
    assert "link_s" not in plan.predicted
