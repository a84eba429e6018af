"""Choosing next tokens on the CPU: one call per worker over its rows, each row by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from kernels.choices import (
    ALL_MASKED,
    NOT_FINITE,
    OK,
    ONE_WEIGHT,
    ROW,
    Choices,
    Edits,
    Rows,
    new_choices,
    no_edits,
)
from kernels.cpu.jit import F32_MATRIX, I64, inlined, kernel
from kernels.cpu.philox import HALF, LOW_32, philox4x32, scale_down
from kernels.cpu.selection import (
    BLOCK,
    HIGHEST,
    LOWEST,
    block_maxima,
    cut_of_mass,
    first_at_least,
    keep_top,
    position_at,
    trim,
    weigh,
)
from kernels.ops import Float32


class Scratch(NamedTuple):
    """Working memory of one worker, for rows of up to so many tokens."""

    row: npt.NDArray[np.float32]
    row_bits: npt.NDArray[np.int32]  # the same memory
    values: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.int64]
    band: npt.NDArray[np.int64]
    block_max: npt.NDArray[np.float32]


def new_scratch(num_tokens: int) -> Scratch:
    """Working memory for `choose_rows` over `num_tokens` tokens."""
    num_blocks = -(-num_tokens // BLOCK)
    row = np.empty(num_tokens, np.float32)
    return Scratch(
        row=row,
        row_bits=row.view(np.int32),
        values=np.empty(num_tokens, np.float32),
        ids=np.empty(num_tokens, np.int32),
        weights=np.empty(num_tokens, np.int64),
        band=np.empty(num_tokens, np.int64),
        block_max=np.empty(num_blocks, np.float32),
    )


# ---- rows ----------------------------------------------------------------------------------


@inlined
def _edit(row: Any, spec: Any, edits: Any, out: Any) -> None:
    """out = row with penalties, then biases and masks; float64, rounded to float32 after each."""
    for i in range(row.shape[0]):
        out[i] = row[i]
    for i in range(spec.seen_begin, spec.seen_end):
        token, times = edits.seen_ids[i], edits.seen_counts[i]
        value = np.float64(out[token])
        value = value / spec.repetition if value > 0 else value * spec.repetition
        value -= spec.frequency * times + (spec.presence if times > 0 else 0.0)
        out[token] = np.float32(min(max(value, LOWEST), HIGHEST))
    for i in range(spec.edit_begin, spec.edit_end):
        token = edits.ids[i]
        value = np.float64(out[token]) + edits.values[i]
        out[token] = np.float32(min(max(value, LOWEST), HIGHEST))


@inlined
def _uniform_below(total: Any, row: Any) -> Any:
    """The row's own random integer in [0, total)."""
    index = np.uint64(row.row_index)
    low, high, _, _ = philox4x32(
        index & LOW_32,
        np.uint64(row.sample_index) & LOW_32,
        np.uint64(row.position) & LOW_32,
        ((index >> HALF) << np.uint64(8)) & LOW_32 | np.uint64(row.purpose),
        row.seed & LOW_32,
        row.seed >> HALF,
    )
    return scale_down(low, high, total)


@inlined
def _draw(row: Any, high: Any, spec: Any, scratch: Any) -> Any:
    """One token by inverse CDF, in order of id, over what top_k, top_p and min_p keep."""
    values, count, weights = row, row.shape[0], scratch.weights
    gathered = 0 < spec.top_k < count
    if gathered:
        values, count = scratch.values, spec.top_k
        keep_top(row, scratch.block_max, count, high, values, scratch.ids)
    scale = min(1.0 / spec.temperature, 1e300)
    total = weigh(values, count, np.float64(high), scale, weights)
    floor, last = 0, count
    if spec.top_p < 1.0:
        target = min(max(math.ceil(spec.top_p * total), 1), total)
        floor, last = cut_of_mass(weights, count, target, scratch.band)
    least = math.ceil(spec.min_p * ONE_WEIGHT)
    if least > floor:
        floor, last = least, count
    if floor > 0:
        total = trim(weights, count, floor, last)
    position = position_at(weights, count, _uniform_below(total, spec))
    return scratch.ids[position] if gathered else position


