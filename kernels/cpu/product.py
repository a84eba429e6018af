"""Matrix products whose bits depend on one token and one output alone.

    out = start + b0 + b1 + ...        b_i: one chain of fused multiply-adds from zero over inputs
                                       [256 i, 256 i + 256)

added from left to right; start is zero, the bias, the value in out (accumulate), or out + bias.
A weight is cut into panels of 32 outputs. Expanded panels are float32 (K, 32); quantised ones are
decoded into such a tile, 256 inputs at a time, and go through the same chains.

Work is split by tokens (each worker reads all weights, no barrier), or by units: one panel times
`UNIT_TOKENS` tokens, in panel order, a range for each worker, with a barrier before and after.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kernels.cpu.barrier import leave_in_turn, wait_for_all
from kernels.cpu.dequant import dequantize_span, dequantize_tile
from kernels.cpu.jit import (
    F32_INPUT_MATRIX,
    F32_INPUT_VECTOR,
    F32_MATRIX,
    F32_PANELS,
    F32_VECTOR,
    I32_VECTOR,
    I64,
    I64_MATRIX,
    I64_VECTOR,
    inlined,
    kernel,
)
from kernels.cpu.memory import advance, bytes_at, bytes_of, floats_at, get, pointer, put
from kernels.cpu.vector import MAX_ROWS, PANEL, panel_add, panel_store

K_STEP = 256
UNIT_TOKENS = 8
# How far ahead of its use a weight is asked for: the hardware's own streams end at 4 KiB pages.
# Measured with 4 to 16 tokens: 30 to 45 % faster.
_AHEAD_NBYTES = 8192
BLOCK_TOKENS = 128  # tokens that go through an expanded panel before the next panel

# Fields of a part: one tensor of a packed weight.
ADDRESS, ROW_NBYTES, TYPE_ID, BLOCK_SIZE, BLOCK_NBYTES, NUM_OUTPUTS, FIRST_OUTPUT, FIRST_PANEL = (
    range(8)
)
PART_FIELDS = 8
EXPANDED = -1  # TYPE_ID of float32 panels

# Per-worker scratch in floats: a decoded tile, the block sums of a narrow panel.
_TILE_AT, _NARROW_AT = 0, PANEL * K_STEP
SCRATCH_LEN = _NARROW_AT + PANEL * MAX_ROWS


@inlined
def _start(out: Any, stride: int, rows: int, columns: int, bias: Any, accumulate: bool) -> None:
    """Bring `columns` columns of `rows` rows at out to the sum's start; bias may be empty."""
    for row in range(rows):
        line = advance(out, row * stride)
        if not accumulate:
            for j in range(columns):
                put(line, j, np.float32(0.0))
        if len(bias) > 0:
            for j in range(columns):
                put(line, j, get(line, j) + bias[j])


@inlined
def _add_block(
    x: Any,
    tile: Any,
    out: Any,
    rows: int,
    length: int,
    num_inputs: int,
    num_outputs: int,
    columns: int,
    narrow: Any,
) -> None:
    """Add one block's sums to out: `rows` tokens, `columns` outputs of a panel."""
    ahead = advance(bytes_of(tile), _AHEAD_NBYTES)
    for row in range(0, rows, MAX_ROWS):
        count = min(MAX_ROWS, rows - row)
        x_row = advance(x, row * num_inputs)
        target = advance(out, row * num_outputs)
        if columns == PANEL:
            panel_add(
                count,
                x_row,
                tile,
                target,
                length,
                num_inputs,
                PANEL,
                num_outputs,
                ahead,
                PANEL * 4,
            )
            continue
        panel_store(count, x_row, tile, narrow, length, num_inputs, PANEL, PANEL, ahead, PANEL * 4)
        for i in range(count):
            for j in range(columns):
                at = i * num_outputs + j
                put(target, at, get(target, at) + get(narrow, i * PANEL + j))


