"""The engine with products of few tokens: nearer to the reference than tiles, as regular."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine import EngineConfig
from engine.engine import Engine
from tests import golden
from tests.test_cuda_engine import logit_error, open_engine, prompts, run_rows
from tests.test_cuda_ops import open_ops

pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu

MAX_ERROR = 2e-3


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    made = open_ops(products="few")
    yield made
    made.close()


@pytest.mark.parametrize("name", golden.NAMES)
def test_logits_match_the_reference_without_rounded_inputs(ops: Any, name: str) -> None:
    reference = golden.load(name)
    with open_engine(ops, name, sweep_tokens=64) as engine:
        error = logit_error(engine, reference, "f32")
    print(f"max abs error {name}: {error:.2e} with products of few tokens and f32 KV")
    assert error <= MAX_ERROR


@pytest.mark.parametrize("name", ["llama-q4_k_m", "llama-q6_k", "qwen3-headdim96-q4_0"])
def test_rows_alone_in_a_batch_shuffled_and_in_chunks_are_the_same(ops: Any, name: str) -> None:
    """Case 21: tokens and log-probabilities to the last bit."""
    requests = prompts()
    with open_engine(ops, name, sweep_tokens=40) as engine:
        alone: dict[int, Any] = {}
        for request in requests:
            alone |= run_rows(engine, [request])
        assert run_rows(engine, requests) == alone
        shuffled = [requests[i] for i in np.random.default_rng(1).permutation(len(requests))]
        assert run_rows(engine, shuffled) == alone
    for sweep_tokens in (1, 8, 300):
        with open_engine(ops, name, sweep_tokens=sweep_tokens) as engine:
            assert run_rows(engine, requests) == alone, sweep_tokens


@pytest.mark.parametrize("sweep_tokens, way", [(8, "few"), (9, "tiles"), (None, "tiles")])
def test_engines_of_small_sweeps_multiply_few_tokens_and_say_so(
    sweep_tokens: int | None, way: str
) -> None:
    model = golden.load("llama-q4_k_m").model
    config = EngineConfig(device="gpu", sweep_tokens=sweep_tokens, kv_memory_nbytes=16 << 20)
    with Engine(model, config) as engine:
        assert engine.record()["products"] == way
