"""The engine on the CUDA backend: golden logits, greedy tokens, and rows that depend on nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine import EngineConfig, Request, SamplingParams
from engine.engine import Engine
from tests import golden
from tests.test_cuda_ops import open_ops

pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu

MAX_ERROR = 3e-2  # half operands
POOL = 64 << 20


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    made = open_ops()
    yield made
    made.close()


class OwnOps:
    """The backend of a whole module, which an engine must not close."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def close(self) -> None:
        pass


def open_engine(ops: Any, name: str, **settings: Any) -> Engine:
    settings = {"kv_type": "f16", "kv_memory_nbytes": POOL, "expand": "never", **settings}
    return Engine(golden.load(name).model, EngineConfig(**settings), ops=OwnOps(ops))


def logit_error(engine: Engine, reference: golden.Golden, kv_type: Any) -> float:
    errors = []
    for sequence in reference.sequences:
        logits = engine.logits(sequence.ids, kv_type=kv_type)
        errors.append(np.abs(logits[sequence.positions] - sequence.logits).max())
    return float(max(errors))


def run_rows(engine: Engine, requests: list[Request]) -> dict[int, tuple[int, ...]]:
    for request in requests:
        engine.add(request)
    finished = {}
    while engine.has_work:
        finished.update({row.row_index: row for row in engine.sweep()})
    assert all(row.status == "ok" for row in finished.values())
    return {index: (row.token_ids, row.logprobs) for index, row in finished.items()}


@pytest.mark.parametrize("name", golden.NAMES)
def test_logits_and_greedy_tokens_match_the_reference(
    ops: Any, name: str, record_property: pytest.RecordProperty
) -> None:
    reference = golden.load(name)
    with open_engine(ops, name) as engine:
        error = logit_error(engine, reference, "f16")
        error_f32 = logit_error(engine, reference, "f32")
        print(f"max abs error {name}: {error:.2e} with f16 KV, {error_f32:.2e} with f32 KV")
        ids = reference.sequences[1].ids.astype(np.int32)
        params = SamplingParams(max_tokens=len(reference.greedy_ids), ignore_eos=True)
        rows = run_rows(engine, [Request(row_index=0, token_ids=ids, params=params)])
    assert error <= MAX_ERROR and error_f32 <= MAX_ERROR
    close = np.flatnonzero(reference.greedy_margin < 2 * error)
    comparable = int(close[0]) if len(close) else len(reference.greedy_ids)
    assert list(rows[0][0][:comparable]) == list(reference.greedy_ids[:comparable])


def prompts() -> list[Request]:
    rng = np.random.default_rng(5)
    rows = []
    for index in range(40):
        temperature = float(index % 2)
        params = SamplingParams(
            max_tokens=int(rng.integers(3, 12)),
            logprobs=3,
            ignore_eos=True,
            temperature=temperature,
        )
        ids = rng.integers(3, 500, int(rng.integers(1, 90))).astype(np.int32)
        rows.append(Request(row_index=index, token_ids=ids, params=params, job_seed=7))
    return rows


@pytest.mark.parametrize("name", ["llama-q4_k_m", "qwen3-headdim96-q4_0"])
def test_rows_alone_in_a_batch_shuffled_and_in_chunks_are_the_same(ops: Any, name: str) -> None:
    """Case 21: tokens and log-probabilities to the last bit, in both weight layouts."""
    requests = prompts()
    with open_engine(ops, name) as engine:
        alone: dict[int, Any] = {}
        for request in requests:
            alone |= run_rows(engine, [request])
        assert run_rows(engine, requests) == alone
        shuffled = [requests[i] for i in np.random.default_rng(1).permutation(len(requests))]
        assert run_rows(engine, shuffled) == alone
    for settings in ({"sweep_tokens": 7}, {"sweep_tokens": 300}, {"expand": "always"}):
        with open_engine(ops, name, **settings) as engine:
            assert run_rows(engine, requests) == alone, settings


@pytest.mark.parametrize(
    "host_share, ahead_nbytes", [(0.5, 1 << 30), (1.0, 0), (1.0, 300_000), (1.0, 1 << 30)]
)
def test_weights_in_host_memory_give_the_same_bytes(
    ops: Any, host_share: float, ahead_nbytes: int
) -> None:
    """From a ring that holds one weight, a few, and all of them."""
    requests = prompts()
    with open_engine(ops, "llama-q4_k_m") as engine:
        expected = run_rows(engine, requests)
    tiered = open_ops(host_share=host_share, ahead_nbytes=ahead_nbytes)
    with open_engine(tiered, "llama-q4_k_m", sweep_tokens=50) as engine:
        copies = []
        for _ in range(2):
            assert run_rows(engine, requests) == expected
            copies.append(tiered.host_tier.nbytes_copied)
        assert engine.logits(requests[0].token_ids, kv_type="f16").shape[0] > 0
        assert 0 < tiered.host_tier.nbytes <= copies[0] < copies[1]
    tiered.close()
