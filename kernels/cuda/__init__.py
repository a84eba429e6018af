"""The CUDA backend. Importing this needs neither CuPy nor a GPU; `cuda_ops` needs both."""

from __future__ import annotations

import importlib.util
from typing import Literal

from kernels.ops import KernelError, Ops

ProductWay = Literal["tiles", "few"]


def refusal() -> str | None:
    """What keeps the backend from being used here, and what to do; None where nothing does."""
    if importlib.util.find_spec("cupy") is None:
        return (
            "the GPU backend needs CuPy, which is not installed; "
            "install the extra cuda12 or cuda13, for the driver's CUDA version"
        )
    try:
        from kernels.cuda.backend import check_device

        check_device(0)
    except ImportError as error:
        return f"CuPy does not load ({error}); install the extra for the driver's CUDA version"
    except KernelError as error:
        return str(error)
    return None


def cuda_ops(device: int = 0, *, products: ProductWay = "tiles") -> Ops:
    """The backend on one GPU; see `kernels.cuda.backend.CudaOps`.

    Raises KernelError: no CuPy, no such device.
    """
    refused = refusal() if device == 0 else None
    if refused is not None:
        raise KernelError(refused)
    from kernels.cuda.backend import CudaOps

    return CudaOps(device, products=products)
