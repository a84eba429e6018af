"""Logits and greedy tokens against float64 references that this project did not compute."""

from __future__ import annotations

import numpy as np
import pytest

from engine import EngineConfig, Request, SamplingParams
from engine.engine import Engine
from tests import golden

MAX_ERROR = {"f32": 1e-3, "f16": 1.5e-2}
SMALL_POOL = 64 << 20


def logit_error(engine: Engine, reference: golden.Golden, kv_type: str) -> float:
    errors = []
    for sequence in reference.sequences:
        logits = engine.logits(sequence.ids, kv_type=kv_type)
        errors.append(np.abs(logits[sequence.positions] - sequence.logits).max())
    return float(max(errors))


def greedy(engine: Engine, ids: np.ndarray, max_tokens: int) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.add(Request(row_index=0, token_ids=ids.astype(np.int32), params=params))
    while engine.has_work:
        for row in engine.sweep():
            assert row.status == "ok", row
            return row.token_ids
    raise AssertionError("the row never finished")


@pytest.mark.parametrize("expand", ["always", "never"])
@pytest.mark.parametrize("name", golden.NAMES)
def test_logits_match_the_reference(
    name: str, expand: str, record_property: pytest.RecordProperty
) -> None:
    """Cases 19, 20, 22, 52, 53, 101: every type, tied head, rope factors, biases, norms."""
    reference = golden.load(name)
    config = EngineConfig(expand=expand, kv_memory_nbytes=SMALL_POOL, num_threads=2)
    with Engine(reference.model, config) as engine:
        layout = {"always": "f32-panels", "never": "gguf-rows"}[expand]
        assert engine.record()["weight_layout"] == layout
        for kv_type, bound in MAX_ERROR.items():
            error = logit_error(engine, reference, kv_type)
            record_property(f"max_abs_error_{kv_type}", error)
            assert error <= bound, f"{name} with {kv_type} KV: {error} > {bound}"


@pytest.mark.parametrize("name", golden.NAMES)
def test_greedy_tokens_match_up_to_the_first_close_call(name: str) -> None:
    reference = golden.load(name)
    with Engine(reference.model, EngineConfig(kv_memory_nbytes=SMALL_POOL)) as engine:
        error = logit_error(engine, reference, "f32")
        tokens = greedy(engine, reference.sequences[1].ids, len(reference.greedy_ids))
    close = np.flatnonzero(reference.greedy_margin < 2 * error)
    comparable = int(close[0]) if len(close) else len(reference.greedy_ids)
    assert comparable >= 0.8 * len(reference.greedy_ids)
    assert list(tokens[:comparable]) == list(reference.greedy_ids[:comparable])


def test_split_file_gives_the_bytes_of_the_whole_one() -> None:
    reference = golden.load("llama-q4_k_m")
    ids = reference.sequences[2].ids
    config = EngineConfig(kv_memory_nbytes=SMALL_POOL)
    with Engine(reference.model, config) as whole, Engine(golden.split_model(), config) as split:
        assert whole.logits(ids).tobytes() == split.logits(ids).tobytes()


def test_expanded_and_quantised_weights_give_the_same_bytes() -> None:
    for name in ("llama-q4_k_m", "qwen2-q4_0", "llama-q2_k"):
        reference = golden.load(name)
        ids = reference.sequences[3].ids
        outputs = []
        for expand in ("always", "never"):
            config = EngineConfig(expand=expand, kv_memory_nbytes=SMALL_POOL)
            with Engine(reference.model, config) as engine:
                outputs.append(engine.logits(ids).tobytes())
        assert outputs[0] == outputs[1], name
