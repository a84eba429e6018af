"""Choices on the GPU beside those on the CPU: the same tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.requests import RowError, SamplingParams
from engine.sampler import RowSampler
from kernels.cuda import cuda_ops
from kernels.ops import KernelError
from tests.sampler_helpers import choose, row_of

cp = pytest.importorskip("cupy", reason="CuPy is not installed")
sampling = pytest.importorskip("kernels.cuda.sampling")
pytestmark = pytest.mark.gpu

LOWEST = np.finfo(np.float32).min


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    try:
        made = cuda_ops()
    except KernelError as error:
        pytest.skip(str(error))
    yield made
    made.close()


def random_params(rng: np.random.Generator, num_tokens: int) -> SamplingParams:
    def maybe(share: float, name: str, values: list[Any]) -> dict[str, Any]:
        return {name: values[rng.integers(len(values))]} if rng.random() < share else {}

    biases = [(int(token), float(rng.normal() * 3)) for token in rng.integers(0, num_tokens, 6)]
    twice = (biases[0][0], 0.7)
    return SamplingParams(
        **maybe(0.8, "temperature", [0.3, 1.0, 1.7, 1e-6, 1000.0]),
        **maybe(0.5, "top_k", [1, 2, 40, 300, 3000, 10**6]),
        **maybe(0.5, "top_p", [1e-9, 0.3, 0.9, 0.999]),
        **maybe(0.4, "min_p", [1e-3, 0.1, 1.0]),
        **maybe(0.4, "logprobs", [0, 1, 5, 20]),
        **maybe(0.3, "repetition_penalty", [0.7, 1.3]),
        **maybe(0.3, "presence_penalty", [0.4]),
        **maybe(0.3, "frequency_penalty", [0.3]),
        **maybe(0.3, "logit_bias", [(*biases, twice, twice)]),
        **maybe(0.3, "seed", [7, -(2**63), 2**63 - 1]),
        **maybe(0.3, "stop_token_ids", [(3 % num_tokens, biases[1][0])]),
        min_tokens=int(rng.integers(3)),
        max_tokens=9,
    )


def random_rows(rng: np.random.Generator, num_rows: int, num_tokens: int) -> list[RowSampler]:
    return [
        row_of(
            random_params(rng, num_tokens),
            row_index=index + 2**33 * (index % 2),
            sample_index=index % 3,
            job_seed=index,
            prompt=rng.integers(0, num_tokens, 40).tolist(),
            output=rng.integers(0, num_tokens, index % 4).tolist(),
        )
        for index in range(num_rows)
    ]


def random_logits(rng: np.random.Generator, num_rows: int, width: int) -> np.ndarray:
    """Normal, many equal, all equal, and nearly all impossible, by turns."""
    logits = rng.normal(0, 3, (num_rows, width)).astype(np.float32)
    logits[1::4] = np.round(logits[1::4])
    logits[2::4] *= 0
    logits[3::4, ::7] = LOWEST
    return logits


def assert_same(ops: Any, logits: np.ndarray, rows: list[RowSampler], num_tokens: int) -> None:
    there = ops.put(logits)
    expected = choose(logits, rows, num_tokens=num_tokens)
    chosen = choose(there, rows, num_tokens=num_tokens, ops=ops)
    for row, ours, wanted in zip(rows, chosen, expected, strict=True):
        assert str(ours) == str(wanted), row.params
    assert ops.get(there).tobytes() == logits.tobytes()


@pytest.mark.parametrize(
    "num_rows, num_tokens", [(300, 300), (40, 1), (60, 33), (60, 1023), (60, 49152), (60, 128256)]
)
def test_choices_are_those_of_the_cpu(ops: Any, num_rows: int, num_tokens: int) -> None:
    """Case 28: every mix of parameters in one batch, with padding behind the vocabulary."""
    rng = np.random.default_rng(num_tokens)
    logits = random_logits(rng, num_rows, num_tokens + 8)
    assert_same(ops, logits, random_rows(rng, num_rows, num_tokens), num_tokens)


def test_rows_that_do_not_fit_together_are_chosen_in_turns(
    ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    rows, logits = random_rows(rng, 50, 2000), random_logits(rng, 50, 2000)
    for nbytes in (1, 20_000, 200_000):
        monkeypatch.setattr(sampling, "ROOM_NBYTES", nbytes)
        assert_same(ops, logits, rows, 2000)


def test_a_row_depends_on_nothing_but_itself(ops: Any) -> None:
    """Case 32: alone and among neighbours."""
    rng = np.random.default_rng(2)
    rows, logits = random_rows(rng, 40, 500), random_logits(rng, 40, 500)
    there = ops.put(logits)
    together = choose(there, rows, num_tokens=500, ops=ops)
    for i in range(len(rows)):
        alone = choose(there[i : i + 1], [rows[i]], num_tokens=500, ops=ops)
        assert str(alone[0]) == str(together[i])


def test_rows_without_a_choice_say_why(ops: Any) -> None:
    logits = np.zeros((4, 50), np.float32)
    logits[1, 7], logits[2, 9] = np.nan, np.inf
    masked = row_of(
        SamplingParams(stop_token_ids=tuple(range(48)), min_tokens=2, max_tokens=4), row_index=3
    )
    rows = [row_of(row_index=0), row_of(row_index=1), row_of(row_index=2, temperature=1.0), masked]
    assert_same(ops, logits, rows, 48)
    first, *others = choose(ops.put(logits), rows, num_tokens=48, ops=ops)
    assert not isinstance(first, RowError)
    assert all(isinstance(other, RowError) for other in others)


def test_no_rows_at_all(ops: Any) -> None:
    assert choose(ops.put(np.zeros((0, 9), np.float32)), [], num_tokens=9, ops=ops) == []
