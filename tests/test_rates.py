"""What sweeps cost: from curves, from a probe of a little model, and from sweeps that were run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.costs import Curve, Load, Rates, SweepCost
from engine.gguf_file import GgufFile
from engine.hparams import read_hparams
from engine.little_model import USUAL_SHAPE, little_hparams
from engine.rates import EFFORTS, probe_rates
from engine.sizes import ModelSizes, Part
from engine.sweep_fit import MIN_SWEEPS, Moments, fit
from kernels.cpu import CpuOps
from tests.golden import GOLDEN

TINY = read_hparams(GgufFile.open(GOLDEN / "llama-q4_0.gguf"))


def part(**values: int) -> Part:
    return Part(stored_nbytes=0, slot_nbytes=0, values=values)


def test_a_curve_is_straight_between_its_points_and_beyond() -> None:
    curve = Curve(((1, 2.0), (3, 4.0), (4, 8.0)))
    found = [curve.at(amount) for amount in (0, 1, 2, 3, 3.5, 4, 6)]
    assert found == [2.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0]
    assert Curve.line(5.0, 2.0).at(10) == 25.0


def test_a_disturbed_measurement_does_not_make_more_work_cost_nothing() -> None:
    curve = Curve(((1, 1.0), (128, 128.0), (256, 128.0)))
    assert curve.at(512) > 200.0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=4))
def test_a_sum_of_curves_is_the_sum_at_each_point(lines: list[tuple[float, float]]) -> None:
    bent = Curve(((1, 1.0), (8, 2.0), (64, 20.0)))
    curves = [(Curve.line(*line), 3.0) for line in lines]
    total = Curve.total([*curves, (bent, 2.0)])
    for amount in (1, 2, 8, 30, 64, 1000):
        expected = sum(n * curve.at(amount) for curve, n in curves) + 2.0 * bent.at(amount)
        assert total.at(amount) == pytest.approx(expected)


def test_a_sweep_costs_its_layers_its_positions_and_the_head_of_rows_that_want_it() -> None:
    """Two layers of 100 weights, of two types; a head of 50; all numbers are powers of ten."""
    rates = Rates(
        disk_nbytes_per_s=1.0,
        values_per_s={},
        flops_per_s=1.0,
        layer_s={"A": Curve.line(1e-3, 1e-4), "B": Curve.line(1e-2, 0.0)},
        head_s=Curve.line(1e-1, 1e-2),
        decode_position_s=1e-5,
        prefill_position_s=1e-6,
        choice_s=7.0,
    )
    layer = part(A=60, B=40)
    sizes = ModelSizes(
        embedding=part(C=50), layers=(layer, layer), head=None, vectors_nbytes=0, page_nbytes=1
    )
    cost = SweepCost.of(sizes, rates, expand=False)
    layers_s = 120 * (1e-3 + 5 * 1e-4) + 80 * 1e-2
    assert cost.compute_s(Load(5, 0, 0, 0)) == pytest.approx(layers_s)
    assert cost.compute_s(Load(5, 0, 0, 2)) == pytest.approx(
        layers_s + 50 * (1e-1 + 2 * 1e-2) + 14.0
    )
    assert cost.compute_s(Load(5, 10, 100, 0)) == pytest.approx(layers_s + 2 * (1e-4 + 1e-4))


def test_a_rate_alone_makes_a_pass_and_so_much_more_per_token() -> None:
    rates = Rates(disk_nbytes_per_s=1.0, values_per_s={"A": 50.0}, flops_per_s=8.0)
    sizes = ModelSizes(
        embedding=part(A=10), layers=(part(A=100),), head=None, vectors_nbytes=0, page_nbytes=1
    )
    cost = SweepCost.of(sizes, rates, expand=False)
    assert cost.compute_s(Load(3, 99, 99, 0)) == pytest.approx(100 / 50 + 3 * 2 * 100 / 8)
    assert cost.compute_s(Load(3, 0, 0, 1)) == pytest.approx(
        100 / 50 + 3 * 2 * 100 / 8 + 10 / 50 + 2 * 10 / 8
    )


# ---- the little model ----------------------------------------------------------------------


def test_a_little_model_keeps_the_shapes_of_a_small_one_and_repeats_its_layers() -> None:
    small = replace(USUAL_SHAPE, hidden=576, ffn=1536, num_heads=9, num_kv_heads=3, key_length=64)
    small = replace(small, value_length=64, num_layers=30, vocab_size=49_152)
    little = little_hparams(small, 32 << 20)
    kept = ("hidden", "ffn", "num_heads", "num_kv_heads", "key_length")
    assert [getattr(little, n) for n in kept] == [getattr(small, n) for n in kept]
    assert 1 < little.num_layers < 30
    few_layers = little_hparams(replace(small, num_layers=2), 32 << 20)
    assert few_layers.num_layers == 2


@pytest.mark.parametrize("block_size", [1, 32, 256])
def test_a_little_model_of_a_large_one_is_little(block_size: int) -> None:
    large = replace(USUAL_SHAPE, hidden=8192, ffn=28672, num_heads=64, num_kv_heads=8)
    little = little_hparams(replace(large, num_layers=80, vocab_size=128_256), 32 << 20, block_size)
    assert little.num_layers >= 1
    per_layer = little.hidden * (2 * 128 * (little.num_heads + little.num_kv_heads))
    assert per_layer + 3 * little.hidden * little.ffn <= 32 << 20
    assert little.vocab_size * little.hidden <= 32 << 20
    assert little.num_heads % little.num_kv_heads == 0


def test_rows_of_a_little_model_are_whole_blocks() -> None:
    """Files with few large blocks among smaller ones: the hidden size is no multiple of 256."""
    odd = replace(USUAL_SHAPE, hidden=576, ffn=1536, num_heads=9, num_kv_heads=3)
    little = little_hparams(replace(odd, key_length=64, value_length=64), 32 << 20, 256)
    assert (little.hidden, little.ffn) == (768, 1536)
    assert little.num_heads * 64 % 256 == 0 and little.num_heads % 3 == 0


@pytest.fixture(scope="module")
def ops() -> Iterator[CpuOps]:
    ops = CpuOps(2)
    yield ops
    ops.close()


def test_a_probe_measures_all_that_a_sweep_is_made_of(
    ops: CpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    effort = replace(EFFORTS["cpu"], num_values=1 << 16, tokens=(1, 16), outputs=(1, 4))
    monkeypatch.setitem(EFFORTS, "cpu", effort)
    rates = probe_rates(ops, {"Q4_K", "F16"}, (), "", hparams=TINY, head_type="Q6_K", kv_type="f16")
    assert set(rates.layer_s) == {"Q4_K", "F16", "expanded"}
    for curve in rates.layer_s.values():
        assert [tokens for tokens, _ in curve.points] == [1, 16]
        assert 0 < curve.points[0][1] <= curve.points[1][1]
    assert rates.values_per_s["F16"] == 1 / rates.layer_s["F16"].points[0][1]
    assert rates.head_s is not None and rates.head_s.points[0][1] > 0
    assert rates.choice_s > 0
    assert rates.decode_position_s > 0 and rates.prefill_position_s > 0
    assert (rates.link_nbytes_per_s, rates.tile_tokens) == (None, 1)


@pytest.mark.parametrize(("expand", "kinds"), [(True, {"expanded"}), (False, {"Q4_0"})])
def test_only_what_the_plan_computes_with_is_measured(
    ops: CpuOps, monkeypatch: pytest.MonkeyPatch, expand: bool, kinds: set[str]
) -> None:
    effort = replace(EFFORTS["cpu"], num_values=1 << 14, tokens=(1, 4), outputs=(1,))
    monkeypatch.setitem(EFFORTS, "cpu", effort)
    rates = probe_rates(ops, {"Q4_0"}, (), "", hparams=TINY, expand=expand)
    assert set(rates.layer_s) == kinds


# ---- from sweeps that were run -------------------------------------------------------------


def moments_of(sweeps: list[tuple[Load, float]]) -> Moments:
    total = Moments()
    for load, seconds in sweeps:
        total += Moments.of(load, seconds)
    return total


def sweeps_of(rng: np.random.Generator, count: int) -> list[Load]:
    """Rows that decode, from one to a hundred, and in some sweeps a piece of a prompt."""
    loads = []
    for index in range(count):
        rows = int(rng.integers(1, 100))
        piece = int(rng.integers(0, 400)) if index % 3 == 0 else 0
        loads.append(Load(rows + piece, rows * int(rng.integers(50, 300)), piece * 64, rows))
    return loads


@given(st.lists(st.floats(1e-6, 1.0), min_size=4, max_size=4), st.integers(0, 1000))
def test_costs_are_found_in_what_sweeps_took(costs: list[float], seed: int) -> None:
    fixed, token, position, output = costs[0], costs[1] / 100, costs[2] / 1e4, costs[3] / 100
    loads = sweeps_of(np.random.default_rng(seed), 60)

    def seconds(load: Load) -> float:
        positions = load.decode_positions + load.prefill_positions
        return fixed + token * load.tokens + position * positions + output * load.outputs

    found = fit(moments_of([(load, seconds(load)) for load in loads]))
    assert found is not None
    for load in loads:
        assert found.sweep_cost.compute_s(load) == pytest.approx(seconds(load), rel=0.01)


def test_costs_add_up_to_what_was_taken_and_none_is_negative() -> None:
    """Sweeps that took longer the less they carried, as a machine under other load shows them."""
    rng = np.random.default_rng(5)
    loads = sweeps_of(rng, 40)
    seconds = [3.0 - load.tokens / 500 + rng.uniform(0, 0.2) for load in loads]
    found = fit(moments_of(list(zip(loads, seconds, strict=True))))
    assert found is not None
    costs = (found.fixed_s, found.token_s, found.position_s, found.output_s)
    assert min(costs) >= 0
    predicted = sum(found.sweep_cost.compute_s(load) for load in loads)
    assert predicted == pytest.approx(sum(seconds), rel=0.02)


def test_a_few_sweeps_tell_nothing_and_moments_of_a_job_are_differences() -> None:
    loads = sweeps_of(np.random.default_rng(1), 2 * MIN_SWEEPS)
    sweeps = [(load, load.tokens / 10) for load in loads]
    assert fit(moments_of(sweeps[: MIN_SWEEPS - 1])) is None
    later = moments_of(sweeps) - moments_of(sweeps[:MIN_SWEEPS])
    assert later.num_sweeps == MIN_SWEEPS
    found, alone = fit(later), fit(moments_of(sweeps[MIN_SWEEPS:]))
    assert found is not None and alone is not None
    assert found.token_s == pytest.approx(alone.token_s) == pytest.approx(0.1)
