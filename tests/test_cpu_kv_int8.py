"""KV cache of 8 bits on the CPU: scales, rounding, which form a query reads, and its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import CpuOps
from kernels.cpu.backend import CpuKvPool
from kernels.ops import PAGE_TOKENS, KvShape
from tests.cpu_helpers import AttentionCase, attention_case, poisoned, segments_batch

Segments = list[tuple[int, int, int]]


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, CpuOps]]:
    made = {workers: CpuOps(workers) for workers in (1, 2, 3)}
    yield made
    for ops in made.values():
        ops.close()


@pytest.fixture(scope="module")
def ops(teams: dict[int, CpuOps]) -> CpuOps:
    return teams[2]


def page_safe(lengths: list[int], sizes: list[int]) -> list[Segments]:
    """Every row in chunks of sizes[row % len(sizes)], but for those that would leave a page which
    they did not begin: they end with it. All rows advance together.
    """
    done, sweeps = [0] * len(lengths), []
    while any(begin < length for begin, length in zip(done, lengths, strict=True)):
        segments = []
        for row, length in enumerate(lengths):
            begin, end = done[row], min(done[row] + sizes[row % len(sizes)], length)
            if begin % PAGE_TOKENS:
                end = min(end, -(-begin // PAGE_TOKENS) * PAGE_TOKENS)
            if begin < end:
                segments.append((row, begin, end))
            done[row] = end
        sweeps.append(segments)
    return sweeps


def halves(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)


def rounded(x: np.ndarray, axis: int) -> np.ndarray:
    """Halves as integers times a scale over an axis, and back."""
    most = np.abs(x).max(axis=axis, keepdims=True)
    scale = (most / 127).astype(np.float16)
    short = scale.astype(np.float64) * 127 < most
    scale = np.where(short, np.nextafter(scale, np.float16(np.inf)), scale).astype(np.float64)
    quotient = np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)
    return np.rint(quotient) * scale


def split_heads(case: AttentionCase, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v of a row without rotation, (length, heads, size) each; k and v as halves."""
    head, x = case.head, case.qkv[row]
    q_width = head.num_heads * head.key_length
    k_width = head.num_kv_heads * head.key_length
    q, k, v = np.split(x, [q_width, q_width + k_width], axis=1)
    n, kv_heads = len(x), head.num_kv_heads
    return (
        q.reshape(n, head.num_heads, -1).astype(np.float64),
        halves(k).reshape(n, kv_heads, -1),
        halves(v).reshape(n, kv_heads, -1),
    )


def int8_reference(case: AttentionCase, row: int) -> np.ndarray:
    """Attention in float64 over integers of earlier pages and halves of the query's own."""
    q, k, v = split_heads(case, row)
    closed_k, closed_v = k.copy(), v.copy()
    for begin in range(0, len(k) - PAGE_TOKENS + 1, PAGE_TOKENS):
        page = slice(begin, begin + PAGE_TOKENS)
        closed_k[page] = rounded(k[page], axis=0)
        closed_v[page] = rounded(v[page], axis=2)
    group, out = case.head.num_heads // case.head.num_kv_heads, []
    for n, query in enumerate(q):
        own = n // PAGE_TOKENS * PAGE_TOKENS
        keys, values = (
            np.repeat(np.concatenate([closed[:own], open_[own : n + 1]]), group, axis=1)
            for closed, open_ in ((closed_k, k), (closed_v, v))
        )
        scores = np.einsum("hd,jhd->hj", query, keys) / np.sqrt(case.head.key_length)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        out.append(np.einsum("hj,jhd->hd", p, values).reshape(-1))
    return np.array(out)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 1), (9, 3), (8, 1)])
@pytest.mark.parametrize(("key_length", "value_length"), [(16, 16), (64, 64), (18, 34)])
def test_queries_read_their_own_page_as_halves_and_earlier_ones_as_integers(
    ops: CpuOps, num_heads: int, num_kv_heads: int, key_length: int, value_length: int
) -> None:
    case = attention_case(
        np.random.default_rng(num_heads), [1, 31, 32, 33, 290], num_heads=num_heads,
        num_kv_heads=num_kv_heads, key_length=key_length, value_length=value_length, rotary_dim=0,
    )  # fmt: skip
    outs = case.run(ops, page_safe([len(x) for x in case.qkv], [1000]), "int8")
    for row, out in enumerate(outs):
        np.testing.assert_allclose(out, int8_reference(case, row), atol=5e-6, rtol=0)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (3, 1), (9, 3), (8, 1), (40, 1)])