@inlined
def _tile(part: Any, panel: int, k: int, length: int, num_inputs: int, scratch: Any) -> Any:
    """Inputs [k, k + length) of a panel as float32 (length, 32)."""
    if part[TYPE_ID] == EXPANDED:
        return floats_at(part[ADDRESS] + 4 * (panel * num_inputs + k) * PANEL)
    tile = pointer(scratch, _TILE_AT)
    _decode(part, panel, k, length, num_inputs, tile)
    return tile


@inlined
def _decode(part: Any, panel: int, k: int, length: int, num_inputs: int, tile: Any) -> None:
    row, row_nbytes = panel * PANEL, part[ROW_NBYTES]
    at = row * row_nbytes + k // part[BLOCK_SIZE] * part[BLOCK_NBYTES]
    rows = min(PANEL, part[NUM_OUTPUTS] - row)
    ahead = K_STEP // part[BLOCK_SIZE] * part[BLOCK_NBYTES]
    if k + K_STEP >= num_inputs:  # next are the first inputs of the next panel
        ahead = PANEL * row_nbytes - k // part[BLOCK_SIZE] * part[BLOCK_NBYTES]
    source = bytes_at(part[ADDRESS] + at)
    dequantize_tile(part[TYPE_ID], source, row_nbytes, rows, length, tile, ahead)


@inlined
def _panel(
    part: Any,
    panel: int,
    x: Any,
    out: Any,
    bias: Any,
    accumulate: bool,
    begin: int,
    end: int,
    scratch: Any,
) -> None:
    """All inputs of one panel for tokens [begin, end)."""
    num_inputs, num_outputs = x.shape[1], out.shape[1]
    columns = min(PANEL, part[NUM_OUTPUTS] - panel * PANEL)
    column = part[FIRST_OUTPUT] + panel * PANEL
    target = pointer(out, begin * num_outputs + column)
    _start(target, num_outputs, end - begin, columns, bias[column:], accumulate)
    for k in range(0, num_inputs, K_STEP):
        length = min(K_STEP, num_inputs - k)
        tile = _tile(part, panel, k, length, num_inputs, scratch)
        _add_block(
            pointer(x, begin * num_inputs + k),
            tile,
            target,
            end - begin,
            length,
            num_inputs,
            num_outputs,
            columns,
            pointer(scratch, _NARROW_AT),
        )


