"""A row's bytes depend on that row alone: not on neighbours, order, chunks, threads or layout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from engine import EngineConfig, FinishedRow, Request, SamplingParams
from engine.engine import Engine
from kernels.ops import Batch, Float32, KvPool
from tests import golden

NUM_ROWS = 50
POOL = 256 << 20


def prompts() -> list[Request]:
    """Rows of unlike lengths; every other one samples, some with seeds of their own."""
    rng = np.random.default_rng(5)
    rows = []
    for index in range(NUM_ROWS):
        params = SamplingParams(max_tokens=int(rng.integers(3, 12)), logprobs=3, ignore_eos=True)
        if index % 2:
            seed = 42 if index % 3 == 0 else None
            params = replace(params, temperature=1.0, seed=seed, top_p=0.9)
        ids = rng.integers(3, 500, int(rng.integers(1, 90))).astype(np.int32)
        rows.append(Request(row_index=index, token_ids=ids, params=params, job_seed=7))
    return rows


class LogitTap:
    """Keeps the bytes of each row's logits by (row, position)."""

    def __init__(self, engine: Engine) -> None:
        self.seen: dict[tuple[int, int], bytes] = {}
        self._engine = engine
        self._forward: Callable[[Batch, KvPool, Hashable], Float32] = engine._model.forward
        engine._model.forward = self.forward  # type: ignore[method-assign]

    def forward(self, batch: Batch, pool: KvPool, key: Hashable = None) -> Float32:
        logits = self._forward(batch, pool, key)
        for line, token in enumerate(batch.logit_indices):
            row = self._engine._running[int(batch.rows[token])].request.row_index
            self.seen[row, int(batch.positions[token])] = logits[line].tobytes()
        return logits


def run(
    engine: Engine, requests: Sequence[Request], *, together: bool
) -> tuple[dict[int, FinishedRow], dict[tuple[int, int], bytes]]:
    tap = LogitTap(engine)
    finished = {}
    for group in [requests] if together else [[request] for request in requests]:
        for request in group:
            engine.add(request)
        while engine.has_work:
            finished.update({row.row_index: row for row in engine.sweep()})
    assert all(row.status == "ok" for row in finished.values())
    return finished, tap.seen


def engine_with(name: str, **settings: object) -> Engine:
    config = EngineConfig(kv_memory_nbytes=POOL, **settings)  # type: ignore[arg-type]
    return Engine(golden.load(name).model, config)


@pytest.fixture(scope="module", params=["llama-q4_k_m", "qwen3-headdim96-q4_0"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(name: str) -> tuple[dict[int, FinishedRow], dict[tuple[int, int], bytes]]:
    with engine_with(name) as engine:
        return run(engine, prompts(), together=False)


def long_neighbour() -> Request:
    ids = np.random.default_rng(9).integers(3, 500, 3000).astype(np.int32)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    return Request(row_index=1000, token_ids=ids, params=params)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sweep_tokens": 16},
        {"sweep_tokens": 37},
        {"num_threads": 1},
        {"num_threads": 3},
        {"expand": "never"},
    ],
    ids=lambda settings: "-".join(f"{key}={value}" for key, value in settings.items()) or "plain",
)
def test_batch_gives_each_row_the_bytes_it_has_alone(
    name: str,
    alone: tuple[dict[int, FinishedRow], dict[tuple[int, int], bytes]],
    settings: dict[str, object],
) -> None:
    """Cases 31, 32: one batch, small prefill chunks, other thread counts, quantised weights."""
    with engine_with(name, **settings) as engine:
        rows, logits = run(engine, prompts(), together=True)
    assert rows == alone[0]
    assert logits == alone[1]


def test_order_and_a_long_neighbour_change_nothing(
    name: str, alone: tuple[dict[int, FinishedRow], dict[tuple[int, int], bytes]]
) -> None:
    """Case 80: short rows beside a long one, in shuffled order."""
    shuffled = prompts()
    np.random.default_rng(1).shuffle(shuffled)  # type: ignore[arg-type]
    with engine_with(name) as engine:
        rows, logits = run(engine, [long_neighbour(), *shuffled], together=True)
    assert {index: row for index, row in rows.items() if index < NUM_ROWS} == alone[0]
    assert {key: value for key, value in logits.items() if key[0] < NUM_ROWS} == alone[1]


def test_unseeded_twins_differ_from_each_other_and_repeat_between_runs() -> None:
    """Case 32."""
    ids = np.arange(3, 20, dtype=np.int32)
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    twins = [Request(row_index=i, token_ids=ids, params=params, job_seed=1) for i in (0, 1)]
    with engine_with("llama-q4_0") as engine:
        first, _ = run(engine, twins, together=True)
        again, _ = run(engine, twins[::-1], together=True)
    assert first == again
    assert first[0].token_ids != first[1].token_ids


DIGEST_PROGRAM = """
import hashlib
from tests.test_engine_invariance import engine_with, prompts, run
with engine_with("llama-q4_k_m") as engine:
    rows, logits = run(engine, prompts()[:10], together=True)
print(hashlib.sha256(repr((sorted(rows.items()), sorted(logits.items()))).encode()).hexdigest())
"""


def test_blas_kernel_choice_does_not_reach_the_bytes() -> None:
    digests = set()
    for core_type in (None, "Haswell"):
        environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
        if core_type is not None:
            environment["OPENBLAS_CORETYPE"] = core_type
        digests.add(
            subprocess.run(
                [sys.executable, "-c", DIGEST_PROGRAM],
                env=environment, capture_output=True, text=True, check=True,
            ).stdout
        )  # fmt: skip
    assert len(digests) == 1
