"""Tile dequantisers of the 13 tensor types, bit-equal to `kernels.quants`.

Each reads whole blocks of one row: source points at the first block, `count` values go to out.
Packing of the blocks: ggml-quants.c of llama.cpp. Products and sums stay apart (no fused
operations), in the reference's order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu import columns
from kernels.cpu.jit import inlined
from kernels.cpu.memory import (
    advance,
    bfloat_at,
    byte_at,
    float_at,
    half_at,
    put,
    signed_byte_at,
    word_at,
)
from kernels.cpu.rows import ROWS
from kernels.cpu.vector import PANEL


@inlined
def _f32(source: Any, out: Any, count: int) -> None:
    for i in range(count):
        put(out, i, float_at(source, 4 * i))


@inlined
def _f16(source: Any, out: Any, count: int) -> None:
    for i in range(count):
        put(out, i, half_at(source, 2 * i))


@inlined
def _bf16(source: Any, out: Any, count: int) -> None:
    for i in range(count):
        put(out, i, bfloat_at(source, 2 * i))


@inlined
def _q4_0(source: Any, out: Any, count: int) -> None:
    for block in range(count // 32):
        p = advance(source, block * 18)
        o = advance(out, block * 32)
        d = half_at(p, 0)
        for j in range(16):
            put(o, j, d * np.float32(np.int32((byte_at(p, 2 + j) & 15) - 8)))
        for j in range(16):
            put(o, 16 + j, d * np.float32(np.int32((byte_at(p, 2 + j) >> 4) - 8)))


@inlined
def _q4_1(source: Any, out: Any, count: int) -> None:
    for block in range(count // 32):
        p = advance(source, block * 20)
        o = advance(out, block * 32)
        d = half_at(p, 0)
        m = half_at(p, 2)
        for j in range(16):
            put(o, j, d * np.float32(np.int32(byte_at(p, 4 + j) & 15)) + m)
        for j in range(16):
            put(o, 16 + j, d * np.float32(np.int32(byte_at(p, 4 + j) >> 4)) + m)


@inlined
def _high_bit(word: Any, j: int) -> Any:
    return np.int32((word >> np.uint32(j)) & np.uint32(1)) << np.int32(4)


@inlined
def _q5_0(source: Any, out: Any, count: int) -> None:
    for block in range(count // 32):
        p = advance(source, block * 22)
        o = advance(out, block * 32)
        d = half_at(p, 0)
        high = word_at(p, 2)
        for j in range(16):
            q = (byte_at(p, 6 + j) & 15) | _high_bit(high, j)
            put(o, j, d * np.float32(np.int32(q - 16)))
        for j in range(16):
            q = (byte_at(p, 6 + j) >> 4) | _high_bit(high, j + 16)
            put(o, 16 + j, d * np.float32(np.int32(q - 16)))


@inlined
def _q5_1(source: Any, out: Any, count: int) -> None:
    for block in range(count // 32):
        p = advance(source, block * 24)
        o = advance(out, block * 32)
        d = half_at(p, 0)
        m = half_at(p, 2)
        high = word_at(p, 4)
        for j in range(16):
            q = (byte_at(p, 8 + j) & 15) | _high_bit(high, j)
            put(o, j, d * np.float32(np.int32(q)) + m)
        for j in range(16):
            q = (byte_at(p, 8 + j) >> 4) | _high_bit(high, j + 16)
            put(o, 16 + j, d * np.float32(np.int32(q)) + m)


@inlined
def _q8_0(source: Any, out: Any, count: int) -> None:
    for block in range(count // 32):
        p = advance(source, block * 34)
        o = advance(out, block * 32)
        d = half_at(p, 0)
        for j in range(32):
            put(o, j, d * np.float32(signed_byte_at(p, 2 + j)))


@inlined
def _q2_k(source: Any, out: Any, count: int) -> None:
    for block in range(count // 256):
        p = advance(source, block * 84)
        o = advance(out, block * 256)
        d = half_at(p, 80)
        dmin = half_at(p, 82)
        for group in range(16):
            scales = byte_at(p, group)
            scale = d * np.float32(np.int32(scales & 15))
            least = dmin * np.float32(np.int32(scales >> 4))
            # 128 values share 32 bytes, two bits each; a group is half of those bytes
            at = 16 + (group >> 3) * 32 + (group & 1) * 16
            shift = ((group >> 1) & 3) * 2
            for j in range(16):
                q = (byte_at(p, at + j) >> shift) & 3
                put(o, group * 16 + j, scale * np.float32(np.int32(q)) - least)


@inlined
def _q3_k(source: Any, out: Any, count: int) -> None:
    for block in range(count // 256):
        p = advance(source, block * 110)
        o = advance(out, block * 256)
        d = half_at(p, 108)
        for group in range(16):
            low = (byte_at(p, 96 + (group & 7)) >> ((group >> 3) * 4)) & 15
            high = (byte_at(p, 104 + (group & 3)) >> ((group >> 2) * 2)) & 3
            scale = d * np.float32(np.int32((low | (high << 4)) - 32))
            at = 32 + (group >> 3) * 32 + (group & 1) * 16
            shift = ((group >> 1) & 3) * 2
            for j in range(16):
                q = (byte_at(p, at + j) >> shift) & 3
                # the mask's bit is clear where 4 is to be taken off
                clear = ((byte_at(p, (group & 1) * 16 + j) >> (group >> 1)) & 1) ^ 1
                put(o, group * 16 + j, scale * np.float32(np.int32(q - (clear << 2))))


@inlined
def _k_scale(p: Any, group: int) -> Any:
    """The 6-bit scale of a group of 32, of the 12 bytes at offset 4 of a Q4_K or Q5_K block."""
    if group < 4:
        return byte_at(p, 4 + group) & 63
    return (byte_at(p, 8 + group) & 15) | ((byte_at(p, group) >> 2) & 48)


@inlined
def _k_least(p: Any, group: int) -> Any:
    if group < 4:
        return byte_at(p, 8 + group) & 63
    return (byte_at(p, 8 + group) >> 4) | ((byte_at(p, 4 + group) >> 2) & 48)


@inlined
def _q4_k(source: Any, out: Any, count: int) -> None:
    for block in range(count // 256):
        p = advance(source, block * 144)
        o = advance(out, block * 256)
        d = half_at(p, 0)
        dmin = half_at(p, 2)
        for group in range(8):
            scale = d * np.float32(np.int32(_k_scale(p, group)))
            least = dmin * np.float32(np.int32(_k_least(p, group)))
            at = 16 + (group >> 1) * 32
            shift = (group & 1) * 4
            for j in range(32):
                q = (byte_at(p, at + j) >> shift) & 15
                put(o, group * 32 + j, scale * np.float32(np.int32(q)) - least)


@inlined
def _q5_k(source: Any, out: Any, count: int) -> None:
    for block in range(count // 256):
        p = advance(source, block * 176)
        o = advance(out, block * 256)
        d = half_at(p, 0)
        dmin = half_at(p, 2)
        for group in range(8):
            scale = d * np.float32(np.int32(_k_scale(p, group)))
            least = dmin * np.float32(np.int32(_k_least(p, group)))
            at = 48 + (group >> 1) * 32
            shift = (group & 1) * 4
            for j in range(32):
                high = (byte_at(p, 16 + j) >> group) & 1
                q = ((byte_at(p, at + j) >> shift) & 15) | (high << 4)
                put(o, group * 32 + j, scale * np.float32(np.int32(q)) - least)


@inlined
def _q6_k(source: Any, out: Any, count: int) -> None:
    for block in range(count // 256):
        p = advance(source, block * 210)
        o = advance(out, block * 256)
        d = half_at(p, 208)
        for group in range(16):
            scale = d * np.float32(signed_byte_at(p, 192 + group))
            half, inside = group >> 3, (group & 7) * 16
            low_at, low_shift = half * 64 + (inside & 63), (inside >> 6) * 4
            high_at, high_shift = 128 + half * 32 + (inside & 31), (inside >> 5) * 2
            for j in range(16):
                low = (byte_at(p, low_at + j) >> low_shift) & 15
                high = (byte_at(p, high_at + j) >> high_shift) & 3
                put(o, group * 16 + j, scale * np.float32(np.int32((low | (high << 4)) - 32)))


@inlined
def dequantize_span(type_id: int, source: Any, out: Any, count: int) -> None:
    """Decode `count` values (whole blocks) of GGUF type `type_id` from source to out."""
    if type_id == 0:
        _f32(source, out, count)
    elif type_id == 1:
        _f16(source, out, count)
    elif type_id == 2:
        _q4_0(source, out, count)
    elif type_id == 3:
        _q4_1(source, out, count)
    elif type_id == 6:
        _q5_0(source, out, count)
    elif type_id == 7:
        _q5_1(source, out, count)
    elif type_id == 8:
        _q8_0(source, out, count)
    elif type_id == 10:
        _q2_k(source, out, count)
    elif type_id == 11:
        _q3_k(source, out, count)
    elif type_id == 12:
        _q4_k(source, out, count)
    elif type_id == 13:
        _q5_k(source, out, count)
    elif type_id == 14:
        _q6_k(source, out, count)
    elif type_id == 30:
        _bf16(source, out, count)


TYPE_IDS = frozenset({0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 30})


@inlined
def _parts_to_columns(
    type_id: int,
    source: Any,
    row_nbytes: int,
    last_row: int,
    begin: int,
    end: int,
    tile: Any,
    ahead: int,
) -> None:
    """The whole parts, of those of `columns`, in values [begin, end) of 8 rows."""
    if type_id == 0:
        columns.f32_columns(source, row_nbytes, last_row, begin, end, tile, ahead)
    elif type_id == 1:
        columns.f16_columns(source, row_nbytes, last_row, begin, end, tile, ahead)
    elif type_id == 2:
        columns.q4_0_columns(source, row_nbytes, last_row, begin, end, tile, ahead)
    elif type_id == 3:
        columns.q4_1_columns(source, row_nbytes, last_row, begin, end, tile, ahead)
    elif type_id == 6:
        columns.q5_0_columns(source, row_nbytes, last_row, begin, end, tile, ahead)
    elif type_id == 7:
        columns.q5_1_columns(source, row_nbytes, last_row, begin, end, tile, ahead)
    elif type_id == 8:
        columns.q8_0_columns(source, row_nbytes, last_row, begin, end, tile, ahead)
    elif type_id == 10:
        columns.q2_k_columns(source, row_nbytes, last_row, begin, end, tile, ahead)
    elif type_id == 11:
        columns.q3_k_columns(source, row_nbytes, last_row, begin, end, tile, ahead)
    elif type_id == 12:
        columns.q4_k_columns(source, row_nbytes, last_row, begin, end, tile, ahead)
    elif type_id == 13:
        columns.q5_k_columns(source, row_nbytes, last_row, begin, end, tile, ahead)
    elif type_id == 14:
        columns.q6_k_columns(source, row_nbytes, last_row, begin, end, tile, ahead)
    elif type_id == 30:
        columns.bf16_columns(source, row_nbytes, last_row, begin, end, tile, ahead)


@inlined
def _rest_to_columns(
    type_id: int, source: Any, row_nbytes: int, num_rows: int, begin: int, end: int, tile: Any
) -> None:
    """What `_parts_to_columns` leaves of F32, F16 and BF16, whose rows may have any length."""
    for row in range(num_rows):
        p = advance(source, row * row_nbytes)
        if type_id == 0:
            for k in range(end // 4 * 4, end):
                put(tile, (k - begin) * PANEL + row, float_at(p, 4 * k))
        elif type_id == 1:
            for k in range(end // 16 * 16, end):
                put(tile, (k - begin) * PANEL + row, half_at(p, 2 * k))
        elif type_id == 30:
            for k in range(end // 8 * 8, end):
                put(tile, (k - begin) * PANEL + row, bfloat_at(p, 2 * k))


@inlined
def dequantize_tile(
    type_id: int,
    source: Any,
    row_nbytes: int,
    rows: int,
    begin: int,
    end: int,
    tile: Any,
    ahead: int,
) -> None:
    """tile[k - begin, row] = value k of a row, for k in [begin, end) of `rows` <= 32 rows.

    source: first block of the first row; rows are `row_nbytes` apart
    begin: a multiple of 128, and with end inside the first block of a K type
    tile: (end - begin) x 32 floats; columns from `rows` on may hold anything afterwards
    ahead: how many bytes after those that are read others are asked for
    """
    for row in range(0, rows, ROWS):
        num_rows = min(ROWS, rows - row)
        p, target = advance(source, row * row_nbytes), advance(tile, row)
        _parts_to_columns(type_id, p, row_nbytes, num_rows - 1, begin, end, target, ahead)
        _rest_to_columns(type_id, p, row_nbytes, num_rows, begin, end, target)
