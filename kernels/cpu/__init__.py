"""The CPU backend: NumPy arrays, Numba kernels, threads of our own."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels.cpu.backend import CpuOps

__all__ = ["CpuOps"]


def __getattr__(name: str) -> Any:
    # Numba comes with it; what a KV page takes is known without.
    if name == "CpuOps":
        from kernels.cpu.backend import CpuOps

        return CpuOps
    raise AttributeError(f"module 'kernels.cpu' has no attribute {name!r}")
