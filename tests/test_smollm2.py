"""A real model end to end: SmolLM2-135M-Instruct against a float64 reference."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from engine import EngineConfig, Request, SamplingParams
from engine.engine import Engine
from tests import golden
from tests.smollm2 import smollm2_path

CASES = json.loads((golden.GOLDEN / "smollm2.json").read_text())["cases"]
MAX_NEW = 48


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(smollm2_path(), EngineConfig(kv_memory_nbytes=1 << 30)) as engine:
        yield engine


def test_first_logits_match_the_reference(engine: Engine) -> None:
    for case in CASES:
        logits = engine.logits(case["prompt_ids"])[-1]
        for token_id, value in case["first_logits"]:
            assert abs(logits[token_id] - value) < 1e-3


def test_greedy_tokens_match_the_reference(engine: Engine) -> None:
    """All conversations in one batch, compared up to the first margin below twice the error."""
    error = max(
        abs(engine.logits(case["prompt_ids"])[-1][token_id] - value)
        for case in CASES
        for token_id, value in case["first_logits"]
    )
    for index, case in enumerate(CASES):
        ids = np.asarray(case["prompt_ids"], np.int32)
        params = SamplingParams(max_tokens=len(case["greedy"]))
        engine.add(Request(row_index=index, token_ids=ids, params=params))
    rows = {}
    while engine.has_work:
        rows.update({row.row_index: row for row in engine.sweep()})
    compared = 0
    for index, case in enumerate(CASES):
        margins = np.array([margin for _, margin in case["greedy"]])
        close = np.flatnonzero(margins < 2 * error)
        count = int(close[0]) if len(close) else len(margins)
        expected = [token for token, _ in case["greedy"]][:count]
        assert list(rows[index].token_ids[:count]) == expected, case["input"]
        compared += count
    assert compared >= 0.8 * sum(len(case["greedy"]) for case in CASES)
