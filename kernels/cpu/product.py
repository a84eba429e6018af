"""Matrix products whose bits depend on one token and one output alone.

    out = start + b0 + b1 + ...        b_i: one chain of fused multiply-adds from zero over inputs
                                       [256 i, 256 i + 256)

added from left to right; start is zero, the bias, the value in out (accumulate), or out + bias.
A weight is cut into panels of 32 outputs. Expanded panels are float32 (K, 32); quantised ones are
decoded into such a tile, 128 or 256 inputs at a time, and go through the same chains.

Work is split by tokens (each worker reads all weights, no barrier), or by units: one panel times
`UNIT_TOKENS` tokens, in panel order, a range for each worker, with a barrier before and after.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kernels.cpu.barrier import leave_in_turn, wait_for_all
from kernels.cpu.dequant import dequantize_tile
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
from kernels.cpu.vector import MAX_ROWS, PANEL, panel_add, panel_continue

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

# For few tokens quantised weights are decoded in strips, whose tiles stay in a first-level cache.
FEW_TOKENS = 16
STRIP = 128  # inputs

# Per-worker scratch in floats: a decoded tile, the block sums of few tokens or a narrow panel.
_TILE_AT, _SUMS_AT = 0, PANEL * K_STEP
SCRATCH_LEN = _SUMS_AT + PANEL * max(FEW_TOKENS, MAX_ROWS)


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
def _nbytes(part: Any, num_inputs: int) -> Any:
    return num_inputs // part[BLOCK_SIZE] * part[BLOCK_NBYTES]


@inlined
def _decode(
    part: Any, row: int, rows: int, k: int, length: int, num_inputs: int, tile: Any
) -> None:
    """Inputs [k, k + length) of `rows` rows to a tile; asks for those 256 inputs later."""
    row_nbytes = part[ROW_NBYTES]
    block = k // K_STEP * K_STEP
    source = bytes_at(part[ADDRESS] + row * row_nbytes + _nbytes(part, block))
    ahead = _nbytes(part, K_STEP)
    if block + K_STEP >= num_inputs:  # next are the first inputs of the next panel
        ahead = PANEL * row_nbytes - _nbytes(part, block)
    begin = k - block
    dequantize_tile(part[TYPE_ID], source, row_nbytes, rows, begin, begin + length, tile, ahead)


@inlined
def _add_sums(sums: Any, out: Any, rows: int, num_outputs: int, columns: int) -> None:
    """Add `columns` columns of `rows` rows of block sums to out."""
    for row in range(rows):
        line, added = advance(out, row * num_outputs), advance(sums, row * PANEL)
        for j in range(columns):
            put(line, j, get(line, j) + get(added, j))


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
    num_inputs, num_outputs, rows = x.shape[1], out.shape[1], end - begin
    columns = min(PANEL, part[NUM_OUTPUTS] - panel * PANEL)
    column = part[FIRST_OUTPUT] + panel * PANEL
    first_x = pointer(x, begin * num_inputs)
    target = pointer(out, begin * num_outputs + column)
    tile, sums = pointer(scratch, _TILE_AT), pointer(scratch, _SUMS_AT)
    expanded = part[TYPE_ID] == EXPANDED
    few = not expanded and rows <= FEW_TOKENS
    strip = STRIP if few else K_STEP
    _start(target, num_outputs, rows, columns, bias[column:], accumulate)
    for k in range(0, num_inputs, strip):
        length = min(strip, num_inputs - k)
        if expanded:
            tile = floats_at(part[ADDRESS] + 4 * (panel * num_inputs + k) * PANEL)
        else:
            _decode(part, panel * PANEL, columns, k, length, num_inputs, tile)
        begins, ends = k % K_STEP == 0, k % K_STEP + strip == K_STEP or k + strip >= num_inputs
        ahead = advance(bytes_of(tile), _AHEAD_NBYTES if expanded else 0)
        for row in range(0, rows, MAX_ROWS):
            count = min(MAX_ROWS, rows - row)
            x_row, y = advance(first_x, row * num_inputs + k), advance(target, row * num_outputs)
            if columns == PANEL and not few:
                panel_add(
                    count, x_row, tile, y, length, num_inputs, PANEL, num_outputs, ahead, PANEL * 4
                )
                continue
            # the sums of few tokens wait for the next strip of their block
            y_sums = advance(sums, row * PANEL if few else 0)
            if begins:
                for i in range(count * PANEL):
                    put(y_sums, i, np.float32(0.0))
            panel_continue(
                count, x_row, tile, y_sums, length, num_inputs, PANEL, PANEL, ahead, PANEL * 4
            )
            if ends:
                _add_sums(y_sums, y, count, num_outputs, columns)


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
    while first < last or (first == last and begin < end):
        stop, until = first + 1, num_tokens
        if first == last:
            until = end * UNIT_TOKENS
        elif begin == 0:
            stop = last
        _rectangle(
            parts, x, out, bias, accumulate, first, stop, begin * UNIT_TOKENS, until, scratch
        )
        first, begin = stop, 0


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


@kernel(types.void(I64, I64, I64_MATRIX, F32_PANELS))
def expand(worker: int, num_workers: int, parts: Any, panels: Any) -> None:
    """Decode this worker's share of quantised parts into panels (num_panels, K, 32)."""
    total, num_inputs = panels.shape[0], panels.shape[1]
    for index in range(total * worker // num_workers, total * (worker + 1) // num_workers):
        number = 0
        while number + 1 < len(parts) and parts[number + 1, FIRST_PANEL] <= index:
            number += 1
        part = parts[number]
        row = (index - part[FIRST_PANEL]) * PANEL
        rows = min(PANEL, part[NUM_OUTPUTS] - row)
        for k in range(0, num_inputs, K_STEP):
            tile = pointer(panels, (index * num_inputs + k) * PANEL)
            length = min(K_STEP, num_inputs - k)
            _decode(part, row, rows, k, length, num_inputs, tile)


@kernel(types.void(I64, I64, I64_MATRIX, I32_VECTOR, F32_MATRIX, F32_VECTOR))
def gather_rows(begin: int, end: int, parts: Any, ids: Any, out: Any, scratch: Any) -> None:
    """out[t] = row ids[t] of a packed weight as float32, for tokens [begin, end)."""
    num_inputs = out.shape[1]
    for t in range(begin, end):
        row = np.int64(ids[t])
        number = 0
        while number + 1 < len(parts) and parts[number + 1, FIRST_OUTPUT] <= row:
            number += 1
        part = parts[number]
        row -= part[FIRST_OUTPUT]
        panel, column = divmod(row, PANEL)
        for k in range(0, num_inputs, K_STEP):
            length = min(K_STEP, num_inputs - k)
            if part[TYPE_ID] == EXPANDED:
                tile = floats_at(part[ADDRESS] + 4 * ((panel * num_inputs + k) * PANEL + column))
            else:
                tile = pointer(scratch, _TILE_AT)
                _decode(part, row, 1, k, length, num_inputs, tile)
            for i in range(length):
                out[t, k + i] = get(tile, i * PANEL)
