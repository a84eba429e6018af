"""The measure of what a smaller KV cache changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import EngineConfig
from engine.engine import Engine
from engine.kv_accuracy import KvAccuracy, compare_logits, mean_of, measure_kv_accuracy
from kernels.ops import Float32, KvType
from tests import golden
from tests.smollm2 import smollm2_path

PROSE = (golden.GOLDEN.parent / "prose.txt").read_text()


def random_logits(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@given(st.integers(0, 100), st.integers(-50, 50))
def test_logits_that_differ_by_a_constant_are_the_same_distribution(
    seed: int, constant: int
) -> None:
    logits = (random_logits(seed, 7, 11) * 1024).round() / 1024  # adding a constant is exact
    ids = np.arange(7, dtype=np.int32)
    found = compare_logits(logits + np.float32(constant), logits, ids)
    assert found.greedy_agreement == 1
    assert found.mean_logprob_difference == found.mean_kl == 0


def test_figures_of_a_known_pair_of_distributions() -> None:
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], np.float32))
    logits = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]], np.float32))
    found = compare_logits(logits, reference, np.array([0, 2], np.int32))
    assert found.num_tokens == 2
    assert found.greedy_agreement == 0.5
    assert found.mean_logprob_difference == pytest.approx(np.log(2) / 2, rel=1e-6)
    assert found.mean_kl == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 2, rel=1e-6)


def test_means_count_each_token_once() -> None:
    parts = [
        KvAccuracy(num_tokens=1, greedy_agreement=0, mean_logprob_difference=4, mean_kl=8),
        KvAccuracy(num_tokens=3, greedy_agreement=1, mean_logprob_difference=0, mean_kl=0),
    ]
    assert mean_of(parts) == KvAccuracy(
        num_tokens=4, greedy_agreement=0.75, mean_logprob_difference=1, mean_kl=2
    )


class TwoCaches:
    """Logits that tell which tokens, with which cache, from where on."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, KvType, int]] = []

    def logits(
        self, token_ids: Sequence[int], kv_type: KvType = "f32", *, first: int = 0
    ) -> Float32:
        self.calls.append((len(token_ids), kv_type, first))
        return random_logits(len(token_ids), len(token_ids), 50)[first:]


def test_the_last_places_of_each_row_are_compared() -> None:
    rows = [np.arange(n, dtype=np.int32) for n in (1, 2, 10, 40)]
    engine = TwoCaches()
    found = measure_kv_accuracy(engine, rows, "int8", most_compared=16)
    assert engine.calls == [
        (1, "int8", 0), (1, "f16", 0), (9, "int8", 0), (9, "f16", 0), (39, "int8", 23),
        (39, "f16", 23),
    ]  # fmt: skip
    assert found == KvAccuracy(
        num_tokens=1 + 9 + 16, greedy_agreement=1, mean_logprob_difference=0, mean_kl=0
    )


def test_rows_without_a_next_token_are_refused() -> None:
    with pytest.raises(ValueError, match="no row has two tokens"):
        measure_kv_accuracy(TwoCaches(), [np.arange(1, dtype=np.int32)], "int8")


def test_integers_change_little_on_ordinary_text() -> None:
    """SmolLM2 on prose, against float32: the bound that KV of 8 bits is held to."""
    with Engine(smollm2_path(), EngineConfig(kv_memory_nbytes=64 << 20)) as engine:
        ids = np.asarray(engine.tokenizer.encode(PROSE), np.int32)
        assert len(ids) > 400
        int8 = measure_kv_accuracy(engine, [ids], "int8", reference="f32", most_compared=len(ids))
        f16 = measure_kv_accuracy(engine, [ids], "f16", reference="f32", most_compared=len(ids))
    assert int8.mean_kl <= 5e-4
    assert int8.greedy_agreement > 0.97
    assert f16.mean_kl < int8.mean_kl / 10, "the measure does not tell the types apart"
