"""Operations of the CUDA backend against float64 and NumPy, at sizes around its tiles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.ops import KernelError
from kernels.quants import BlockTensor, dequantize_tensor
from tests.cpu_helpers import (
    FLAT_SHAPE,
    TYPES,
    f32_tensor,
    flat_batch,
    matmul,
    poisoned,
    random_tensor,
    rms,
)
from tests.cuda_helpers import HostOps, kv_shape_of

cp = pytest.importorskip("cupy", reason="CuPy is not installed")
product = pytest.importorskip("kernels.cuda.product")
pytestmark = pytest.mark.gpu

KV_TYPES = ("f32", "f16", "int8")


@pytest.fixture(scope="module", params=["library", "own"])
def ops(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = open_ops(library=request.param == "library")
    yield HostOps(made)
    made.close()


def open_ops(**options: Any) -> Any:
    from kernels.cuda.backend import CudaOps

    try:
        return CudaOps(**options)
    except KernelError as error:
        pytest.skip(str(error))


def halves_of(tensor: BlockTensor) -> np.ndarray:
    return dequantize_tensor(tensor).astype(np.float16)


@pytest.mark.parametrize("type_name", sorted(TYPES))
@pytest.mark.parametrize("num_outputs", [1, 37])
def test_values_are_the_reference_values_rounded_to_halves(
    ops: Any, type_name: str, num_outputs: int
) -> None:
    tensor = random_tensor(np.random.default_rng(1), type_name, num_outputs, 768)
    weight = ops.pack([tensor], expand=True)
    assert cp.asnumpy(weight.halves).tobytes() == halves_of(tensor).tobytes()


@pytest.mark.parametrize("type_name", sorted(TYPES))
def test_embedding_rows_are_the_reference_values(ops: Any, type_name: str) -> None:
    tensor = random_tensor(np.random.default_rng(2), type_name, 19, 512)
    weight = ops.pack([tensor], expand=False)
    ids = np.array([0, 18, 7, 7, 3], np.int32)
    out, plan = poisoned(5, 512), ops.plan(flat_batch(5), FLAT_SHAPE, 1)
    ops.run(lambda w: ops.embed(w, plan, weight, ids, out))
    assert out.tobytes() == dequantize_tensor(tensor)[ids].tobytes()


def test_token_ids_outside_the_embedding_are_refused(ops: Any) -> None:
    weight = ops.pack([random_tensor(np.random.default_rng(2), "Q8_0", 4, 64)], expand=False)
    ids, plan = np.array([4], np.int32), ops.plan(flat_batch(1), FLAT_SHAPE, 1)
    with pytest.raises(KernelError, match=r"from 4 to 4.*rows 0 to 3"):
        ops.embed(0, plan, weight, ids, poisoned(1, 64))


@pytest.mark.parametrize("num_inputs", [256, 512, 2816])
@pytest.mark.parametrize("num_outputs", [1, 31, 33, 520])
@pytest.mark.parametrize("num_tokens", [1, 3, 255, 256, 257, 600])
def test_products_match_float64(
    ops: Any, num_tokens: int, num_outputs: int, num_inputs: int
) -> None:
    rng = np.random.default_rng(num_tokens)
    x = rng.standard_normal((num_tokens, num_inputs), dtype=np.float32)
    tensors = [
        random_tensor(rng, name, num_outputs, num_inputs) for name in ("Q4_K", "Q6_K", "Q8_0")
    ]
    bias = rng.standard_normal(3 * num_outputs, dtype=np.float32)
    start = rng.standard_normal((num_tokens, 3 * num_outputs), dtype=np.float32)
    values = np.concatenate([halves_of(tensor) for tensor in tensors]).astype(np.float64)
    expected = x.astype(np.float64) @ values.T
    bound = 2**-10 * (np.abs(x) @ np.abs(values.T).astype(np.float32)).max()
    for expand in (False, True):
        weight = ops.pack(tensors, expand=expand)
        plain = matmul(ops, x, weight)
        added = matmul(ops, x, weight, out=start, bias=bias, accumulate=True)
        assert np.abs(plain - expected).max() <= bound
        assert np.abs(added - (expected + start + bias)).max() <= bound


def test_products_of_any_magnitude_stay_finite(ops: Any) -> None:
    """Case 22: beyond 65,504 too, each token on its own scale."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((7, 512), dtype=np.float32)
    scales = np.array([1e-30, 1e-6, 1, 1e5, 1e9, 1e20, 0], np.float32)
    weight = ops.pack([f32_tensor(rng.standard_normal((40, 512)))], expand=False)
    out = matmul(ops, x * scales[:, None], weight)
    unit = matmul(ops, x, weight)
    assert np.isfinite(out).all()
    error = np.abs(out - unit.astype(np.float64) * scales[:, None])
    assert (error <= 6e-2 * scales[:, None]).all()


