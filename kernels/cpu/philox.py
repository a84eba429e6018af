"""Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011, Random123 philox.h)."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.jit import inlined

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOW_32, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@inlined
def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Four 32-bit words of four counter words and two key words, each in a uint64."""
    for _ in range(10):
        a = _M0 * c0
        b = _M1 * c2
        c0, c1, c2, c3 = (b >> HALF) ^ c1 ^ k0, b & LOW_32, (a >> HALF) ^ c3 ^ k1, a & LOW_32
        k0 = (k0 + _W0) & LOW_32
        k1 = (k1 + _W1) & LOW_32
    return c0, c1, c2, c3


@inlined
def scale_down(low: Any, high: Any, total: Any) -> Any:
    """floor((high · 2^32 + low) · total / 2^64): a random integer in [0, total).

    low, high: 32-bit words in uint64; total: int64 > 0
    """
    total_low, total_high = np.uint64(total) & LOW_32, np.uint64(total) >> HALF
    middle = high * total_low + ((low * total_low) >> HALF)
    other = low * total_high + (middle & LOW_32)
    return np.int64(high * total_high + (middle >> HALF) + (other >> HALF))
