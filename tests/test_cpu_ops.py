"""Token-wise operations, the head and the KV pool of the CPU backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kernels.cpu import CpuOps
from kernels.ops import KvShape
from tests.cpu_helpers import FLAT_SHAPE, flat_batch, matmul, poisoned, random_tensor, rms

SHAPE = KvShape(num_layers=3, num_kv_heads=2, key_length=24, value_length=40)


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, CpuOps]]:
    made = {workers: CpuOps(workers) for workers in (1, 2, 3)}
    yield made
    for ops in made.values():
        ops.close()


@pytest.fixture(scope="module")
def ops(teams: dict[int, CpuOps]) -> CpuOps:
    return teams[2]


def run_tokens(ops: CpuOps, num_tokens: int, call: Callable[[int, Any], None]) -> None:
    plan = ops.plan(flat_batch(num_tokens), FLAT_SHAPE, 1)
    ops.run(lambda worker: call(worker, plan))


def rms_norm(ops: CpuOps, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    out = poisoned(*x.shape)
    run_tokens(ops, len(x), lambda w, plan: ops.rms_norm(w, plan, x, weight, eps, out))
    return out


def swiglu(ops: CpuOps, gate_up: np.ndarray) -> np.ndarray:
    out = poisoned(len(gate_up), gate_up.shape[1] // 2)
    run_tokens(ops, len(gate_up), lambda w, plan: ops.swiglu(w, plan, gate_up, out))
    return out


@pytest.mark.parametrize("hidden", [1, 2, 15, 16, 33, 255, 256, 576])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 33])
def test_rms_norm_matches_float64(ops: CpuOps, hidden: int, num_tokens: int) -> None:
    rng = np.random.default_rng(hidden)
    x = rng.standard_normal((num_tokens, hidden), dtype=np.float32) * 30
    weight = rng.standard_normal(hidden, dtype=np.float32)
    np.testing.assert_allclose(
        rms_norm(ops, x, weight, 1e-5), rms(x, weight, 1e-5), rtol=1e-6, atol=1e-7
    )


def test_rms_norm_of_zeros_is_zero(ops: CpuOps) -> None:
    assert np.array_equal(
        rms_norm(ops, np.zeros((3, 40), np.float32), np.ones(40, np.float32), 1e-6),
        np.zeros((3, 40)),
    )


@pytest.mark.parametrize("ffn", [1, 31, 32, 33, 256, 1536])
def test_swiglu_matches_float64(ops: CpuOps, ffn: int) -> None:
    rng = np.random.default_rng(ffn)
    gate_up = rng.standard_normal((9, 2 * ffn), dtype=np.float32) * 8
    gate, up = gate_up[:, :ffn].astype(np.float64), gate_up[:, ffn:].astype(np.float64)
    np.testing.assert_allclose(
        swiglu(ops, gate_up), gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-9
    )


def test_swiglu_saturates_without_overflow(ops: CpuOps) -> None:
    gate = np.array([-1e30, -1e4, -200, -88, -87.3, 87.3, 88, 200, 1e4, 1e30], np.float32)
    out = swiglu(ops, np.stack([gate, np.ones_like(gate)], axis=0).reshape(1, -1))[0]
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[5:], gate[5:], rtol=1e-6)
    assert (np.abs(out[1:5]) < 1e-30).all()


def test_a_nan_stays_visible(ops: CpuOps) -> None:
    gate_up = np.ones((1, 64), np.float32)
    gate_up[0, 5] = np.nan
    assert np.flatnonzero(np.isnan(swiglu(ops, gate_up)[0])).tolist() == [5]


def test_token_wise_bits_do_not_depend_on_company_or_workers(teams: dict[int, CpuOps]) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((50, 130), dtype=np.float32)
    weight = rng.standard_normal(130, dtype=np.float32)
    normed, gated = rms_norm(teams[1], x, weight, 1e-5), swiglu(teams[1], x)
    for ops in teams.values():
        order = rng.permutation(50)
        for count in (1, 2, 3, 17, 50):
            some = order[:count]
            assert rms_norm(ops, x[some], weight, 1e-5).tobytes() == normed[some].tobytes()
            assert swiglu(ops, x[some]).tobytes() == gated[some].tobytes()


@pytest.mark.parametrize("num_logits", [0, 1, 5, 40])
def test_head_is_the_norm_and_product_of_the_wanted_tokens(
    teams: dict[int, CpuOps], num_logits: int
) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((40, 96), dtype=np.float32)
    norm = rng.standard_normal(96, dtype=np.float32)
    tensor = random_tensor(rng, "Q8_0", 77, 96)
    indices = np.sort(rng.permutation(40)[:num_logits]).astype(np.int32)
    for ops in teams.values():
        for expand in (True, False):
            weight = ops.pack([tensor], expand=expand)
            normed, logits = poisoned(num_logits, 96), poisoned(num_logits, 77)
            plan = ops.plan(flat_batch(40), FLAT_SHAPE, 1)

            def body(w: int, ops=ops, plan=plan, weight=weight, normed=normed, logits=logits):
                ops.head(w, plan, x, norm, 1e-5, weight, indices, normed, logits)

            ops.run(body)
            expected = matmul(ops, rms_norm(ops, x, norm, 1e-5), weight)[indices]
            assert logits.tobytes() == expected.tobytes()


def test_operations_in_sequence_see_each_others_results(teams: dict[int, CpuOps]) -> None:
    """Case by case the splits differ (tokens, outputs), so the barriers are what is tested."""
    rng = np.random.default_rng(3)
    hidden, ffn = 64, 96
    norm = np.ones(hidden, np.float32)
    up_tensor, down_tensor = (
        random_tensor(rng, "Q8_0", 2 * ffn, hidden),
        random_tensor(rng, "Q8_0", hidden, ffn),
    )
    for num_tokens in (1, 3, 20, 70):
        start = rng.standard_normal((num_tokens, hidden), dtype=np.float32)
        results = set()
        for ops in teams.values():
            for expand in (True, False):
                up, down = (ops.pack([t], expand=expand) for t in (up_tensor, down_tensor))
                x, normed = start.copy(), poisoned(num_tokens, hidden)
                gate_up, gated = poisoned(num_tokens, 2 * ffn), poisoned(num_tokens, ffn)
                plan = ops.plan(flat_batch(num_tokens), FLAT_SHAPE, 1)

                def body(
                    w: int, ops=ops, plan=plan, up=up, down=down, x=x, normed=normed,
                    gate_up=gate_up, gated=gated,
                ) -> None:  # fmt: skip
                    for _ in range(20):
                        ops.rms_norm(w, plan, x, norm, 1e-5, normed)
                        ops.matmul(w, plan, normed, up, gate_up)
                        ops.swiglu(w, plan, gate_up, gated)
                        ops.matmul(w, plan, gated, down, x, accumulate=True)

                ops.run(body)
                assert np.isfinite(x).all()
                results.add(x.tobytes())
        assert len(results) == 1


@pytest.mark.parametrize(("kv_type", "itemsize"), [("f32", 4), ("f16", 2)])
def test_page_bytes_are_what_the_pool_takes(ops: CpuOps, kv_type: Any, itemsize: int) -> None:
    pool = ops.kv_pool(SHAPE, num_pages=5, kv_type=kv_type)
    assert pool.page_nbytes == ops.kv_page_nbytes(SHAPE, kv_type)
    assert pool.keys.nbytes + pool.values.nbytes == 5 * pool.page_nbytes
    assert pool.page_nbytes == 3 * 2 * 32 * (24 + 64) * itemsize  # values rounded up to 64
    assert not pool.keys.any()
    assert not pool.values.any()


def test_copy_takes_a_page_over_all_layers(ops: CpuOps) -> None:
    rng = np.random.default_rng(4)
    pool = ops.kv_pool(SHAPE, num_pages=4, kv_type="f32")
    pool.keys[:], pool.values[:] = rng.random(pool.keys.shape), rng.random(pool.values.shape)
    before = pool.keys.copy()
    ops.kv_copy(pool, 2, 0)
    assert np.array_equal(pool.keys[:, 0], before[:, 2])
    assert np.array_equal(pool.values[:, 0], pool.values[:, 2])
    assert np.array_equal(pool.keys[:, 1:], before[:, 1:])


def test_large_buffers_are_aligned_and_zero(ops: CpuOps) -> None:
    wide = KvShape(num_layers=1, num_kv_heads=4, key_length=128, value_length=128)
    for num_pages in (1, 40):
        pool = ops.kv_pool(wide, num_pages=num_pages, kv_type="f32")
        assert pool.keys.ctypes.data % 64 == 0
        assert not pool.values.any()
