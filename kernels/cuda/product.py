"""Matrix products in half precision, in tiles of 256 tokens that are always computed whole.

    out = (out) + bias + 2**e · (halves of x·2**-e) · weightᵀ        summed in float32

A token's exponent e brings its largest input near the top of what halves hold, so nothing
overflows. A product of a weight always has the same shape and goes by the same algorithm, whatever
the number of tokens; that a token's place in the tile does not matter either is checked once for
each shape, on random data, and where the library fails it a kernel of our own takes over.
"""

from __future__ import annotations

import ctypes
from typing import Any

import cupy as cp
import numpy as np
from cupy.cuda import cublas

from kernels.cuda.matrix import CudaMatrix, DeviceArray, dequantize
from kernels.cuda.modules import MAX_GRID_Y, NULL, blocks_for, get_kernel
from kernels.ops import KernelError

TILE_TOKENS = 256
SLAB_NBYTES = 1 << 30  # halves of a weight that are decoded at once
_THREADS = 256
_CUDA_R_16F, _CUDA_R_32F, _COMPUTE_32F, _DEFAULT_ALGORITHM = 2, 0, 68, -1


class Products:
    """Products of one device, with the scratch they need; it grows to the largest of them.

    library: use the vendor's product where it passes the check
    """

    def __init__(self, *, library: bool = True) -> None:
        self._handle = cublas.create() if library else None
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._by_library: dict[tuple[int, int], bool] = {}
        self._scratch: dict[str, DeviceArray] = {}

    def close(self) -> None:
        self._scratch.clear()
        if self._handle is not None:
            cublas.destroy(self._handle)
            self._handle = None

    def paths(self) -> dict[tuple[int, int], str]:
        """What served each shape (num_outputs, num_inputs) so far."""
        return {shape: "library" if by else "own" for shape, by in self._by_library.items()}

    def matmul(
        self,
        x: DeviceArray,
        weight: CudaMatrix,
        out: DeviceArray,
        bias: DeviceArray | None,
        accumulate: bool,
    ) -> None:
        """out (num_tokens, num_outputs) = or += x · weightᵀ (+ bias)."""
        num_tokens, num_inputs = x.shape
        if num_tokens == 0:
            return
        halves, exponents = self._operand(x)
        slab = max(1, SLAB_NBYTES // (2 * num_inputs))
        for begin in range(0, weight.num_outputs, slab):
            end = min(begin + slab, weight.num_outputs)
            outputs = self._outputs(weight, begin, end)
            for first in range(0, num_tokens, TILE_TOKENS):
                tokens = slice(first, min(first + TILE_TOKENS, num_tokens))
                sums = self._tile(halves[first : first + TILE_TOKENS], outputs)
                part_bias = None if bias is None else bias[begin:end]
                _finish(sums, exponents[tokens], part_bias, accumulate, out[tokens], begin)

    def _operand(self, x: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
        num_tokens, num_inputs = x.shape
        padded = blocks_for(num_tokens, TILE_TOKENS) * TILE_TOKENS
        halves = self._buffer("x", (padded, num_inputs), cp.float16)
        exponents = self._buffer("exponents", (padded,), cp.int32)
        get_kernel("pointwise.cu", "to_halves")(
            (num_tokens,), (_THREADS,), (np.int32(num_inputs), x, halves, exponents)
        )
        return halves, exponents

    def _outputs(self, weight: CudaMatrix, begin: int, end: int) -> DeviceArray:
        if weight.halves is not None:
            return weight.halves[begin:end]
        halves = self._buffer("weight", (end - begin, weight.num_inputs), cp.float16)
        dequantize(weight, begin, halves)
        return halves

    def _tile(self, x: DeviceArray, outputs: DeviceArray) -> DeviceArray:
        shape = outputs.shape
        sums = self._buffer("sums", (TILE_TOKENS, shape[0]), cp.float32)
        if shape not in self._by_library:
            self._by_library[shape] = self._handle is not None and self._is_uniform(shape)
        if self._by_library[shape]:
            self._library_product(x, outputs, sums)
        else:
            _own_product(x, outputs, sums)
        return sums

    def _is_uniform(self, shape: tuple[int, int]) -> bool:
        """Whether the library gives the same bytes at all places of the tile, and right ones."""
        num_outputs, num_inputs = shape
        rng = np.random.default_rng(num_outputs)
        row = rng.standard_normal(num_inputs, dtype=np.float32).astype(np.float16)
        x = cp.ascontiguousarray(cp.broadcast_to(cp.asarray(row), (TILE_TOKENS, num_inputs)))
        some = rng.standard_normal((min(num_outputs, 64), num_inputs), dtype=np.float32)
        outputs = cp.resize(cp.asarray(some.astype(np.float16)), shape)
        sums = cp.full((TILE_TOKENS, num_outputs), cp.nan, cp.float32)
        self._library_product(x, outputs, sums)
        bits = sums.view(cp.int32)
        if not bool((bits == bits[:1]).all()):
            return False
        expected = some.astype(np.float16).astype(np.float64) @ row.astype(np.float64)
        error = np.abs(cp.asnumpy(sums[0, : len(some)]) - expected).max()
        if not error <= 1e-3 * num_inputs**0.5:
            raise KernelError(
                f"the library's product of {num_outputs} x {num_inputs} halves is off by {error} "
                f"on this GPU; expected at most {1e-3 * num_inputs**0.5:.3g}; check the driver"
            )
        return True

    def _library_product(self, x: DeviceArray, outputs: DeviceArray, sums: DeviceArray) -> None:
        # Row-major sums = x · outputsᵀ is column-major sumsᵀ = outputs · xᵀ.
        num_outputs, num_inputs = outputs.shape
        cublas.gemmEx(
            self._handle,
            cublas.CUBLAS_OP_T,
            cublas.CUBLAS_OP_N,
            num_outputs,
            TILE_TOKENS,
            num_inputs,
            ctypes.addressof(self._one),
            outputs.data.ptr,
            _CUDA_R_16F,
            num_inputs,
            x.data.ptr,
            _CUDA_R_16F,
            num_inputs,
            ctypes.addressof(self._zero),
            sums.data.ptr,
            _CUDA_R_32F,
            num_outputs,
            _COMPUTE_32F,
            _DEFAULT_ALGORITHM,
        )

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        """A part of a scratch buffer that lives on; the rows nobody wrote hold anything."""
        count = int(np.prod(shape))
        have = self._scratch.get(name)
        if have is None or len(have) < count:
            self._scratch.pop(name, None)
            self._scratch[name] = cp.zeros(count, dtype)
        return self._scratch[name][:count].reshape(shape)


def _own_product(x: DeviceArray, outputs: DeviceArray, sums: DeviceArray) -> None:
    num_outputs, num_inputs = outputs.shape
    get_kernel("product.cu", "tile_product")(
        (blocks_for(num_outputs, 32),),
        (128,),
        (np.int32(num_outputs), np.int32(num_inputs), x, outputs, sums),
    )


def _finish(
    sums: DeviceArray,
    exponents: DeviceArray,
    bias: DeviceArray | None,
    accumulate: bool,
    out: DeviceArray,
    first_output: int,
) -> None:
    num_tokens, width = len(out), sums.shape[1]
    get_kernel("pointwise.cu", "finish_product")(
        (blocks_for(width, _THREADS), min(num_tokens, MAX_GRID_Y)),
        (_THREADS,),
        (
            np.int32(num_tokens),
            np.int32(width),
            np.int32(out.shape[1]),
            sums,
            exponents,
            NULL if bias is None else bias,
            np.int32(accumulate),
            out[:, first_output:],
        ),
    )
