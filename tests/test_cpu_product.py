"""Products of the CPU backend: right, and the same bits for any company, split and layout."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import CpuOps
from kernels.ops import K_BLOCK, KernelError, UnsupportedTypeError
from kernels.quants import LISTED_TYPES, BlockTensor, dequantize_tensor
from tests.cpu_helpers import (
    FLAT_SHAPE,
    HALVES,
    TYPES,
    f32_tensor,
    flat_batch,
    matmul,
    poisoned,
    random_tensor,
)


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, CpuOps]]:
    made = {workers: CpuOps(workers) for workers in (1, 2, 3)}
    yield made
    for ops in made.values():
        ops.close()


@pytest.fixture(scope="module")
def ops(teams: dict[int, CpuOps]) -> CpuOps:
    return teams[2]


def fused_multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a * b + c rounded once: in float64 with the sum rounded to odd, then to float32."""
    product = a.astype(np.float64) * b.astype(np.float64)
    c = c.astype(np.float64)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, odd, total).astype(np.float32)


def chained(x: np.ndarray, w: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The product as the contract defines it, one multiply-add at a time."""
    out = start.astype(np.float32)
    for k in range(0, x.shape[1], K_BLOCK):
        total = np.zeros_like(out)
        for i in range(k, min(k + K_BLOCK, x.shape[1])):
            total = fused_multiply_add(x[:, i, None], w[None, :, i], total)
        out = out + total
    return out


@pytest.mark.parametrize("type_name", TYPES)
def test_every_type_decodes_exactly_and_gives_the_same_product_in_both_layouts(
    ops: CpuOps, type_name: str
) -> None:
    rng = np.random.default_rng(len(type_name))
    tensor = random_tensor(rng, type_name, 70, 512)
    values = dequantize_tensor(tensor)
    x = rng.standard_normal((19, 512), dtype=np.float32)
    expanded, quantised = ops.pack([tensor], expand=True), ops.pack([tensor], expand=False)
    plan = ops.plan(flat_batch(70), FLAT_SHAPE, 1)
    ids = np.arange(69, -1, -1, dtype=np.int32)
    for weight in (expanded, quantised):
        rows = poisoned(70, 512)
        ops.run(lambda w, weight=weight, rows=rows: ops.embed(w, plan, weight, ids, rows))
        assert rows.tobytes() == values[ids].tobytes()
    out = matmul(ops, x, expanded)
    assert out.tobytes() == matmul(ops, x, quantised).tobytes()
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    np.testing.assert_allclose(out, exact, rtol=0, atol=2e-6 * np.abs(exact).max())
    assert (expanded.layout, quantised.layout) == ("f32-panels", "gguf-rows")
    assert quantised.nbytes == tensor.data.nbytes < expanded.nbytes or type_name == "F32"


@pytest.mark.parametrize("scale", [0.0, -0.0, 2.0**-24, -(2.0**-14), -65504.0, np.inf, np.nan])
@pytest.mark.parametrize("type_name", HALVES)
def test_a_tile_holds_the_dequantised_values_at_every_scale(
    ops: CpuOps, type_name: str, scale: float
) -> None:
    tensor = random_tensor(np.random.default_rng(10), type_name, 45, 256)
    blocks = tensor.data.reshape(45, -1, tensor.type.block_nbytes)
    for at in HALVES[type_name]:
        blocks[:, :, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    with np.errstate(invalid="ignore"):
        values = dequantize_tensor(tensor)
    plan, ids, rows = ops.plan(flat_batch(45), FLAT_SHAPE, 1), np.arange(45), poisoned(45, 256)
    weight = ops.pack([tensor], expand=True)
    ops.run(lambda w: ops.embed(w, plan, weight, ids.astype(np.int32), rows))
    assert np.array_equal(rows, values, equal_nan=True)
    signed = ~np.isnan(values)
    assert np.array_equal(np.signbit(rows[signed]), np.signbit(values[signed]))


@pytest.mark.parametrize("num_inputs", [1, 3, 7, 15, 17, 41, 255, 271])
@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_rows_of_any_length_and_number_decode_exactly(
    ops: CpuOps, type_name: str, num_inputs: int
) -> None:
    for num_outputs in (1, 7, 8, 9, 33, 63):
        tensor = random_tensor(np.random.default_rng(11), type_name, num_outputs, num_inputs)
        for expand in (True, False):
            weight = ops.pack([tensor], expand=expand)
            out = matmul(ops, np.eye(num_inputs, dtype=np.float32), weight)
            assert np.array_equal(out, dequantize_tensor(tensor).T)


@pytest.mark.parametrize("num_inputs", [1, 31, 255, 256, 257, 576])
@pytest.mark.parametrize("num_outputs", [1, 31, 32, 33, 100])
def test_result_is_the_chain_of_multiply_adds_by_blocks_of_256(
    ops: CpuOps, num_inputs: int, num_outputs: int
) -> None:
    rng = np.random.default_rng(num_inputs * 1000 + num_outputs)
    w = rng.standard_normal((num_outputs, num_inputs), dtype=np.float32)
    bias = rng.standard_normal(num_outputs, dtype=np.float32)
    for num_tokens in (1, 3, 9, 34):
        x = rng.standard_normal((num_tokens, num_inputs), dtype=np.float32)
        residual = rng.standard_normal((num_tokens, num_outputs), dtype=np.float32)
        for expand in (True, False):
            weight = ops.pack([f32_tensor(w)], expand=expand)
            assert np.array_equal(matmul(ops, x, weight), chained(x, w, np.zeros_like(residual)))
            with_bias = matmul(ops, x, weight, bias=bias)
            assert np.array_equal(with_bias, chained(x, w, np.broadcast_to(bias, residual.shape)))
            added = matmul(ops, x, weight, out=residual, accumulate=True)
            assert np.array_equal(added, chained(x, w, residual))


def test_block_sums_are_added_to_the_start_one_by_one(ops: CpuOps) -> None:
    x = np.zeros((1, 512), np.float32)
    x[0, 0] = x[0, 256] = 1
    weight = ops.pack([f32_tensor(np.full((32, 512), 3, np.float32))], expand=True)
    # near 1e8 float32 has steps of 8: adding 3 twice changes nothing, adding 6 would
    start = np.full((1, 32), 1e8, np.float32)
    assert np.array_equal(matmul(ops, x, weight, out=start, accumulate=True), start)


@pytest.mark.parametrize("expand", [True, False])
def test_bits_do_not_depend_on_the_number_of_tokens_or_workers(
    teams: dict[int, CpuOps], expand: bool
) -> None:
    rng = np.random.default_rng(3)
    tensor = random_tensor(rng, "Q5_0", 200, 544)
    x = rng.standard_normal((300, 544), dtype=np.float32)
    whole = matmul(teams[1], x, teams[1].pack([tensor], expand=expand))
    for ops in teams.values():
        weight = ops.pack([tensor], expand=expand)
        for count in [*range(1, 40), 64, 65, 127, 128, 129, 300]:
            assert matmul(ops, x[:count], weight).tobytes() == whole[:count].tobytes(), count


def test_3000_tokens_give_the_bits_of_one(ops: CpuOps) -> None:
    rng = np.random.default_rng(4)
    weight = ops.pack([random_tensor(rng, "Q4_K", 64, 256)], expand=False)
    x = rng.standard_normal((3000, 256), dtype=np.float32)
    whole = matmul(ops, x, weight)
    for token in (0, 1, 1499, 2999):
        assert matmul(ops, x[token : token + 1], weight).tobytes() == whole[token].tobytes()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 90), st.sampled_from([1, 2, 3]), st.booleans())
def test_bits_do_not_depend_on_neighbours(
    teams: dict[int, CpuOps], seed: int, count: int, workers: int, expand: bool
) -> None:
    rng = np.random.default_rng(seed)
    ops = teams[workers]
    weight = ops.pack([random_tensor(np.random.default_rng(0), "Q6_K", 75, 512)], expand=expand)
    pool = np.random.default_rng(1).standard_normal((100, 512), dtype=np.float32)
    chosen = rng.integers(0, 100, count)
    strangers = np.flatnonzero(rng.random(count) < 0.3)
    x = pool[chosen]
    x[strangers] = np.inf  # a ruined neighbour ruins itself alone
    out = matmul(ops, x, weight)
    keep = np.setdiff1d(np.arange(count), strangers)
    assert out[keep].tobytes() == matmul(ops, pool, weight)[chosen[keep]].tobytes()


def test_stacked_tensors_of_different_types_give_each_tensors_own_product(
    teams: dict[int, CpuOps],
) -> None:
    rng = np.random.default_rng(5)
    tensors = [
        random_tensor(rng, name, rows, 512)
        for name, rows in (("Q4_K", 70), ("Q6_K", 33), ("F16", 5), ("Q8_0", 64))
    ]
    x = rng.standard_normal((21, 512), dtype=np.float32)
    apart = [matmul(teams[1], x, teams[1].pack([t], expand=True)) for t in tensors]
    for ops in teams.values():
        for expand in (True, False):
            weight = ops.pack(tensors, expand=expand)
            assert (weight.num_outputs, weight.num_inputs) == (172, 512)
            assert np.array_equal(matmul(ops, x, weight), np.concatenate(apart, axis=1))
            bias = rng.standard_normal(172, dtype=np.float32)
            split = np.split(bias, [70, 103, 108])
            singles = [
                matmul(ops, x, ops.pack([t], expand=expand), bias=part)
                for t, part in zip(tensors, split, strict=True)
            ]
            stacked = matmul(ops, x, weight, bias=bias)
            assert np.array_equal(stacked, np.concatenate(singles, axis=1))


def test_embedding_reads_rows_of_stacked_tensors(ops: CpuOps) -> None:
    rng = np.random.default_rng(6)
    tensors = [random_tensor(rng, "Q5_1", 40, 64), random_tensor(rng, "BF16", 9, 64)]
    values = np.concatenate([dequantize_tensor(tensor) for tensor in tensors])
    ids = np.array([48, 0, 39, 40, 47, 31, 32], np.int32)
    plan = ops.plan(flat_batch(len(ids)), FLAT_SHAPE, 1)
    for expand in (True, False):
        weight, rows = ops.pack(tensors, expand=expand), poisoned(len(ids), 64)
        ops.run(lambda w, weight=weight, rows=rows: ops.embed(w, plan, weight, ids, rows))
        assert np.array_equal(rows, values[ids])


def test_a_token_id_outside_the_embedding_is_refused(ops: CpuOps) -> None:
    weight = ops.pack([random_tensor(np.random.default_rng(9), "Q8_0", 40, 32)], expand=False)
    plan, out = ops.plan(flat_batch(2), FLAT_SHAPE, 1), poisoned(2, 32)
    for bad in (-1, 40):
        ids = np.array([3, bad], np.int32)
        with pytest.raises(KernelError, match="rows 0 to 39"):
            ops.run(lambda w, ids=ids: ops.embed(w, plan, weight, ids, out))


def test_read_only_bytes_are_taken(ops: CpuOps) -> None:
    tensor = random_tensor(np.random.default_rng(7), "Q4_0", 33, 64)
    x = np.ones((2, 64), np.float32)
    expected = matmul(ops, x, ops.pack([tensor], expand=False))
    tensor.data.flags.writeable = False
    for expand in (True, False):
        assert np.array_equal(matmul(ops, x, ops.pack([tensor], expand=expand)), expected)


def test_a_type_without_dequantiser_is_refused_by_name(ops: CpuOps) -> None:
    iq4 = next(kind for kind in LISTED_TYPES.values() if kind.name == "IQ4_NL")
    data = np.zeros((4, iq4.row_nbytes(64)), np.uint8)
    with pytest.raises(UnsupportedTypeError, match=r"blk\.3\.w.*IQ4_NL"):
        ops.pack([BlockTensor("blk.3.w", iq4, 4, 64, data)], expand=False)


def test_tensors_that_do_not_fit_together_are_refused(ops: CpuOps) -> None:
    rng = np.random.default_rng(8)
    wide, short = random_tensor(rng, "F32", 4, 64), random_tensor(rng, "F32", 4, 32)
    with pytest.raises(KernelError, match=r"32 inputs.*64"):
        ops.pack([wide, short], expand=False)
    cut = BlockTensor("cut", TYPES["Q4_K"], 4, 128, np.zeros((4, 72), np.uint8))
    with pytest.raises(KernelError, match="cut: 128 inputs are not whole blocks of 256"):
        ops.pack([cut], expand=True)
    half = BlockTensor("half", wide.type, 4, 64, wide.data[:, ::2])
    with pytest.raises(KernelError, match="half"):
        ops.pack([half], expand=True)