@inlined
def _rectangle(
    parts: Any,
    x: Any,
    out: Any,
    bias: Any,
    accumulate: bool,
    first: int,
    last: int,
    begin: int,
    end: int,
    scratch: Any,
) -> None:
    """Panels [first, last) for tokens [begin, end)."""
    for number in range(len(parts)):
        part = parts[number]
        low = max(first - part[FIRST_PANEL], 0)
        high = min(last - part[FIRST_PANEL], (part[NUM_OUTPUTS] + PANEL - 1) // PANEL)
        # a tile is decoded once for all tokens; an expanded one is read again for each block
        step = BLOCK_TOKENS if part[TYPE_ID] == EXPANDED else max(end - begin, 1)
        for block in range(begin, end, step):
            for panel in range(low, high):
                _panel(
                    part, panel, x, out, bias, accumulate, block, min(block + step, end), scratch
                )


@inlined
def _units(
    parts: Any,
    x: Any,
    out: Any,
    bias: Any,
    accumulate: bool,
    worker: int,
    num_workers: int,
    scratch: Any,
) -> None:
    """This worker's range of units, cut into whole panels and what is left at both ends."""
    num_tokens = len(x)
    per_panel = (num_tokens + UNIT_TOKENS - 1) // UNIT_TOKENS
    units = num_panels(parts) * per_panel
    first, begin = divmod(units * worker // num_workers, per_panel)
    last, end = divmod(units * (worker + 1) // num_workers, per_panel)
    begin, end = begin * UNIT_TOKENS, end * UNIT_TOKENS
    if first == last:
        _rectangle(parts, x, out, bias, accumulate, first, first + 1, begin, end, scratch)
        return
    if begin > 0:
        _rectangle(parts, x, out, bias, accumulate, first, first + 1, begin, num_tokens, scratch)
        first += 1
    _rectangle(parts, x, out, bias, accumulate, first, last, 0, num_tokens, scratch)
    if end > 0:
        _rectangle(parts, x, out, bias, accumulate, last, last + 1, 0, end, scratch)


@inlined
def num_panels(parts: Any) -> Any:
    part = parts[len(parts) - 1]
    return part[FIRST_PANEL] + (part[NUM_OUTPUTS] + PANEL - 1) // PANEL


@kernel(
    types.boolean(
        I64_VECTOR,
        I64,
        I64,
        types.boolean,
        I64_MATRIX,
        F32_INPUT_MATRIX,
        F32_MATRIX,
        F32_INPUT_VECTOR,
        types.boolean,
        F32_VECTOR,
    )
)
def product(
    barrier: Any,
    worker: int,
    num_workers: int,
    by_tokens: bool,
    parts: Any,
    x: Any,
    out: Any,
    bias: Any,
    accumulate: bool,
    scratch: Any,
) -> Any:
    """This worker's share of out = start + x · weightᵀ; False when the barrier is broken.

    parts: (num_parts, PART_FIELDS); x: (num_tokens, K); out: (num_tokens, N)
    bias: (N,) or empty; scratch: (SCRATCH_LEN,), the worker's own
    """
    num_tokens = len(x)
    if by_tokens:
        begin = num_tokens * worker // num_workers
        end = num_tokens * (worker + 1) // num_workers
        panels = num_panels(parts)
        _rectangle(parts, x, out, bias, accumulate, 0, panels, begin, end, scratch)
        return True
    if not wait_for_all(barrier, num_workers):
        return False
    if num_tokens > 0:
        _units(parts, x, out, bias, accumulate, worker, num_workers, scratch)
    return leave_in_turn(barrier, worker, num_workers)


@kernel(types.void(I64, I64, I64_MATRIX, F32_PANELS, F32_VECTOR))
def expand(worker: int, num_workers: int, parts: Any, panels: Any, scratch: Any) -> None:
    """Decode this worker's share of quantised parts into panels (num_panels, K, 32)."""
    total, num_inputs = panels.shape[0], panels.shape[1]
    for index in range(total * worker // num_workers, total * (worker + 1) // num_workers):
        number = 0
        while number + 1 < len(parts) and parts[number + 1, FIRST_PANEL] <= index:
            number += 1
        part = parts[number]
        for k in range(0, num_inputs, K_STEP):
            tile = pointer(panels, (index * num_inputs + k) * PANEL)
            length = min(K_STEP, num_inputs - k)
            _decode(part, index - part[FIRST_PANEL], k, length, num_inputs, tile)


@kernel(types.void(I64, I64, I64_MATRIX, I32_VECTOR, F32_MATRIX))
def gather_rows(begin: int, end: int, parts: Any, ids: Any, out: Any) -> None:
    """out[t] = row ids[t] of a packed weight as float32, for tokens [begin, end)."""
    num_inputs = out.shape[1]
    for t in range(begin, end):
        row = np.int64(ids[t])
        number = 0
        while number + 1 < len(parts) and parts[number + 1, FIRST_OUTPUT] <= row:
            number += 1
        part = parts[number]
        row -= part[FIRST_OUTPUT]
        if part[TYPE_ID] == EXPANDED:
            panel, column = divmod(row, PANEL)
            source = floats_at(part[ADDRESS] + 4 * panel * num_inputs * PANEL)
            for k in range(num_inputs):
                out[t, k] = get(source, k * PANEL + column)
        else:
            source_row = bytes_at(part[ADDRESS] + row * part[ROW_NBYTES])
            dequantize_span(part[TYPE_ID], source_row, pointer(out, t * num_inputs), num_inputs)