def test_bits_do_not_depend_on_chunks_neighbours_or_workers(
    teams: dict[int, CpuOps], num_heads: int, num_kv_heads: int
) -> None:
    rng, lengths = np.random.default_rng(11), [1, 40, 300, 520]
    case = attention_case(
        rng, lengths, num_heads=num_heads, num_kv_heads=num_kv_heads, key_length=32,
        value_length=32,
    )  # fmt: skip
    expected = case.run(teams[1], page_safe(lengths, [1000]), "int8")
    for ops in teams.values():
        for sizes in ([1, 7, 64], [33, 300, 5], [256, 31]):
            outs = case.run(ops, page_safe(lengths, sizes), "int8", rng)
            assert [out.tobytes() for out in outs] == [e.tobytes() for e in expected], sizes
    alone = [[(3, begin, begin + 1)] for begin in range(520)]
    assert case.run(teams[3], alone, "int8")[3].tobytes() == expected[3].tobytes()


class OneRow:
    """A pool that one row is stored into, in any sweeps."""

    def __init__(self, ops: CpuOps, case: AttentionCase) -> None:
        self.ops, self.case = ops, case
        self.pool: CpuKvPool = ops.kv_pool(case.shape, num_pages=20, kv_type="int8", num_rows=1)

    def sweep(self, begin: int, end: int) -> bytes:
        ops, case, head = self.ops, self.case, self.case.head
        batch = segments_batch([(0, begin, end)], [len(case.qkv[0])])
        plan = ops.plan(batch, case.shape, head.num_heads)
        q = poisoned(end - begin, head.num_heads * head.key_length)
        out = poisoned(end - begin, head.num_heads * head.value_length)
        qkv = case.qkv[0][begin:end]

        def body(w: int) -> None:
            for layer in range(case.shape.num_layers):
                ops.rope_store(w, plan, qkv, head, case.rope, batch, self.pool, layer, q)
                ops.attention(w, plan, q, head, batch, self.pool, layer, out)

        ops.run(body)
        return out.tobytes()


@pytest.mark.parametrize("spans", [[(0, 5), (5, 32), (32, 33), (33, 64)], [(0, 70), (70, 90)]])
def test_a_sweep_that_runs_twice_gives_the_same_bytes(
    ops: CpuOps, spans: list[tuple[int, int]]
) -> None:
    """A sweep whose weights could not be read runs again from its first layer."""
    case = attention_case(np.random.default_rng(3), [100], num_heads=4, num_kv_heads=2)
    once, twice = OneRow(ops, case), OneRow(ops, case)
    for begin, end in spans:
        expected = once.sweep(begin, end)
        assert twice.sweep(begin, end) == expected
        assert twice.sweep(begin, end) == expected


def test_a_segment_may_not_leave_a_page_that_it_did_not_begin(ops: CpuOps) -> None:
    case = attention_case(np.random.default_rng(3), [100], num_heads=4, num_kv_heads=2)
    row = OneRow(ops, case)
    row.sweep(0, 40)
    with pytest.raises(AssertionError):
        row.sweep(40, 65)


def test_what_earlier_rows_left_is_never_read(ops: CpuOps) -> None:
    case = attention_case(np.random.default_rng(3), [100], num_heads=4, num_kv_heads=2)
    clean, ruined = OneRow(ops, case), OneRow(ops, case)
    nan = np.float16(np.nan).view(np.uint16)
    ruined.pool.keys[:], ruined.pool.values[:] = -128, -128
    ruined.pool.arrays.scales[:], ruined.pool.arrays.open_pages[:] = nan, nan
    for begin, end in ((0, 5), (5, 32), (32, 96), (96, 100)):
        assert ruined.sweep(begin, end) == clean.sweep(begin, end)