@pytest.mark.parametrize("num_outputs", [256, 777])
def test_a_product_depends_on_its_token_alone(ops: Any, num_outputs: int) -> None:
    """Case 21: alone, in one tile, in eight at once, and with magnitudes that need a scale."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((2900, 1024), dtype=np.float32)
    x[::3] *= 1e6
    tensor = random_tensor(rng, "Q4_K", num_outputs, 1024)
    weight, expanded = (ops.pack([tensor], expand=expand) for expand in (False, True))
    assert expanded.layout == "f16-rows" and weight.layout == "gguf-rows"
    together = matmul(ops, x, weight)
    assert matmul(ops, x, expanded).tobytes() == together.tobytes()
    order = rng.permutation(len(x))
    assert matmul(ops, x[order], weight).tobytes() == together[order].tobytes()
    for count in (300, 600, 1024, 2047):
        assert matmul(ops, x[:count], weight).tobytes() == together[:count].tobytes(), count
    for token in (0, 1, 255, 256, 2047, 2048, 2899):
        alone = matmul(ops, x[token : token + 1], weight)
        assert alone.tobytes() == together[token : token + 1].tobytes(), token


@pytest.mark.parametrize("num_outputs, num_inputs", [(1500, 1024), (4096, 512)])
def test_bytes_do_not_depend_on_how_much_of_a_weight_is_decoded_at_once(
    num_outputs: int, num_inputs: int, ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slabs whose products go to columns of the output, and by way of scratch."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((600, num_inputs), dtype=np.float32)
    weight = ops.pack([random_tensor(rng, "Q4_K", num_outputs, num_inputs)], expand=False)
    whole = matmul(ops, x, weight)
    monkeypatch.setattr(product, "SLAB_NBYTES", 512 * num_inputs * 2)
    assert matmul(ops, x, weight).tobytes() == whole.tobytes()
    start = np.zeros_like(whole)
    assert matmul(ops, x, weight, out=start, accumulate=True).tobytes() == whole.tobytes()


def test_tensors_on_the_device_are_read_in_place(ops: Any) -> None:
    rng = np.random.default_rng(7)
    tensor = random_tensor(rng, "Q6_K", 30, 512)
    memory = cp.zeros(64 + tensor.data.nbytes, cp.uint8)
    there = memory[64:].reshape(tensor.data.shape)
    weight = ops.pack([replace(tensor, data=there)], expand=False)
    x = rng.standard_normal((3, 512), dtype=np.float32)
    assert not matmul(ops, x, weight).any()
    there[...] = cp.asarray(tensor.data)
    copied = ops.pack([tensor], expand=False)
    assert matmul(ops, x, weight).tobytes() == matmul(ops, x, copied).tobytes()


def test_products_take_no_more_scratch_than_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first products of a shape, with their checks, included."""
    monkeypatch.setattr(product, "SLAB_NBYTES", 32 << 20)
    made, pool = open_ops(), cp.get_default_memory_pool()
    shapes, num_tokens, rng = [(9000, 4096), (4096, 9216)], 2100, np.random.default_rng(8)
    plan, cases = made.plan(flat_batch(num_tokens), FLAT_SHAPE, 1), []
    for num_outputs, num_inputs in shapes:
        weight = made.pack([random_tensor(rng, "Q4_K", num_outputs, num_inputs)], expand=False)
        x = made.put(rng.standard_normal((num_tokens, num_inputs), dtype=np.float32))
        cases.append((x, weight, made.empty(num_tokens, num_outputs)))
    pool.free_all_blocks()
    buffers = made.products.buffers(shapes, num_tokens)
    pool.set_limit(size=pool.total_bytes() + sum(buffers.values()))
    try:
        for x, weight, out in cases:
            made.matmul(0, plan, x, weight, out)
            made.matmul(0, plan, x, weight, out, accumulate=True)
    finally:
        pool.set_limit(size=0)
        made.close()


def test_the_device_tells_its_driver_and_memory(ops: Any) -> None:
    assert re.fullmatch(r"\d+\.\d", ops.ops.driver_version())
    free_nbytes, total_nbytes = ops.ops.memory_info()
    assert 0 < free_nbytes < total_nbytes
    assert ops.ops.default_kv_type == "f16"
    ops.ops.synchronize()


