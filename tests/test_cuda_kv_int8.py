"""KV of 8 bits on the CUDA backend: the CPU's integers and scales, and a row's own bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kernels.cpu import CpuOps
from kernels.ops import PAGE_TOKENS, KvShape
from tests.cpu_helpers import AttentionCase, attention_case, poisoned, segments_batch
from tests.cuda_helpers import HostOps
from tests.test_cpu_kv_int8 import int8_reference, page_safe
from tests.test_cuda_ops import open_ops

cp = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu

BOUND = 6e-3  # of values of about 1, as with halves


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    made = open_ops()
    yield HostOps(made)
    made.close()


def lengths_of(case: AttentionCase) -> list[int]:
    return [len(x) for x in case.qkv]


def worst(case: AttentionCase, outs: list[np.ndarray]) -> float:
    return max(float(np.abs(out - int8_reference(case, row)).max()) for row, out in enumerate(outs))


class OneRow:
    """A pool that one row is stored into, in any sweeps."""

    def __init__(self, ops: Any, case: AttentionCase, num_pages: int = 20) -> None:
        self.ops, self.case = ops, case
        self.pool = ops.kv_pool(case.shape, num_pages=num_pages, kv_type="int8", num_rows=1)

    def sweep(self, begin: int, end: int) -> bytes:
        ops, case, head = self.ops, self.case, self.case.head
        batch = segments_batch([(0, begin, end)], [len(case.qkv[0])])
        plan, qkv = ops.plan(batch, case.shape, head.num_heads), case.qkv[0][begin:end]
        q = poisoned(end - begin, head.num_heads * head.key_length)
        out = poisoned(end - begin, head.num_heads * head.value_length)

        def body(w: int) -> None:
            for layer in range(case.shape.num_layers):
                ops.rope_store(w, plan, qkv, head, case.rope, batch, self.pool, layer, q)
                ops.attention(w, plan, q, head, batch, self.pool, layer, out)

        ops.run(body)
        return out.tobytes()


def closed_pages(pool: Any, case: AttentionCase) -> tuple[Any, Any, Any, Any]:
    """Keys (layers, pages, heads, key_length, 32), values (layers, pages, heads, 32, value_length)
    and their scales, float16, of either backend's pool.
    """
    head, on_cpu = case.head, hasattr(pool, "arrays")
    arrays = pool.arrays if on_cpu else pool
    keys, values, scales = (cp.asnumpy(a) for a in (arrays.keys, arrays.values, arrays.scales))
    scales = scales.view(np.float16)
    if not on_cpu:
        keys, values = keys.swapaxes(3, 4), values.swapaxes(3, 4)
    return (
        keys[..., : head.key_length, :],
        values[..., : head.value_length],
        scales[..., : head.key_length],
        scales[..., -PAGE_TOKENS:],
    )


@pytest.mark.parametrize(("key_length", "value_length"), [(64, 64), (80, 40), (128, 128)])
@pytest.mark.parametrize("spread", [0, 20])
def test_closed_pages_are_those_of_the_cpu(
    ops: Any, key_length: int, value_length: int, spread: int
) -> None:
    """Integers and scales to the last bit, of magnitudes from the least half to the largest."""
    rng = np.random.default_rng(spread)
    case = attention_case(
        rng, [160], num_heads=2, num_kv_heads=2, key_length=key_length, value_length=value_length,
        rotary_dim=0,
    )  # fmt: skip
    x = case.qkv[0]
    x *= 2.0 ** (14 * (spread > 0) - rng.integers(0, 2 * spread + 1, x.shape)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = 0.0
    x[32:64] *= rng.random(x.shape[1]) < 0.5  # dimensions without any
    x.clip(-65504, 65504, out=x)
    cpu = CpuOps(1)
    rows = [OneRow(backend, case, num_pages=5) for backend in (ops, cpu)]
    for row in rows:
        cuts = [0, 5, 32, 96, 120, 121, 128, 160]
        for begin, end in itertools.pairwise(cuts):
            row.sweep(begin, end)
    found, expected = (closed_pages(row.pool, case) for row in rows)
    cpu.close()
    assert all(array.any() for array in expected)
    for got, wanted in zip(found, expected, strict=True):
        assert np.array_equal(got, wanted)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 1), (4, 2), (8, 1), (40, 2)])
def test_queries_read_their_own_page_as_halves_and_earlier_ones_as_integers(
    ops: Any, num_heads: int, num_kv_heads: int
) -> None:
    case = attention_case(
        np.random.default_rng(num_heads), [1, 31, 32, 33, 300, 513], num_heads=num_heads,
        num_kv_heads=num_kv_heads, rotary_dim=0,
    )  # fmt: skip
    assert worst(case, case.run(ops, page_safe(lengths_of(case), [1000]), "int8")) <= BOUND


@pytest.mark.parametrize(
    ("key_length", "value_length"),
    [(32, 40), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)],
)
def test_heads_of_any_size_are_read(ops: Any, key_length: int, value_length: int) -> None:
    """A first chunk that ends inside a page included: its keys are padded where they are kept."""
    case = attention_case(
        np.random.default_rng(key_length), [5, 70, 290], num_heads=4, num_kv_heads=2,
        key_length=key_length, value_length=value_length, rotary_dim=0,
    )  # fmt: skip
    for sizes in ([1000], [50, 3]):
        assert worst(case, case.run(ops, page_safe(lengths_of(case), sizes), "int8")) <= BOUND


@pytest.mark.parametrize("magnitude", [1e-7, 1e-4, 3e4])
def test_small_and_large_values_lose_no_more_than_others(ops: Any, magnitude: float) -> None:
    """Scales below the least normal half, and near the largest of all."""
    case = attention_case(np.random.default_rng(2), [100], num_heads=2, rotary_dim=0)
    case.qkv[0][:, -64:] *= np.float32(magnitude)
    case.qkv[0].clip(-65504, 65504, out=case.qkv[0])
    out = case.run(ops, page_safe([100], [1000]), "int8")[0]
    error = np.abs(out - int8_reference(case, 0)).max()
    assert error <= max(BOUND * magnitude, 2.0**-25)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (3, 1), (8, 1), (24, 1), (40, 2)]
)
def test_bits_do_not_depend_on_chunks_or_neighbours(
    ops: Any, num_heads: int, num_kv_heads: int
) -> None:
    """Case 21: tasks whose rows have two pages of their own, alone and cut; decode; splits."""
    rng, lengths = np.random.default_rng(num_heads), [7, 64, 259, 700]
    case = attention_case(rng, lengths, num_heads=num_heads, num_kv_heads=num_kv_heads)
    expected = [out.tobytes() for out in case.run(ops, page_safe(lengths, [1000]), "int8")]
    for sizes in ([1], [2, 5], [33, 64, 1], [300], [8, 40]):
        outs = case.run(ops, page_safe(lengths, sizes), "int8", rng)
        assert [out.tobytes() for out in outs] == expected, sizes


@pytest.mark.parametrize("spans", [[(0, 5), (5, 32), (32, 33), (33, 64)], [(0, 70), (70, 90)]])
def test_a_sweep_that_runs_twice_gives_the_same_bytes(
    ops: Any, spans: list[tuple[int, int]]
) -> None:
    case = attention_case(np.random.default_rng(3), [100], num_heads=4, num_kv_heads=2)
    once, twice = OneRow(ops, case), OneRow(ops, case)
    for begin, end in spans:
        expected = once.sweep(begin, end)
        assert twice.sweep(begin, end) == expected
        assert twice.sweep(begin, end) == expected


def test_a_segment_may_not_leave_a_page_that_it_did_not_begin(ops: Any) -> None:
    case = attention_case(np.random.default_rng(3), [100], num_heads=4, num_kv_heads=2)
    row = OneRow(ops, case)
    row.sweep(0, 40)
    with pytest.raises(AssertionError):
        row.sweep(40, 65)


def ruin(ops: Any, pool: Any) -> None:
    pool.keys[...], pool.values[...] = -128, -128
    pool.scales[...], pool.open_pages[...] = cp.nan, cp.nan
    ops.ops._scratch.take("x", (1 << 20,), np.float16)[...] = cp.nan


@pytest.mark.parametrize("key_length", [64, 80])
def test_what_earlier_rows_left_is_never_read(ops: Any, key_length: int) -> None:
    """Case 27: in pages, scales, open pages, and where a sweep keeps those it closes."""
    case = attention_case(
        np.random.default_rng(3), [300], num_heads=4, num_kv_heads=2, key_length=key_length
    )
    clean, ruined = OneRow(ops, case), OneRow(ops, case)
    ruin(ops, ruined.pool)
    for begin, end in ((0, 5), (5, 32), (32, 96), (96, 100), (100, 128), (128, 290), (290, 300)):
        expected = clean.sweep(begin, end)
        ops.ops._scratch.take("x", (1 << 20,), np.float16)[...] = cp.nan
        assert ruined.sweep(begin, end) == expected


def test_what_is_no_number_stays_visible_and_what_is_one_stays_finite(ops: Any) -> None:
    for bad, shows in ((np.nan, True), (1e30, False), (-65504.0, False)):
        case = attention_case(np.random.default_rng(3), [40], num_heads=1, rotary_dim=0)
        case.qkv[0][7, 64] = case.qkv[0][8, -1] = bad  # a dimension of a key, one of a value
        row = OneRow(ops, case)
        row.sweep(0, 32)
        out = np.frombuffer(row.sweep(32, 40), np.float32)
        assert np.isnan(out).all() if shows else np.isfinite(out).all(), bad


def test_a_page_takes_about_half_of_one_of_halves(ops: Any) -> None:
    shape, made = KvShape(num_layers=3, num_kv_heads=2, key_length=80, value_length=72), ops.ops
    pool = made.kv_pool(shape, num_pages=5, kv_type="int8", num_rows=7)
    nbytes = pool.keys.nbytes + pool.values.nbytes + pool.scales.nbytes
    assert nbytes == 5 * pool.page_nbytes == 5 * made.kv_page_nbytes(shape, "int8")
    assert pool.open_pages.nbytes == 7 * made.kv_row_nbytes(shape, "int8")
    assert made.kv_row_nbytes(shape, "int8") == made.kv_page_nbytes(shape, "f16")
    assert made.kv_row_nbytes(shape, "f16") == made.kv_row_nbytes(shape, "f32") == 0
    assert pool.page_nbytes < 0.53 * made.kv_page_nbytes(shape, "f16")


def test_a_copied_page_reads_as_the_page_it_came_from(ops: Any) -> None:
    case = attention_case(np.random.default_rng(3), [64], num_heads=4, num_kv_heads=2)
    row = OneRow(ops, case)
    row.sweep(0, 64)
    ops.ops.kv_copy(row.pool, 1, 9)
    for array in (row.pool.keys, row.pool.values, row.pool.scales):
        assert array[:, 1].any()
        assert (array[:, 1] == array[:, 9]).all()


def test_replayed_sweeps_close_the_pages_of_their_own_rows(ops: Any) -> None:
    """Rows that decode side by side, out of step, so that pages close in different sweeps."""
    case = attention_case(np.random.default_rng(5), [90, 101, 77], num_heads=4, num_kv_heads=2)
    starts, head, made = [20, 31, 7], case.head, ops.ops
    prompts = [[(row, 0, start)] for row, start in enumerate(starts)]
    steps = [[(row, at + i, at + i + 1) for row, at in enumerate(starts)] for i in range(70)]
    expected = case.run(ops, [*prompts, *steps], "int8")
    pool = made.kv_pool(case.shape, num_pages=11, kv_type="int8", num_rows=3)
    key, before = object(), made.recordings.num_replayed
    buffers: dict[int, tuple[Any, ...]] = {}
    rope = type(case.rope)(cos=cp.asarray(case.rope.cos), sin=cp.asarray(case.rope.sin),
                           style=case.rope.style)  # fmt: skip
    for segments in [*prompts, *steps]:
        batch = segments_batch(segments, lengths_of(case))
        plan = made.plan(batch, case.shape, head.num_heads)
        width = sum(end - begin for _, begin, end in segments)
        if width not in buffers:
            buffers[width] = tuple(
                cp.zeros((width, n), np.float32) for n in (case.qkv[0].shape[1], 256, 256)
            )
        qkv, q, out = buffers[width]
        rows = [case.qkv[row][begin:end] for row, begin, end in segments]
        qkv[...] = cp.asarray(np.concatenate(rows))

        def body(w: int, plan: Any = plan, batch: Any = batch, arrays: Any = (qkv, q, out)) -> None:
            qkv, q, out = arrays
            made.rope_store(w, plan, qkv, head, rope, batch, pool, 1, q)
            made.attention(w, plan, q, head, batch, pool, 1, out)

        made.run_sweep(plan, key, body)
        for (row, begin, end), (first, last) in zip(segments, batch.segments, strict=True):
            assert cp.asnumpy(out[first:last]).tobytes() == expected[row][begin:end].tobytes()
    assert made.recordings.num_replayed - before > 50
