"""RoPE: scaling keys used or refused by name, and tables exact at far positions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.gguf_file import GgufFile
from engine.hparams import RopeParams, check_tensors, read_hparams, rope_tables
from engine.requests import ModelError, UnsupportedModelError
from tests.gguf_factory import write_tiny_model


def load_rope(path: Path) -> RopeParams:
    file = GgufFile.open(path)
    hparams = read_hparams(file)
    check_tensors(file, hparams)
    return hparams.rope


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


BASE = RopeParams(rotary_dim=64, base=10000.0, style="adjacent")
FAR = np.array([10, 9_000, 20_000])


def angles(frequencies: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return FAR[:, None] * frequencies


def inverse_frequencies(rope: RopeParams) -> npt.NDArray[np.float64]:
    steps = range(rope.rotary_dim // 2)
    return np.array([rope.base ** (-2 * step / rope.rotary_dim) for step in steps])


def yarn_frequencies(rope: RopeParams) -> npt.NDArray[np.float64]:
    """By wavelengths, one pair at a time (transformers' `_compute_yarn_parameters`)."""

    def pair_of(turns: float) -> float:
        context = rope.original_context_length / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(context) / (2 * math.log(rope.base))

    low, high = math.floor(pair_of(rope.beta_fast)), math.ceil(pair_of(rope.beta_slow))
    found = []
    for pair, frequency in enumerate(inverse_frequencies(rope)):
        stretched = min(max((pair - low) / (high - low), 0.0), 1.0)
        found.append(frequency / rope.factor * stretched + frequency * (1 - stretched))
    return np.array(found)


def assert_tables(
    rope: RopeParams, frequencies: npt.NDArray[np.float64], factors: Any = None
) -> None:
    cos, sin = rope_tables(rope, int(FAR[-1]) + 1, factors)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (20_001, rope.rotary_dim // 2)
    scale = rope.attention_factor
    np.testing.assert_allclose(cos[FAR], np.cos(angles(frequencies)) * scale, atol=2e-7)
    np.testing.assert_allclose(sin[FAR], np.sin(angles(frequencies)) * scale, atol=2e-7)


def test_tables_are_exact_far_out() -> None:
    assert_tables(BASE, inverse_frequencies(BASE))
    assert_tables(replace(BASE, rotary_dim=6, base=5e5), 5e5 ** -(np.arange(3) / 3))


def test_linear_scaling_divides_positions() -> None:
    """Case 101: linear."""
    assert_tables(replace(BASE, scaling="linear", factor=4.0), inverse_frequencies(BASE) / 4)


def test_yarn_stretches_long_wavelengths_only() -> None:
    """Case 101: yarn."""
    rope = replace(
        BASE, scaling="yarn", factor=4.0, original_context_length=2048, attention_factor=1.1
    )
    frequencies = yarn_frequencies(rope)
    assert frequencies[0] == 1
    assert frequencies[-1] == pytest.approx(inverse_frequencies(BASE)[-1] / 4)
    assert_tables(rope, frequencies)


def test_freq_factors_divide_the_frequencies_far_out() -> None:
    """Case 20: parity at positions 10, 9,000 and 20,000; factors of 1 change nothing."""
    factors = np.geomspace(1, 32, 32).astype(np.float32)
    rope = replace(BASE, scaling="llama3", factor=8.0)
    assert_tables(rope, inverse_frequencies(BASE) / factors, factors)
    ones = rope_tables(BASE, 100, np.ones(32, np.float32))
    np.testing.assert_array_equal(ones, rope_tables(BASE, 100))


def test_wrong_number_of_freq_factors_is_an_error(path: Path) -> None:
    """Case 20: a factor count that does not match the rope dims is a load error."""
    with pytest.raises(ModelError, match=r"has shape \(16,\), .* need \(32,\)"):
        rope_tables(BASE, 10, np.ones(16, np.float32))
    write_tiny_model(path, tensors={"rope_freqs.weight": np.ones(16)})
    with pytest.raises(ModelError, match=r"'rope_freqs.weight' has shape \(16,\), .* \(8,\)"):
        load_rope(path)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_freq_factors_that_are_not_positive_are_refused(bad: float) -> None:
    factors = np.ones(32, np.float32)
    factors[3] = bad
    with pytest.raises(ModelError, match="not positive: damaged"):
        rope_tables(BASE, 10, factors)


def rope_of(path: Path, metadata: dict[str, Any], **tensors: Any) -> RopeParams:
    write_tiny_model(path, metadata=metadata, tensors=tensors)
    return load_rope(path)


TYPE, FACTOR = "llama.rope.scaling.type", "llama.rope.scaling.factor"
ORIGINAL, OLD = "llama.rope.scaling.original_context_length", "llama.rope.scale_linear"


@pytest.mark.parametrize(
    ("metadata", "scaling", "factor"),
    [
        ({}, "none", 1.0),
        ({TYPE: "none", FACTOR: 4.0}, "none", 4.0),
        ({TYPE: "linear", FACTOR: 4.0}, "linear", 4.0),
        ({FACTOR: 4.0}, "linear", 4.0),
        ({OLD: 4.0}, "linear", 4.0),
        ({OLD: 4.0, FACTOR: 2.0}, "linear", 2.0),
        ({FACTOR: 0.0}, "none", 1.0),
    ],
)
def test_linear_scaling_is_read_under_new_and_old_keys(
    path: Path, metadata: dict[str, Any], scaling: str, factor: float
) -> None:
    """Case 101: types none and linear, and the old scale_linear key."""
    rope = rope_of(path, metadata)
    assert (rope.scaling, rope.factor, rope.attention_factor) == (scaling, factor, 1.0)


def test_yarn_keys_are_read(path: Path) -> None:
    """Case 101: yarn."""
    metadata = {TYPE: "yarn", FACTOR: 4.0, ORIGINAL: 128}
    rope = rope_of(path, metadata)
    assert (rope.factor, rope.original_context_length) == (4.0, 128)
    assert (rope.beta_fast, rope.beta_slow) == (32.0, 1.0)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert rope_of(path, {TYPE: "yarn", FACTOR: 4.0}).original_context_length == 512
    prefix = "llama.rope.scaling."
    own = {f"{prefix}yarn_beta_fast": 16.0, f"{prefix}yarn_beta_slow": 2.0}
    rope = rope_of(path, metadata | own | {f"{prefix}yarn_attn_factor": 1.25})
    assert (rope.beta_fast, rope.beta_slow, rope.attention_factor) == (16.0, 2.0, 1.25)
    rope = rope_of(path, metadata | {f"{prefix}attn_factor": 0.5})
    assert rope.attention_factor == pytest.approx((0.1 * math.log(4) + 1) / 2)


@pytest.mark.parametrize("scaling", ["longrope", "foo"])
def test_other_scalings_are_refused_by_name(path: Path, scaling: str) -> None:
    """Case 101: longrope and unknown types."""
    with pytest.raises(UnsupportedModelError, match=f"unsupported rope scaling '{scaling}'"):
        rope_of(path, {TYPE: scaling, FACTOR: 4.0})


def test_llama3_scaling_is_carried_by_its_tensor(path: Path) -> None:
    """Case 20: the factors of rope_freqs.weight are the whole scaling."""
    rope = rope_of(path, {TYPE: "llama3", FACTOR: 8.0}, **{"rope_freqs.weight": np.ones(8)})
    assert rope.scaling == "llama3"
    with pytest.raises(
        UnsupportedModelError, match=r"'llama3' needs the tensor 'rope_freqs\.weight'"
    ):
        rope_of(path, {TYPE: "llama3", FACTOR: 8.0})


@pytest.mark.parametrize("name", ["attn_factor", "yarn_attn_factor"])
def test_attention_factor_without_yarn_is_refused(path: Path, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{name} = 1.5 is only known for yarn"):
        rope_of(path, {TYPE: "linear", FACTOR: 2.0, f"llama.rope.scaling.{name}": 1.5})