def test_numbers_that_are_not_finite_stay_visible(ops: CpuOps) -> None:
    """A page with a NaN or an infinity does not turn into ordinary numbers when it is closed."""
    for bad in (np.nan, np.inf, 1e30):
        case = attention_case(np.random.default_rng(3), [40], num_heads=1, rotary_dim=0)
        case.qkv[0][7, 64] = bad  # one dimension of a key
        row = OneRow(ops, case)
        row.sweep(0, 32)
        assert np.isnan(np.frombuffer(row.sweep(32, 40), np.float32)).all()


@settings(max_examples=60)
@given(
    st.integers(0, 2**32 - 1), st.integers(-26, 14), st.integers(0, 20),
    st.sampled_from([0.0, 0.5, 0.97]),
)  # fmt: skip
def test_closing_a_page_is_off_by_half_a_step_at_most(
    teams: dict[int, CpuOps], seed: int, exponent: int, spread: int, zeros: float
) -> None:
    """Magnitudes from the least half on; scales are the least that reach the largest of them."""
    rng = np.random.default_rng(seed)
    case = attention_case(rng, [PAGE_TOKENS], num_heads=1, key_length=32, value_length=32,
                          rotary_dim=0)  # fmt: skip
    x = case.qkv[0]
    x *= 2.0 ** (exponent - rng.integers(0, spread + 1, x.shape[1])).astype(np.float32)
    x[rng.random(x.shape) < zeros] = 0.0
    x.clip(-60000, 60000, out=x)
    row = OneRow(teams[1], case)
    row.sweep(0, PAGE_TOKENS)
    keys, values = x[:, 32:64].astype(np.float16).T, x[:, 64:].astype(np.float16)
    scales = row.pool.arrays.scales[0, 0, 0].view(np.float16)
    check_lines(keys, row.pool.keys[0, 0, 0], scales[:32])
    check_lines(values, row.pool.values[0, 0, 0], scales[32:])


def check_lines(lines: Any, integers: Any, scales: Any) -> None:
    most = np.abs(lines).max(axis=1).astype(np.float64)
    exact = scales.astype(np.float64)
    assert (127 * exact >= most).all()
    below = np.nextafter(scales, np.float16(-np.inf)).astype(np.float64)
    assert (127 * below < most)[exact > 0].all()
    error = np.abs(integers * exact[:, None] - lines.astype(np.float64))
    assert (error <= 0.5 * exact[:, None] * (1 + 1e-6)).all()
    assert np.abs(integers.astype(int)).max() <= 127


@pytest.mark.parametrize("value_length", [64, 40])
def test_a_page_takes_about_half_of_one_of_halves(ops: CpuOps, value_length: int) -> None:
    shape = KvShape(num_layers=3, num_kv_heads=2, key_length=64, value_length=value_length)
    pool = ops.kv_pool(shape, num_pages=5, kv_type="int8", num_rows=7)
    arrays = pool.arrays
    nbytes = arrays.keys.nbytes + arrays.values.nbytes + arrays.scales.nbytes
    assert nbytes == 5 * pool.page_nbytes == 5 * ops.kv_page_nbytes(shape, "int8")
    assert arrays.open_pages.nbytes == 7 * ops.kv_row_nbytes(shape, "int8")
    assert ops.kv_row_nbytes(shape, "int8") == ops.kv_page_nbytes(shape, "f16")
    assert ops.kv_row_nbytes(shape, "f16") == ops.kv_row_nbytes(shape, "f32") == 0
    assert pool.page_nbytes < 0.53 * ops.kv_page_nbytes(shape, "f16")


def test_a_copied_page_reads_as_the_page_it_came_from(ops: CpuOps) -> None:
    case = attention_case(np.random.default_rng(3), [64], num_heads=4, num_kv_heads=2)
    row = OneRow(ops, case)
    row.sweep(0, 64)
    ops.kv_copy(row.pool, 1, 9)
    for array in (row.pool.keys, row.pool.values, row.pool.arrays.scales):
        assert array[:, 1].any()
        assert np.array_equal(array[:, 1], array[:, 9])
