"""The CPU backend: NumPy arrays, Numba kernels, threads of our own."""

from kernels.cpu.backend import CpuOps

__all__ = ["CpuOps"]
