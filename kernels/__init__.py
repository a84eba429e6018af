"""Numerical kernels: maths on arrays, no files, no model names, no scheduling."""

__version__ = "0.1.0"
