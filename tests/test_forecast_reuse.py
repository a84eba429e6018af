"""What is forecast for rows that share beginnings, against an engine that runs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from engine import EngineConfig, Request, SamplingParams
from engine.costs import DEFAULT_RATES
from engine.engine import Engine
from engine.planner import ModelSizes, Plan, Workload
from engine.prediction import Predictor
from jobs.sharing import SampledRow, estimate_sharing
from kernels.ops import KvType
from scripts.synth_gguf import Shape, write_model

SHAPE = Shape(num_layers=2, hidden=128, ffn=256, num_heads=4, vocab_size=2000, context_length=512)
OWN_TOKENS, NEW_TOKENS, NUM_ROWS = 12, 8, 160
PAGE_NBYTES: dict[KvType, int] = {"f32": 65_536, "int8": 17_408}


@dataclass(frozen=True)
class Ran:
    """sweeps; most rows on board; prompt tokens computed; the plan, and what it was made of"""

    num_sweeps: int
    most_rows: int
    computed_tokens: int
    plan: Plan
    sizes: ModelSizes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_model(path, SHAPE, type_name="F16")
    return path


def requests(num_prefixes: int, prefix_tokens: int) -> list[Request]:
    """Grouped by prefix, as a job hands them out."""
    rng = np.random.default_rng(7)
    prefixes = rng.integers(10, 1900, (num_prefixes, prefix_tokens))
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    found = []
    for index in range(NUM_ROWS):
        end = rng.integers(10, 1900, OWN_TOKENS)
        ids = np.concatenate([prefixes[index * num_prefixes // NUM_ROWS], end]).astype(np.int32)
        found.append(Request(row_index=index, token_ids=ids, params=params))
    return found


def workload(rows: list[Request]) -> Workload:
    run = [SampledRow(row, "{}", NEW_TOKENS) for row in rows]
    found = estimate_sharing([run], num_rows=len(rows), num_samples=1, dedupe=False)
    return Workload(
        num_rows=len(rows),
        prompt_tokens=found.prompt_tokens,
        output_tokens=found.output_tokens,
        reused_tokens=found.reused_tokens,
        reused_pages=found.reused_pages,
    )


def run(model: Path, rows: list[Request], config: EngineConfig) -> Ran:
    with Engine(model, config) as engine:
        for row in rows:
            engine.add(row)
        num_sweeps = most_rows = 0
        while engine.has_work:
            engine.sweep()
            num_sweeps += 1
            most_rows = max(most_rows, engine.num_running)
        totals = engine.totals
        return Ran(
            num_sweeps,
            most_rows,
            totals.prompt_tokens - totals.reused_tokens,
            engine.plan,
            engine._sizes,
        )


@pytest.mark.parametrize("kv_type", ["f32", "int8"])
@pytest.mark.parametrize(("num_prefixes", "prefix_tokens"), [(1, 300), (8, 100), (160, 100)])
def test_an_engine_does_what_is_forecast(
    model: Path, num_prefixes: int, prefix_tokens: int, kv_type: KvType
) -> None:
    rows = requests(num_prefixes, prefix_tokens)
    config = EngineConfig(
        device="cpu", kv_type=kv_type, sweep_tokens=256, kv_memory_nbytes=60 * PAGE_NBYTES[kv_type]
    )
    ran = run(model, rows, config)
    work = workload(rows).with_reuse(reuses=True, shares_parts=kv_type != "int8")
    assert ran.plan.kv_pages == 60
    predicted = Predictor(ran.sizes, DEFAULT_RATES, work).predict(ran.plan)
    assert predicted["computed_prompt_tokens"] * NUM_ROWS == pytest.approx(
        ran.computed_tokens, rel=0.05
    )
    assert ran.most_rows >= 0.9 * predicted["rows_on_board"]
    assert predicted["num_sweeps"] == pytest.approx(ran.num_sweeps, rel=0.2)
