"""Device memory over a run: allocated once, whatever rows come."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import EngineConfig, Request, SamplingParams
from engine.engine import Engine
from scripts.synth_gguf import Shape, write_model
from tests.test_cuda_engine import run_rows
from tests.test_cuda_ops import open_ops

cp = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu

LENGTHS = (10, 3000)


def requests(rng: np.random.Generator, num_rows: int) -> list[Request]:
    params = [
        SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, top_p=0.9, logprobs=2),
        SamplingParams(max_tokens=3, ignore_eos=True),
    ]
    return [
        Request(
            row_index=index,
            token_ids=rng.integers(3, 500, LENGTHS[index % 2]).astype(np.int32),
            params=params[index % 2],
        )
        for index in range(num_rows)
    ]


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
def test_memory_does_not_grow_while_short_and_long_rows_take_turns(
    tmp_path: Path, kv_type: Any
) -> None:
    """Case 107: what the device has taken after a warm-up is all that it ever takes."""
    path = tmp_path / "m.gguf"
    shape = Shape(num_layers=2, hidden=256, ffn=512, num_heads=4, num_kv_heads=2, vocab_size=2000)
    write_model(path, shape, type_name="Q4_K")
    config = EngineConfig(
        device="gpu", kv_type=kv_type, kv_memory_nbytes=16 << 20, sweep_tokens=700
    )
    ops, rng = open_ops(), np.random.default_rng(3)
    pool = cp.get_default_memory_pool()
    with Engine(path, config, ops=ops) as engine:
        run_rows(engine, requests(rng, 40))
        taken = pool.total_bytes()
        for _ in range(5):
            run_rows(engine, requests(rng, 40))
            assert pool.total_bytes() <= taken


def test_an_engine_that_nobody_holds_gives_its_memory_back_at_once(tmp_path: Path) -> None:
    """No cycle keeps it until Python's collector runs, which may be in a recording."""
    path = tmp_path / "m.gguf"
    write_model(path, Shape(num_layers=2, hidden=256, ffn=512, num_heads=4, num_kv_heads=2))
    ops = open_ops()
    gc.collect()
    gc.disable()
    try:
        engine = Engine(path, EngineConfig(kv_memory_nbytes=64 << 20), ops=ops)
        alive = weakref.ref(engine)
        run_rows(engine, requests(np.random.default_rng(3), 4)[::2])
        engine.close()
        del engine
        assert alive() is None
    finally:
        gc.enable()
