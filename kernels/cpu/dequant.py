"""Tiles of decoded weights, of the 13 tensor types; bit-equal to `kernels.quants`."""

from __future__ import annotations

from typing import Any

from kernels.cpu import columns
from kernels.cpu.jit import inlined
from kernels.cpu.memory import advance, bfloat_at, float_at, half_at, put
from kernels.cpu.rows import ROWS
from kernels.cpu.vector import PANEL

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
