"""The CUDA backend. Importing this needs neither CuPy nor a GPU; `cuda_ops` needs both."""

from __future__ import annotations

from kernels.ops import KernelError, Ops


def cuda_ops(device: int = 0) -> Ops:
    """The backend on one GPU. Raises KernelError: no CuPy, no such device."""
    try:
        from kernels.cuda.backend import CudaOps
    except ImportError as error:
        raise KernelError(
            f"the GPU backend needs CuPy, which does not load ({error}); "
            "install the extra cuda12 or cuda13, for the driver's CUDA version"
        ) from error
    return CudaOps(device)
