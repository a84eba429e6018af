"""Rotary embedding, KV store and attention of the CUDA backend against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.cpu_helpers import (
    AttentionCase,
    attention_case,
    attention_reference,
    heads_reference,
    poisoned,
    segments_batch,
)
from tests.cuda_helpers import HostOps
from tests.test_cuda_ops import open_ops

cp = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu

BOUND = {"f32": 1e-4, "f16": 6e-3}  # of values of about 1
Segments = list[tuple[int, int, int]]


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    made = open_ops()
    yield HostOps(made)
    made.close()


def at_once(case: AttentionCase) -> list[Segments]:
    return [[(row, 0, len(x)) for row, x in enumerate(case.qkv)]]


def in_chunks(case: AttentionCase, sizes: list[int]) -> list[Segments]:
    """Each row in chunks of the sizes, repeated, all rows side by side."""
    cuts = []
    for row, x in enumerate(case.qkv):
        own, at = [], 0
        while at < len(x):
            end = min(at + sizes[(row + len(own)) % len(sizes)], len(x))
            own.append((row, at, end))
            at = end
        cuts.append(own)
    most = max(len(own) for own in cuts)
    return [[own[i] for own in cuts if i < len(own)] for i in range(most)]


def worst(case: AttentionCase, outs: list[np.ndarray]) -> float:
    return max(
        float(np.abs(out - attention_reference(case, row)).max()) for row, out in enumerate(outs)
    )


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize("num_heads, num_kv_heads", [(1, 1), (3, 1), (4, 2), (8, 1), (40, 2)])
def test_matches_float64_for_every_grouping_of_heads(
    ops: Any, num_heads: int, num_kv_heads: int, kv_type: str
) -> None:
    rng = np.random.default_rng(num_heads)
    case = attention_case(
        rng, [1, 31, 32, 33, 300, 513], num_heads=num_heads, num_kv_heads=num_kv_heads
    )
    assert worst(case, case.run(ops, at_once(case), kv_type)) <= BOUND[kv_type]


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize(
    "key_length, value_length", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
)
def test_matches_float64_for_every_head_size(
    ops: Any, key_length: int, value_length: int, kv_type: str
) -> None:
    rng = np.random.default_rng(key_length)
    case = attention_case(
        rng,
        [5, 70, 290],
        num_heads=4,
        num_kv_heads=2,
        key_length=key_length,
        value_length=value_length,
    )
    assert worst(case, case.run(ops, at_once(case), kv_type)) <= BOUND[kv_type]


@pytest.mark.parametrize("style", ["adjacent", "halves"])
@pytest.mark.parametrize("rotary_dim", [64, 32, 0])
@pytest.mark.parametrize("norms", [False, True])
def test_q_is_normalised_and_rotated(ops: Any, style: str, rotary_dim: int, norms: bool) -> None:
    rng = np.random.default_rng(rotary_dim)
    case = attention_case(rng, [41], rotary_dim=rotary_dim, style=style, norms=norms)
    batch, head = segments_batch([(0, 0, 41)], [41]), case.head
    pool = ops.kv_pool(case.shape, num_pages=2, kv_type="f32")
    q, plan = poisoned(41, 3 * 64), ops.plan(batch, case.shape, 3)
    ops.run(lambda w: ops.rope_store(w, plan, case.qkv[0], head, case.rope, batch, pool, 1, q))
    expected_q, expected_k, expected_v = heads_reference(case, 0)
    np.testing.assert_allclose(q.reshape(41, 3, 64), expected_q, rtol=1e-5, atol=1e-5)
    keys = cp.asnumpy(pool.keys[1])[batch.page_table[0], 0].reshape(64, -1)[:41]
    np.testing.assert_allclose(keys, expected_k[:, 0], rtol=1e-5, atol=1e-5)
    values = cp.asnumpy(pool.values[1])[batch.page_table[0], 0].swapaxes(1, 2).reshape(64, -1)[:41]
    assert values.tobytes() == expected_v[:, 0].astype(np.float32).tobytes()
    assert not cp.asnumpy(pool.keys[0]).any()


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 2), (8, 1), (3, 1), (24, 1)])
def test_bits_do_not_depend_on_chunks_or_neighbours(
    ops: Any, num_heads: int, num_kv_heads: int, kv_type: str
) -> None:
    """Case 21: prompts in any chunks, decode splits, shuffled pages."""
    rng = np.random.default_rng(num_heads)
    case = attention_case(
        rng, [7, 64, 259, 700], num_heads=num_heads, num_kv_heads=num_kv_heads, key_length=64
    )
    expected = [out.tobytes() for out in case.run(ops, at_once(case), kv_type)]
    for sizes in ([1], [2, 5], [33, 64, 1], [300]):
        outs = case.run(ops, in_chunks(case, sizes), kv_type, rng)
        assert [out.tobytes() for out in outs] == expected, sizes


def test_3000_tokens_match_float64_and_their_own_decode(ops: Any) -> None:
    case = attention_case(np.random.default_rng(3), [3000], num_heads=8, num_kv_heads=1)
    out = case.run(ops, at_once(case), "f16")[0]
    assert np.abs(out - attention_reference(case, 0)).max() <= BOUND["f16"]
    chunks = [[(0, 0, 2990)], *([(0, at, at + 1)] for at in range(2990, 3000))]
    assert case.run(ops, chunks, "f16")[0].tobytes() == out.tobytes()


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_what_lies_behind_a_token_is_never_read(ops: Any, kv_type: Any) -> None:
    """Case 27: pages keep what earlier rows left in them, NaN included."""
    case = attention_case(np.random.default_rng(8), [300], num_heads=4, num_kv_heads=2)
    expected = case.run(ops, at_once(case), kv_type)[0]
    pool = ops.kv_pool(case.shape, num_pages=10, kv_type=kv_type)
    pool.keys[...], pool.values[...] = cp.nan, cp.nan
    for begin, end in ((0, 37), (37, 38), (38, 257), (257, 299), (299, 300)):
        batch = segments_batch([(0, begin, end)], [300])
        q, out = poisoned(end - begin, 4 * 64), poisoned(end - begin, 4 * 64)
        plan, qkv = ops.plan(batch, case.shape, 4), case.qkv[0][begin:end]
        ops.rope_store(0, plan, qkv, case.head, case.rope, batch, pool, 1, q)
        ops.attention(0, plan, q, case.head, batch, pool, 1, out)
        assert out.tobytes() == expected[begin:end].tobytes(), (begin, end)


def test_scores_of_any_size_stay_finite(ops: Any) -> None:
    case = attention_case(np.random.default_rng(9), [80], num_heads=2, num_kv_heads=1)
    case.qkv[0][:, : 3 * 64] *= 300
    for kv_type in ("f32", "f16"):
        assert np.isfinite(case.run(ops, at_once(case), kv_type)[0]).all()