@pytest.mark.parametrize("hidden", [1, 2, 33, 255, 256, 257, 8192])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_rms_norm_matches_float64(ops: Any, hidden: int, num_tokens: int) -> None:
    rng = np.random.default_rng(hidden)
    x = rng.standard_normal((num_tokens, hidden), dtype=np.float32) * 30
    weight = rng.standard_normal(hidden, dtype=np.float32)
    out, plan = poisoned(*x.shape), ops.plan(flat_batch(num_tokens), FLAT_SHAPE, 1)
    ops.run(lambda w: ops.rms_norm(w, plan, x, weight, 1e-5, out))
    np.testing.assert_allclose(out, rms(x, weight, 1e-5), rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("ffn", [1, 31, 255, 256, 257, 1536])
def test_swiglu_matches_float64(ops: Any, ffn: int) -> None:
    rng = np.random.default_rng(ffn)
    gate_up = rng.standard_normal((9, 2 * ffn), dtype=np.float32) * 8
    gate, up = gate_up[:, :ffn].astype(np.float64), gate_up[:, ffn:].astype(np.float64)
    out, plan = poisoned(9, ffn), ops.plan(flat_batch(9), FLAT_SHAPE, 1)
    ops.run(lambda w: ops.swiglu(w, plan, gate_up, out))
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=2e-6, atol=1e-9)


def test_swiglu_saturates_without_overflow_and_keeps_a_nan(ops: Any) -> None:
    gate = np.array([-1e30, -1e4, -200, 200, 1e4, 1e30, np.nan], np.float32)
    gate_up = np.stack([gate, np.ones_like(gate)], axis=0).reshape(1, -1)
    out, plan = poisoned(1, len(gate)), ops.plan(flat_batch(1), FLAT_SHAPE, 1)
    ops.run(lambda w: ops.swiglu(w, plan, gate_up, out))
    np.testing.assert_allclose(out[0], [0, 0, 0, 200, 1e4, 1e30, np.nan], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("num_logits", [0, 1, 40])
def test_head_is_the_norm_and_product_of_the_wanted_tokens(ops: Any, num_logits: int) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((40, 256), dtype=np.float32)
    norm = rng.standard_normal(256, dtype=np.float32)
    weight = ops.pack([random_tensor(rng, "Q8_0", 77, 256)], expand=False)
    indices = np.sort(rng.permutation(40)[:num_logits]).astype(np.int32)
    normed, logits = poisoned(num_logits, 256), poisoned(num_logits, 77)
    all_normed, plan = poisoned(40, 256), ops.plan(flat_batch(40), FLAT_SHAPE, 1)
    ops.run(lambda w: ops.head(w, plan, x, norm, 1e-5, weight, indices, normed, logits))
    ops.run(lambda w: ops.rms_norm(w, plan, x, norm, 1e-5, all_normed))
    assert logits.tobytes() == matmul(ops, all_normed, weight)[indices].tobytes()


def test_pages_are_copied_over_all_layers(ops: Any) -> None:
    pool = ops.kv_pool(kv_shape_of(64, 40), num_pages=3, kv_type="f16")
    pool.keys[:, 1], pool.values[:, 1] = 3, 4
    ops.ops.kv_copy(pool, 1, 2)
    assert float(pool.keys[:, 2].min()) == 3 and float(pool.values[:, 2].min()) == 4
    assert float(pool.keys[:, 0].max()) == 0
    assert pool.page_nbytes == (pool.keys.nbytes + pool.values.nbytes) // 3


def test_what_the_kernels_cannot_take_is_refused_by_name(ops: Any) -> None:
    with pytest.raises(KernelError, match=r"key length 300.*multiples of 8 up to 256"):
        ops.kv_pool(kv_shape_of(300, 64), num_pages=1, kv_type="f16")
    with pytest.raises(KernelError, match=r"w: 12 inputs are not a multiple of 8"):
        ops.pack([f32_tensor(np.ones((2, 12)))], expand=False)


def test_kernels_that_are_launched_early_wait_for_those_ahead() -> None:
    """All that touch what others write or read; a kernel launched early without it would race."""
    from kernels.cuda import modules

    waiting = set()
    for file in modules.FOLDER.glob("*.cu"):
        for kernel in file.read_text().split("__global__")[1:]:
            if "wait_for_others();" in kernel:
                without_bounds = re.sub(r"__launch_bounds__\(.*\)\n", "", kernel)
                name = re.search(r"(\w+)\(", without_bounds)
                assert name is not None, kernel[:80]
                waiting.add(name[1])
    assert waiting == modules.WAITING


def test_a_kernel_that_does_not_compile_shows_the_log(
    ops: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.cuda import modules

    for name in modules.PRELUDE:
        (tmp_path / name).write_text("")
    (tmp_path / "bad.cu").write_text('extern "C" __global__ void bad() { nonsense; }')
    monkeypatch.setattr(modules, "FOLDER", tmp_path)
    with pytest.raises(KernelError, match=r"(?s)bad.cu: bad does not compile.*nonsense"):
        modules.get_kernel("bad.cu", "bad")
