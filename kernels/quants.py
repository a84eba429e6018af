"""Block formats of GGUF tensors: the type table, and a NumPy dequantiser used as reference.

A tensor of a type is a sequence of blocks along its inputs; a block holds scales and packed
integers. Field order and packing: ggml/src/ggml-common.h and ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]
Blocks = npt.NDArray[Any]  # (num_blocks,) of a structured dtype of `_LAYOUTS`

CHUNK_VALUES = 1 << 20  # values decoded at once: bounds the temporary arrays


@dataclass(frozen=True, slots=True)
class QuantType:
    """A tensor type: `block_nbytes` bytes hold `block_size` values."""

    type_id: int
    name: str
    block_size: int
    block_nbytes: int

    def row_nbytes(self, num_inputs: int) -> int:
        return num_inputs // self.block_size * self.block_nbytes


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A matrix in its file's bytes.

    data: (num_outputs, row_nbytes) uint8, contiguous
    """

    name: str
    type: QuantType
    num_outputs: int
    num_inputs: int
    data: npt.NDArray[np.uint8]


def _table(*types: QuantType) -> dict[int, QuantType]:
    return {quant_type.type_id: quant_type for quant_type in types}


QUANT_TYPES = _table(
    QuantType(0, "F32", 1, 4),
    QuantType(1, "F16", 1, 2),
    QuantType(2, "Q4_0", 32, 18),
    QuantType(3, "Q4_1", 32, 20),
    QuantType(6, "Q5_0", 32, 22),
    QuantType(7, "Q5_1", 32, 24),
    QuantType(8, "Q8_0", 32, 34),
    QuantType(10, "Q2_K", 256, 84),
    QuantType(11, "Q3_K", 256, 110),
    QuantType(12, "Q4_K", 256, 144),
    QuantType(13, "Q5_K", 256, 176),
    QuantType(14, "Q6_K", 256, 210),
    QuantType(30, "BF16", 1, 2),
)

# Types that files may hold and that can be listed, but that have no dequantiser here.
LISTED_TYPES = _table(
    QuantType(9, "Q8_1", 32, 40),
    QuantType(15, "Q8_K", 256, 292),
    QuantType(16, "IQ2_XXS", 256, 66),
    QuantType(17, "IQ2_XS", 256, 74),
    QuantType(18, "IQ3_XXS", 256, 98),
    QuantType(19, "IQ1_S", 256, 50),
    QuantType(20, "IQ4_NL", 32, 18),
    QuantType(21, "IQ3_S", 256, 110),
    QuantType(22, "IQ2_S", 256, 82),
    QuantType(23, "IQ4_XS", 256, 136),
    QuantType(24, "I8", 1, 1),
    QuantType(25, "I16", 1, 2),
    QuantType(26, "I32", 1, 4),
    QuantType(27, "I64", 1, 8),
    QuantType(28, "F64", 1, 8),
    QuantType(29, "IQ1_M", 256, 56),
    QuantType(34, "TQ1_0", 256, 54),
    QuantType(35, "TQ2_0", 256, 66),
    QuantType(39, "MXFP4", 32, 17),
)

_LAYOUTS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "Q4_0": np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    "Q4_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)]),
    "Q5_0": np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q5_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q8_0": np.dtype([("d", "<f2"), ("qs", "i1", 32)]),
    "Q2_K": np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")]),
    "Q3_K": np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")]),
    "Q4_K": np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)]),
    "Q5_K": np.dtype(
        [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]
    ),
    "Q6_K": np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")]),
}


def dequantize(data: Bytes, quant_type: QuantType) -> Float32:
    """Decode blocks to float32, with the operations and order of llama.cpp's reference.

    data: (..., row_nbytes) uint8, contiguous, row_nbytes a multiple of `block_nbytes`
    quant_type: one of `QUANT_TYPES`
    Returns (..., row_nbytes // block_nbytes * block_size) float32.
    """
    assert data.dtype == np.uint8, data.dtype
    *leading, row_nbytes = data.shape
    assert row_nbytes % quant_type.block_nbytes == 0, (data.shape, quant_type)
    decode = _DECODERS[quant_type.name]
    blocks = np.ascontiguousarray(data).reshape(-1).view(_LAYOUTS[quant_type.name])
    out = np.empty((len(blocks), quant_type.block_size), np.float32)
    step = CHUNK_VALUES // quant_type.block_size
    for begin in range(0, len(blocks), step):
        chunk = blocks[begin : begin + step]
        out[begin : begin + step] = decode(chunk).reshape(len(chunk), -1)
    row_len = row_nbytes // quant_type.block_nbytes * quant_type.block_size
    return out.reshape(*leading, row_len)


def dequantize_tensor(tensor: BlockTensor) -> Float32:
    """Decode a whole matrix; returns (num_outputs, num_inputs) float32."""
    return dequantize(tensor.data, tensor.type).reshape(tensor.num_outputs, tensor.num_inputs)


def _decode_f32(blocks: Blocks) -> Float32:
    return blocks


def _decode_f16(blocks: Blocks) -> Float32:
    return blocks.astype(np.float32)


