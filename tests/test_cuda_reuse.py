"""Prompts that begin alike, on the CUDA backend: the same bytes with reuse and without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.test_cuda_engine import open_engine, ops
from tests.test_cuda_ops import KV_TYPES
from tests.test_preemption import run_with_preemptions
from tests.test_prefix_reuse import mixed_rows, num_computed, run, with_common_prefix

pytestmark = pytest.mark.gpu

__all__ = ["ops"]  # the fixture of the module


@pytest.mark.parametrize("name", ["llama-q4_k_m", "qwen3-headdim96-q4_0"])
@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("sweep_tokens", [None, 37], ids=["whole", "chunked"])
def test_every_byte_is_the_same_with_reuse_and_without(
    ops: Any, name: str, kv_type: str, sweep_tokens: int | None
) -> None:
    seen = {}
    for reuse in (False, True):
        settings = {"kv_type": kv_type, "sweep_tokens": sweep_tokens, "reuse_prefixes": reuse}
        with open_engine(ops, name, **settings) as engine:
            seen[reuse] = run(engine, mixed_rows())
            assert (engine.totals.reused_tokens > 1000) == reuse
    assert seen[True] == seen[False]
    assert all(row.status == "ok" for row in seen[True].values())


def test_a_common_beginning_is_computed_once(ops: Any) -> None:
    prefix = list(range(3, 153))
    with open_engine(ops, "llama-q4_0") as engine:
        run(engine, with_common_prefix(100, prefix))
        assert num_computed(engine) == len(prefix) + 100 * 20


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_a_preempted_row_ends_with_the_same_bytes(ops: Any, kv_type: str) -> None:
    with open_engine(ops, "llama-q4_k_m", kv_type=kv_type) as engine:
        undisturbed = run(engine, mixed_rows())
    with open_engine(ops, "llama-q4_k_m", kv_type=kv_type) as engine:
        for each in mixed_rows():
            engine.add(each)
        rows, taken = run_with_preemptions(engine, seed=3)
        assert engine.totals.num_preempted == taken > 20
    assert rows == undisturbed
