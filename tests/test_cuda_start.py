"""The CUDA package where there is no CuPy or no GPU: it imports, and says what is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import kernels.cuda
from kernels.cuda import cuda_ops
from kernels.ops import KernelError

SOURCES = {
    "attention.cu",
    "attention.cuh",
    "attention_int8.cu",
    "attention_shared.cu",
    "attention_shared_int8.cu",
    "blocks.cuh",
    "close_pages.cu",
    "common.cuh",
    "dequant.cu",
    "few.cu",
    "host_pages.cu",
    "integers.cuh",
    "pages.cuh",
    "pointwise.cu",
    "product.cu",
    "runs.cuh",
    "sampling.cu",
    "selection.cuh",
    "shared.cuh",
}


def test_without_cupy_the_backend_says_which_extra_to_install() -> None:
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("CuPy is installed")
    with pytest.raises(KernelError, match=r"needs CuPy.*install the extra cuda12 or cuda13"):
        cuda_ops()


def test_a_device_that_is_not_there_is_an_error() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    with pytest.raises(
        KernelError, match=r"no GPU can be used|GPU 99 is not among the \d+ visible"
    ):
        cuda_ops(99)


def test_kernel_sources_travel_with_the_package() -> None:
    """They are package data of `kernels`, found beside the module that compiles them."""
    folder = Path(kernels.cuda.__file__).parent
    assert {path.name for path in folder.glob("*.cu*")} == SOURCES
    declared = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert 'kernels = ["cuda/*.cu", "cuda/*.cuh"]' in declared
