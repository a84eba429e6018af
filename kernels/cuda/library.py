"""The vendor's matrix product in half precision, called so that it never splits the inputs.

CuPy's own binding cannot take the workspace away, and with one the library splits long sums where
there are few tokens: other bytes for 256 tokens than for 1,024.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_size_t, c_void_p
from typing import Any

import cupy as cp

from kernels.ops import KernelError

_NAMES = ("libcublas.so.13", "libcublas.so.12")
_TRANSPOSED, _PLAIN = c_int(1), c_int(0)
_HALF, _FLOAT, _FLOAT_SUMS, _ITS_CHOICE = c_int(2), c_int(0), c_int(68), c_int(-1)
_ONE, _ZERO = c_float(1.0), c_float(0.0)


def open_library() -> Library | None:
    """The library that CuPy uses, or None where it is not installed or has another name."""
    try:
        from cupy.cuda import cublas
    except ImportError:
        return None
    handle = cublas.create()  # makes CuPy load it, from wherever it is
    cublas.getVersion(handle)
    cublas.destroy(handle)
    for name in _NAMES:
        try:
            return Library(ctypes.CDLL(name))
        except OSError:
            continue
    return None


class Library:
    """A handle of the current device; see cuBLAS, cublasGemmEx."""

    def __init__(self, calls: ctypes.CDLL) -> None:
        self._calls = calls
        self._handle = c_void_p()
        self._check("cublasCreate_v2", calls.cublasCreate_v2(byref(self._handle)))

    def product(self, x: Any, outputs: Any, sums: Any) -> None:
        """sums (m, n) float32 = x (m, k) · outputsᵀ, outputs (n, k), halves.

        The rows of sums may lie further apart.

        Raises KernelError.
        """
        # Row-major sums = x · outputsᵀ is column-major sumsᵀ = outputs · xᵀ.
        num_outputs, num_inputs = outputs.shape
        n, m, k = c_int(num_outputs), c_int(len(x)), c_int(num_inputs)
        stride = c_int(sums.strides[0] // 4)
        self._follow_stream()
        status = self._calls.cublasGemmEx(
            self._handle,
            _TRANSPOSED,
            _PLAIN,
            n,
            m,
            k,
            byref(_ONE),
            c_void_p(outputs.data.ptr),
            _HALF,
            k,
            c_void_p(x.data.ptr),
            _HALF,
            k,
            byref(_ZERO),
            c_void_p(sums.data.ptr),
            _FLOAT,
            stride,
            _FLOAT_SUMS,
            _ITS_CHOICE,
        )
        self._check("cublasGemmEx", status)

    def close(self) -> None:
        if self._handle:
            self._calls.cublasDestroy_v2(self._handle)
            self._handle = c_void_p()

    def _follow_stream(self) -> None:
        stream = c_void_p(cp.cuda.get_current_stream().ptr)
        self._check("cublasSetStream_v2", self._calls.cublasSetStream_v2(self._handle, stream))
        # Setting the stream gives the library its own workspace back.
        status = self._calls.cublasSetWorkspace_v2(self._handle, c_void_p(), c_size_t(0))
        self._check("cublasSetWorkspace_v2", status)

    def _check(self, call: str, status: int) -> None:
        if status != 0:
            raise KernelError(
                f"{call} of the GPU's matrix library failed with status {status}; "
                "check the driver and free device memory (nvidia-smi)"
            )
