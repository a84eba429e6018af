"""Products of few tokens from quantised bytes: against float64, and bytes for any number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kernels.quants import BlockTensor, dequantize_tensor
from tests.cpu_helpers import TYPES, f32_tensor, matmul, random_tensor
from tests.cuda_helpers import HostOps
from tests.test_cuda_ops import open_ops

cp = pytest.importorskip("cupy", reason="CuPy is not installed")
from kernels.cuda.few import Variant  # noqa: E402

pytestmark = pytest.mark.gpu

# Of the sum of the terms' magnitudes: float32 sums, and 16 bits of a run's inputs.
BOUND = 3e-5
BY_RUNS = ("Q4_K", "Q6_K", "Q8_0")


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    made = open_ops(products="few")
    yield HostOps(made)
    made.close()


def terms(x: np.ndarray, tensors: list[BlockTensor]) -> tuple[np.ndarray, np.ndarray]:
    """x · weightᵀ in float64, and the largest sum of magnitudes of each token."""
    values = np.concatenate([dequantize_tensor(tensor) for tensor in tensors]).astype(np.float64)
    sizes = np.abs(x.astype(np.float64)) @ np.abs(values).T
    return x.astype(np.float64) @ values.T, sizes.max(axis=1, keepdims=True)


@pytest.mark.parametrize("type_name", sorted(TYPES))
@pytest.mark.parametrize("num_inputs", [256, 768, 2048, 2304, 4352])
@pytest.mark.parametrize("num_outputs", [1, 7, 9, 37])
def test_products_match_float64(
    ops: Any, num_outputs: int, num_inputs: int, type_name: str
) -> None:
    """Rows of a multiple of 16 bytes, for types that take those, and others."""
    rng = np.random.default_rng(num_outputs)
    x = rng.standard_normal((3, num_inputs), dtype=np.float32)
    tensor = random_tensor(rng, type_name, num_outputs, num_inputs)
    expected, sizes = terms(x, [tensor])
    out = matmul(ops, x, ops.pack([tensor], expand=False))
    assert (np.abs(out - expected) <= BOUND * sizes).all()


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "F16"])
@pytest.mark.parametrize("num_inputs", [32, 96, 288, 8224])
def test_inputs_that_are_no_multiple_of_a_run(ops: Any, num_inputs: int, type_name: str) -> None:
    rng = np.random.default_rng(num_inputs)
    x = rng.standard_normal((9, num_inputs), dtype=np.float32)
    tensor = random_tensor(rng, type_name, 33, num_inputs)
    expected, sizes = terms(x, [tensor])
    out = matmul(ops, x, ops.pack([tensor], expand=False))
    assert (np.abs(out - expected) <= BOUND * sizes).all()


def test_parts_of_several_types_with_bias_and_accumulation(ops: Any) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((11, 2048), dtype=np.float32)
    tensors = [random_tensor(rng, name, 45, 2048) for name in (*BY_RUNS, "Q5_K", "F32")]
    bias = rng.standard_normal(5 * 45, dtype=np.float32)
    start = rng.standard_normal((11, 5 * 45), dtype=np.float32)
    expected, sizes = terms(x, tensors)
    weight = ops.pack(tensors, expand=False)
    out = matmul(ops, x, weight, out=start, bias=bias, accumulate=True)
    assert (np.abs(out - (expected + start + bias)) <= BOUND * (sizes + 10)).all()
    assert ops.ops.products.paths()[225, 2048] == ("few (dots+runs)", 8)


@pytest.mark.parametrize("type_name", sorted(TYPES))
@pytest.mark.parametrize("num_outputs", [8, 200])
def test_a_product_depends_on_its_token_alone(ops: Any, num_outputs: int, type_name: str) -> None:
    """Case 21: any number of tokens, any place among them, and magnitudes that need a scale."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((33, 2048), dtype=np.float32)
    x[::3] *= 1e6
    weight = ops.pack([random_tensor(rng, type_name, num_outputs, 2048)], expand=False)
    together = matmul(ops, x, weight)
    assert np.isfinite(together).all()
    for count in (*range(1, 10), 16, 17):
        assert matmul(ops, x[:count], weight).tobytes() == together[:count].tobytes(), count
    order = rng.permutation(len(x))
    assert matmul(ops, x[order], weight).tobytes() == together[order].tobytes()
    for token in range(len(x)):
        alone = matmul(ops, x[token : token + 1], weight)
        assert alone.tobytes() == together[token : token + 1].tobytes(), token


@pytest.mark.parametrize("type_name", BY_RUNS)
@pytest.mark.parametrize("num_outputs", [40, 4096])
def test_how_many_outputs_a_block_takes_changes_no_byte(type_name: str, num_outputs: int) -> None:
    rng = np.random.default_rng(6)
    x = rng.standard_normal((5, 4096), dtype=np.float32)
    tensor = random_tensor(rng, type_name, num_outputs, 4096)
    made = open_ops(products="few")
    weight, results, alone = made.pack([tensor], expand=False), set(), set()
    for tiles, stages, blocks in ((1, 2, 3), (2, 2, 2), (1, 3, 2), (2, 2, 1)):
        variant = Variant(tiles=tiles, stages=stages, blocks=blocks)
        made.products.one[type_name] = made.products.several[type_name] = variant
        on_host: Any = HostOps(made)
        results.add(matmul(on_host, x, weight).tobytes())
        alone.add(matmul(on_host, x[:1], weight).tobytes())
    made.close()
    assert len(results) == len(alone) == 1


@pytest.mark.parametrize("type_name", [*BY_RUNS, "F32"])
def test_products_of_any_magnitude_stay_finite(ops: Any, type_name: str) -> None:
    """Case 22: each run of a token on its own scale."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((7, 2048), dtype=np.float32)
    scales = np.array([1e-30, 1e-6, 1, 1e5, 1e9, 1e20, 0], np.float32)[:, None]
    x *= scales
    x[:, 256:300] *= 1e3
    tensor = random_tensor(rng, type_name, 40, 2048)
    expected, sizes = terms(x, [tensor])
    out = matmul(ops, x, ops.pack([tensor], expand=False))
    assert np.isfinite(out).all()
    assert (np.abs(out - expected) <= 2e-4 * sizes).all()


@pytest.mark.parametrize("type_name", BY_RUNS)
def test_a_nan_stays_with_its_token(ops: Any, type_name: str) -> None:
    rng = np.random.default_rng(8)
    x = rng.standard_normal((4, 2048), dtype=np.float32)
    x[2, 700] = np.nan
    tensor = random_tensor(rng, type_name, 24, 2048)
    out = matmul(ops, x, ops.pack([tensor], expand=False))
    assert np.isnan(out[2]).all() and np.isfinite(np.delete(out, 2, axis=0)).all()


def test_products_written_into_a_slice_leave_the_rest_alone(ops: Any) -> None:
    """A weight's parts are columns of one output."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((2, 512), dtype=np.float32)
    tensors = [random_tensor(rng, name, 19, 512) for name in ("Q4_K", "Q8_0")]
    both = matmul(ops, x, ops.pack(tensors, expand=False))
    for i, tensor in enumerate(tensors):
        alone = matmul(ops, x, ops.pack([tensor], expand=False))
        assert alone.tobytes() == np.ascontiguousarray(both[:, 19 * i : 19 * (i + 1)]).tobytes()


def test_zero_weights_give_zeros(ops: Any) -> None:
    weight = ops.pack([f32_tensor(np.zeros((5, 256)))], expand=False)
    assert not matmul(ops, np.ones((2, 256), np.float32), weight).any()