@inlined
def _log_normaliser(row: Any, high: Any, scratch: Any) -> Any:
    total = weigh(row, row.shape[0], np.float64(high), 1.0, scratch.weights)
    return np.float64(high) + math.log(total / ONE_WEIGHT)


@inlined
def _top_logprobs(
    row: Any, high: Any, norm: Any, k: Any, scratch: Any, ids: Any, logprobs: Any
) -> None:
    """The k most likely tokens, most likely first, equal ones lowest id first."""
    count = min(k, row.shape[0])
    keep_top(row, scratch.block_max, count, high, scratch.values, scratch.ids)
    for i in range(count):
        logprob, j = np.float64(scratch.values[i]) - norm, i
        while j > 0 and logprobs[j - 1] < logprob:
            logprobs[j], ids[j] = logprobs[j - 1], ids[j - 1]
            j -= 1
        logprobs[j], ids[j] = logprob, scratch.ids[i]


@inlined
def _choose_row(
    row: Any, bits: Any, spec: Any, edits: Any, scratch: Any, choices: Any, i: Any
) -> Any:
    """Fill line i of `choices`; returns its status."""
    block_max = scratch.block_max
    high, finite = block_maxima(bits, block_max)
    if not finite:
        return NOT_FINITE
    norm = 0.0
    if spec.num_logprobs >= 0:
        norm = _log_normaliser(row, high, scratch)
    if spec.num_logprobs > 0:
        ids, logprobs = choices.top_ids[i], choices.top_logprobs[i]
        _top_logprobs(row, high, norm, spec.num_logprobs, scratch, ids, logprobs)
    edited = row
    if spec.seen_begin < spec.seen_end or spec.edit_begin < spec.edit_end:
        edited = scratch.row
        _edit(row, spec, edits, edited)
        high, _ = block_maxima(scratch.row_bits, block_max)
    if high == LOWEST:
        return ALL_MASKED
    if spec.temperature == 0.0:
        token = first_at_least(edited, block_max, high)
    else:
        token = _draw(edited, high, spec, scratch)
    choices.token_ids[i] = token
    choices.logprobs[i] = np.float64(row[token]) - norm
    return OK


@kernel(
    numba.void(
        F32_MATRIX,
        numba.typeof(np.empty((0, 0), np.int32)),
        numba.typeof(np.empty(0, ROW)),
        numba.typeof(no_edits()),
        numba.typeof(new_scratch(BLOCK)),
        numba.typeof(new_choices(0)),
        I64,
        I64,
    )
)
def choose_rows(
    logits: Any,
    bits: Any,
    specs: Any,
    edits: Any,
    scratch: Any,
    choices: Any,
    first: Any,
    step: Any,
) -> None:
    """Choose a token for rows first, first + step, ... of `logits`.

    logits: (num_rows, >= num_tokens) float32, contiguous; num_tokens is the scratch's length,
        and columns from there on are padding
    bits: the same memory as int32
    specs: (num_rows,) of ROW
    edits, scratch, choices: see their classes
    """
    num_tokens = scratch.row.shape[0]
    for i in range(first, logits.shape[0], step):
        row, row_bits = logits[i, :num_tokens], bits[i, :num_tokens]
        choices.status[i] = _choose_row(row, row_bits, specs[i], edits, scratch, choices, i)


def choose(
    logits: Float32,
    specs: Rows,
    edits: Edits,
    num_tokens: int,
    *,
    run: Callable[[Callable[[int], None]], None] | None = None,
    num_workers: int = 1,
) -> Choices:
    """See `kernels.ops.Ops.choose`.

    run, num_workers: of the backend whose workers share the rows; None works in the calling thread
    """
    choices = new_choices(len(specs))
    logits = np.require(logits, np.float32, ["C", "W"])  # the one kind the kernel is compiled for
    bits = logits.view(np.int32)

    def body(worker: int) -> None:
        scratch = new_scratch(num_tokens)
        choose_rows(logits, bits, specs, edits, scratch, choices, worker, num_workers)

    body(0) if run is None else run(body)
    return choices