def _decode_bf16(blocks: Blocks) -> Float32:
    return (blocks.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _decode_q4_0(blocks: Blocks) -> Float32:
    q = _nibbles(blocks["qs"], 16).astype(np.int8) - np.int8(8)
    return _f32(blocks["d"]) * _f32(q)


def _decode_q4_1(blocks: Blocks) -> Float32:
    return _f32(blocks["d"]) * _f32(_nibbles(blocks["qs"], 16)) + _f32(blocks["m"])


def _decode_q5_0(blocks: Blocks) -> Float32:
    q = _with_fifth_bit(blocks).astype(np.int8) - np.int8(16)
    return _f32(blocks["d"]) * _f32(q)


def _decode_q5_1(blocks: Blocks) -> Float32:
    return _f32(blocks["d"]) * _f32(_with_fifth_bit(blocks)) + _f32(blocks["m"])


def _decode_q8_0(blocks: Blocks) -> Float32:
    return _f32(blocks["d"]) * _f32(blocks["qs"])


def _decode_q2_k(blocks: Blocks) -> Float32:
    scales = blocks["scales"]
    scale = _f32(blocks["d"]) * _f32(scales & 0x0F)
    offset = _f32(blocks["dmin"]) * _f32(scales >> 4)
    q = _f32(_bit_planes(blocks["qs"], 2)).reshape(-1, 16, 16)
    return scale[:, :, None] * q - offset[:, :, None]


def _decode_q3_k(blocks: Blocks) -> Float32:
    scale = _f32(blocks["d"]) * _f32(_q3_k_scales(blocks["scales"]))
    low = _bit_planes(blocks["qs"], 2).reshape(-1, 256).astype(np.int8)
    high = _bit_planes(blocks["hmask"], 1).reshape(-1, 256).astype(np.int8)
    q = low + high * np.int8(4) - np.int8(4)  # a set mask bit means no offset
    return scale[:, :, None] * _f32(q).reshape(-1, 16, 16)


def _decode_q4_k(blocks: Blocks) -> Float32:
    q = _nibbles(blocks["qs"], 32).reshape(-1, 8, 32)
    return _scale_and_min(blocks, q)


def _decode_q5_k(blocks: Blocks) -> Float32:
    low = _nibbles(blocks["qs"], 32).reshape(-1, 8, 32)
    high = _bit_planes(blocks["qh"], 1).reshape(-1, 8, 32)
    return _scale_and_min(blocks, low | high << np.uint8(4))


def _decode_q6_k(blocks: Blocks) -> Float32:
    scale = _f32(blocks["d"]) * _f32(blocks["scales"])
    low = _nibbles(blocks["ql"], 64).reshape(-1, 256)
    high = _bit_planes(blocks["qh"], 2).reshape(-1, 256)
    q = (low | high << np.uint8(4)).astype(np.int8) - np.int8(32)
    return scale[:, :, None] * _f32(q).reshape(-1, 16, 16)


def _f32(values: npt.NDArray[Any]) -> Float32:
    """As float32; one value per block becomes a column."""
    column = values[:, None] if values.ndim == 1 else values
    return column.astype(np.float32)


def _nibbles(packed: Bytes, group: int) -> Bytes:
    """(n, k·group) bytes to (n, 2·k·group): of each group first the low halves, then the high."""
    grouped = packed.reshape(len(packed), -1, 1, group)
    halves = grouped >> np.array([0, 4], np.uint8)[:, None]
    return (halves & np.uint8(0x0F)).reshape(len(packed), -1)


def _bit_planes(packed: Bytes, bits: int) -> Bytes:
    """(n, k·32) bytes to (n, k, 8/bits, 32): plane p of each 32 bytes holds bits p·bits on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    planes = packed.reshape(len(packed), -1, 1, 32) >> shifts[:, None]
    return planes & np.uint8((1 << bits) - 1)


def _with_fifth_bit(blocks: Blocks) -> Bytes:
    """(n, 32) values 0 to 31 of Q5_0 and Q5_1."""
    high = np.unpackbits(np.ascontiguousarray(blocks["qh"]), axis=1, bitorder="little")
    return _nibbles(blocks["qs"], 16) | high << np.uint8(4)


def _q3_k_scales(packed: Bytes) -> npt.NDArray[np.int8]:
    """(n, 12) bytes to (n, 16) scales, -32 to 31: low 4 bits in bytes 0-7, high 2 in 8-11."""
    low = _nibbles(packed[:, :8], 8)
    high = packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    joined = low | (high & np.uint8(3)).reshape(-1, 16) << np.uint8(4)
    return joined.astype(np.int8) - np.int8(32)


def _scale_and_min(blocks: Blocks, q: Bytes) -> Float32:
    """d·scale·q - dmin·min of Q4_K and Q5_K; q: (n, 8, 32)."""
    scales, mins = _k_scales(blocks["scales"])
    scale = _f32(blocks["d"]) * _f32(scales)
    offset = _f32(blocks["dmin"]) * _f32(mins)
    return scale[:, :, None] * q.astype(np.float32) - offset[:, :, None]


def _k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """(n, 12) bytes to 8 scales and 8 minimums of 6 bits each.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minimums 0-3 in their low 6 bits; bytes 8-11 hold
    the low 4 bits of scales (low half) and minimums (high half) 4-7, whose high 2 bits sit on
    top of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = [first & 0x3F, third & 0x0F | first >> 2 & 0x30]
    mins = [second & 0x3F, third >> 4 | second >> 2 & 0x30]
    return np.concatenate(scales, axis=1), np.concatenate(mins, axis=1)


_DECODERS: dict[str, Callable[[Blocks], Float32]] = {
    "F32": _decode_f32,
    "F16": _decode_f16,
    "BF16": _decode_bf16,
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
    "Q5_0": _decode_q5_0,
    "Q5_1": _decode_q5_1,
    "Q8_0": _decode_q8_0,
    "Q2_K": _decode_q2_k,
    "Q3_K": _decode_q3_k,
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
}
