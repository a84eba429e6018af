"""Random weights of any tensor type, made as bytes: no float goes through a quantiser.

All bits of a value are random but those that set its size. The scale of a block is then chosen
so that the values have mean 0 and the root mean square asked for.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.quants import QUANT_TYPES, QuantType, dequantize

Bytes = npt.NDArray[np.uint8]

TYPES = {quant_type.name: quant_type for quant_type in QUANT_TYPES.values()}

# Floats keep their sign and mantissa bits; the exponent is the same for all, so that values are
# spread evenly over ±[1, 2) times a power of two. (bits, mantissa bits, exponent bias)
_FLOATS = {"F32": (32, 23, 127), "F16": (16, 10, 15), "BF16": (16, 7, 127)}
_FLOAT_RMS = (7 / 3) ** 0.5

# Where a block begins its scale, and its minimum with the mean of the integers that it is to
# cancel: (offset of d, offset of the minimum or None, minimum / scale), offsets in bytes.
_SCALES: dict[str, tuple[int, int | None, float]] = {
    "Q4_0": (0, None, 0.0),
    "Q4_1": (0, 2, -7.5),
    "Q5_0": (0, None, 0.0),
    "Q5_1": (0, 2, -15.5),
    "Q8_0": (0, None, 0.0),
    "Q2_K": (80, 82, 1.5),
    "Q3_K": (108, None, 0.0),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0.0),
}
_SAMPLE_BLOCKS = 4096


def random_weights(
    bits: np.random.BitGenerator, quant_type: QuantType, num_blocks: int, rms: float
) -> Bytes:
    """Blocks of random values.

    rms: root mean square wanted; floats come within a factor of √2 of it
    Returns (num_blocks · block_nbytes,) uint8.
    """
    data = random_bytes(bits, num_blocks * quant_type.block_nbytes)
    if quant_type.name in _FLOATS:
        _set_exponents(data, quant_type.name, rms)
    else:
        blocks = data.reshape(num_blocks, quant_type.block_nbytes)
        _set_scales(blocks, quant_type.name, rms / unit_rms(quant_type))
    return data


@cache
def unit_rms(quant_type: QuantType) -> float:
    """Root mean square of the values of random blocks whose scale is 1."""
    data = random_bytes(np.random.SFC64(0), _SAMPLE_BLOCKS * quant_type.block_nbytes)
    blocks = data.reshape(_SAMPLE_BLOCKS, quant_type.block_nbytes)
    _set_scales(blocks, quant_type.name, 1.0)
    return float(np.sqrt(np.mean(np.square(dequantize(blocks, quant_type), dtype=np.float64))))


def random_bytes(bits: np.random.BitGenerator, nbytes: int) -> Bytes:
    words = np.asarray(bits.random_raw(-(-nbytes // 8)), np.uint64)
    return words.view(np.uint8)[:nbytes]


def _set_exponents(data: Bytes, name: str, rms: float) -> None:
    width, mantissa_bits, bias = _FLOATS[name]
    dtype: np.dtype[Any] = np.dtype(f"<u{width // 8}")
    exponent = max(round(float(np.log2(rms / _FLOAT_RMS))) + bias, 1)
    values = data.view(dtype)
    values &= dtype.type(1 << (width - 1) | (1 << mantissa_bits) - 1)
    values |= dtype.type(exponent << mantissa_bits)


def _set_scales(blocks: Bytes, name: str, scale: float) -> None:
    """Write d, and the minimum that makes the mean 0; d alone takes turns at being negative."""
    at, minimum_at, ratio = _SCALES[name]
    scales = blocks[:, at : at + 2].view("<f2")
    scales[:] = scale
    if minimum_at is None:
        scales[1::2] = -scale  # integers of such types reach one further below 0 than above
    else:
        blocks[:, minimum_at : minimum_at + 2].view("<f2")[:] = scale * ratio
