"""Rotary embedding, KV pages and attention of the CPU backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kernels.cpu import CpuOps
from tests.cpu_helpers import (
    AttentionCase,
    attention_case,
    attention_reference,
    heads_reference,
    poisoned,
    segments_batch,
)

Segments = list[tuple[int, int, int]]
HEADS = [(1, 1), (2, 2), (3, 1), (4, 1), (9, 3), (8, 1), (40, 1)]


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, CpuOps]]:
    made = {workers: CpuOps(workers) for workers in (1, 2, 3)}
    yield made
    for ops in made.values():
        ops.close()


@pytest.fixture(scope="module")
def ops(teams: dict[int, CpuOps]) -> CpuOps:
    return teams[2]


def at_once(case: AttentionCase) -> list[Segments]:
    return [[(row, 0, len(x)) for row, x in enumerate(case.qkv)]]


def in_chunks(case: AttentionCase, sizes: list[int]) -> list[Segments]:
    """Every row in chunks of sizes[row % len(sizes)], all rows advancing together."""
    step = [sizes[row % len(sizes)] for row in range(len(case.qkv))]
    sweeps = []
    for number in range(max(-(-len(x) // s) for x, s in zip(case.qkv, step, strict=True))):
        begins = [(row, number * s) for row, s in enumerate(step)]
        sweeps.append(
            [
                (row, begin, min(begin + step[row], len(case.qkv[row])))
                for row, begin in begins
                if begin < len(case.qkv[row])
            ]
        )
    return sweeps


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_matches_float64_for_every_grouping_of_heads(
    ops: CpuOps, num_heads: int, num_kv_heads: int
) -> None:
    rng = np.random.default_rng(num_heads)
    case = attention_case(rng, [1, 31, 32, 33, 290], num_heads=num_heads, num_kv_heads=num_kv_heads)
    for row, out in enumerate(case.run(ops, at_once(case))):
        np.testing.assert_allclose(out, attention_reference(case, row), atol=5e-6, rtol=0)


@pytest.mark.parametrize(
    ("key_length", "value_length"),
    [(16, 16), (18, 34), (64, 64), (80, 80), (96, 64), (128, 128), (256, 256)],
)
def test_matches_float64_for_every_head_size(
    ops: CpuOps, key_length: int, value_length: int
) -> None:
    rng = np.random.default_rng(key_length)
    case = attention_case(
        rng, [70, 257], num_heads=4, num_kv_heads=2, key_length=key_length,
        value_length=value_length,
    )  # fmt: skip
    for row, out in enumerate(case.run(ops, at_once(case))):
        np.testing.assert_allclose(out, attention_reference(case, row), atol=5e-6, rtol=0)


@pytest.mark.parametrize("style", ["adjacent", "halves"])
@pytest.mark.parametrize("rotary_dim", [0, 18, 64])
@pytest.mark.parametrize("norms", [False, True])
def test_q_is_normalised_and_rotated(ops: CpuOps, style: str, rotary_dim: int, norms: bool) -> None:
    rng = np.random.default_rng(rotary_dim)
    case = attention_case(
        rng, [45], num_heads=4, num_kv_heads=2, rotary_dim=rotary_dim, style=style, norms=norms
    )
    batch = segments_batch([(0, 0, 45)], [45])
    pool: Any = ops.kv_pool(case.shape, num_pages=2, kv_type="f32")
    plan, q = ops.plan(batch, case.shape, 4), poisoned(45, 4 * 64)
    ops.run(lambda w: ops.rope_store(w, plan, case.qkv[0], case.head, case.rope, batch, pool, 1, q))
    expected, _, _ = heads_reference(case, 0)
    np.testing.assert_allclose(q.reshape(45, 4, 64), expected, atol=3e-6, rtol=0)
    for row, out in enumerate(case.run(ops, at_once(case))):
        np.testing.assert_allclose(out, attention_reference(case, row), atol=5e-6, rtol=0)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_bits_do_not_depend_on_chunks_neighbours_or_workers(
    teams: dict[int, CpuOps], num_heads: int, num_kv_heads: int, kv_type: str
) -> None:
    rng = np.random.default_rng(11)
    case = attention_case(
        rng, [1, 40, 300, 520], num_heads=num_heads, num_kv_heads=num_kv_heads, key_length=32,
        value_length=32,
    )  # fmt: skip
    expected = case.run(teams[1], at_once(case), kv_type)
    for ops in teams.values():
        for sizes in ([1000], [1, 7, 64], [33, 300, 5], [256, 31]):
            outs = case.run(ops, in_chunks(case, sizes), kv_type, rng)
            assert [out.tobytes() for out in outs] == [e.tobytes() for e in expected], sizes
    alone = [(3, begin, begin + 1) for begin in range(520)]
    outs = case.run(teams[3], [[one] for one in alone], kv_type)
    assert outs[3].tobytes() == expected[3].tobytes()


def test_3000_tokens_match_float64_and_their_own_decode(teams: dict[int, CpuOps]) -> None:
    rng = np.random.default_rng(12)
    case = attention_case(rng, [3001], num_heads=2, num_kv_heads=1, key_length=32, value_length=32)
    whole = case.run(teams[2], [[(0, 0, 3001)]])[0]
    np.testing.assert_allclose(whole, attention_reference(case, 0), atol=5e-6, rtol=0)
    chunked = case.run(teams[3], [[(0, 0, 1000)], [(0, 1000, 3000)], [(0, 3000, 3001)]])[0]
    assert chunked.tobytes() == whole.tobytes()


def test_half_precision_cache_rounds_keys_and_values_to_nearest(ops: CpuOps) -> None:
    rng = np.random.default_rng(13)
    case = attention_case(rng, [200], num_heads=4, num_kv_heads=2, rotary_dim=0)
    rounded = [x.copy() for x in case.qkv]
    rounded[0][:, 256:] = rounded[0][:, 256:].astype(np.float16)
    same = AttentionCase(case.head, case.rope, rounded)
    halves, floats = case.run(ops, at_once(case), "f16"), same.run(ops, at_once(same), "f32")
    assert halves[0].tobytes() == floats[0].tobytes()


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_what_lies_behind_a_token_is_never_read(ops: CpuOps, kv_type: Any) -> None:
    """Stale keys and values after a token's own position, even NaN, change nothing."""
    rng = np.random.default_rng(14)
    case = attention_case(rng, [300], num_heads=4, num_kv_heads=2)
    expected = case.run(ops, at_once(case), kv_type)[0]
    pool: Any = ops.kv_pool(case.shape, num_pages=10, kv_type=kv_type)
    ruin = np.nan if kv_type == "f32" else np.float16(np.nan).view(np.uint16)
    pool.keys[:], pool.values[:] = ruin, ruin
    for begin, end in ((0, 5), (5, 40), (40, 41), (41, 300)):
        batch = segments_batch([(0, begin, end)], [300])
        plan = ops.plan(batch, case.shape, 4)
        q, out = poisoned(end - begin, 256), poisoned(end - begin, 256)
        qkv = case.qkv[0][begin:end]

        def body(w: int, plan=plan, qkv=qkv, batch=batch, q=q, out=out) -> None:
            ops.rope_store(w, plan, qkv, case.head, case.rope, batch, pool, 0, q)
            ops.attention(w, plan, q, case.head, batch, pool, 0, out)

        ops.run(body)
        assert out.tobytes() == expected[begin:end].tobytes()


def test_scores_of_any_size_stay_finite(ops: CpuOps) -> None:
    rng = np.random.default_rng(15)
    case = attention_case(rng, [600], num_heads=2, num_kv_heads=1)
    case.qkv[0][:, :192] *= 100
    out = case.run(ops, at_once(case))[0]
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, attention_reference(case, 0), atol=5e-2, rtol=0)


def test_a_sweep_of_few_tokens_may_touch_many_pages() -> None:
    """Two tokens of each row, on both sides of a page's end."""
    case = attention_case(np.random.default_rng(16), [33] * 4, num_heads=2, num_kv_heads=1)
    ops = CpuOps(1)
    try:
        one_by_one = [[(row, 0, 31)] for row in range(4)]
        outs = case.run(ops, [*one_by_one, [(row, 31, 33) for row in range(4)]])
    finally:
        ops.close()
    for row, out in enumerate(outs):
        np.testing.assert_allclose(out, attention_reference(case, row), atol=5e-6, rtol=0)
