"""Kernels from the .cu files beside this: compiled once per device, launched with typed scalars."""

from __future__ import annotations

import functools
from pathlib import Path

import cupy as cp
import numpy as np

from kernels.cuda.launch import Kernel
from kernels.ops import KernelError

FOLDER = Path(__file__).parent
PRELUDE = ("common.cuh", "blocks.cuh")
_BEFORE = {
    "attention.cu": ("pages.cuh", "attention.cuh"),
    "attention_int8.cu": ("pages.cuh", "attention.cuh", "integers.cuh"),
    "attention_shared.cu": ("pages.cuh", "attention.cuh", "shared.cuh"),
    "attention_shared_int8.cu": ("pages.cuh", "attention.cuh", "integers.cuh", "shared.cuh"),
    "close_pages.cu": ("pages.cuh",),
    "few.cu": ("runs.cuh",),
    "pointwise.cu": ("pages.cuh",),
    "sampling.cu": ("selection.cuh",),
}
NULL = np.uint64(0)  # a pointer argument that is not there
MAX_GRID_Y = 65535
# Kernels that call `wait_for_others` before they touch what others write or read.
WAITING = {
    *("rms_norm", "rope_store", "attention", "merge_partials", "swiglu", "gather_rows"),
    *("few_product", "few_dots", "split_tokens"),
    *("rope_store_int8", "close_pages", "attention_int8"),
    *("attention_shared", "attention_shared_int8"),
}


def get_kernel(file: str, name: str) -> Kernel:
    """A kernel of `file` for the current device; `name` with its template arguments, if any.

    Raises KernelError with the compiler's log.
    """
    return _kernel(file, name, cp.cuda.Device().id)


@functools.cache
def _kernel(file: str, name: str, device: int) -> Kernel:
    module = cp.RawModule(
        code="".join(_source(part) for part in (*PRELUDE, *_BEFORE.get(file, ()), file)),
        options=("-std=c++17", f"-I{_headers()}"),
        name_expressions=[name] if "<" in name else None,
    )
    try:
        return Kernel(module.get_function(name), waits=name.partition("<")[0] in WAITING)
    except cp.cuda.compiler.CompileException as error:
        raise KernelError(
            f"{file}: {name} does not compile for device {device} "
            f"(sm_{cp.cuda.Device(device).compute_capability}):\n{error.get_message()}"
        ) from error


def _source(file: str) -> str:
    return f'#line 1 "{file}"\n{(FOLDER / file).read_text()}\n'


def _headers() -> str:
    return str(Path(cp.cuda.get_cuda_path() or "/usr/local/cuda") / "include")


def blocks_for(count: int, size: int) -> int:
    return -(-count // size)


def floats_together(*widths: int) -> int:
    """How many floats a thread may move at once in rows of these widths, from aligned arrays."""
    return 4 if all(width % 4 == 0 for width in widths) else 1
