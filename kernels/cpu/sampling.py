"""Choosing next tokens on the CPU: one call per worker over its rows, each row by itself.

Probabilities are held as integers, exp(x - max) in units of 2^-42, so sums are exact in any
order and a draw is the same on every machine, for any vector width and any split over workers.
The kept set of top_k and top_p is one cut: entries above a value, and those equal to it up to a
position. It is found by counting into buckets and going on inside the bucket that holds the cut,
so nothing is sorted.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from kernels.cpu.jit import F32_MATRIX, I64, inlined, kernel

BLOCK = 64  # tokens that share a maximum and a sum
NUM_BUCKETS = 1024
WEIGHT_BITS = 42  # 2^20 tokens of the largest weight stay below 2^63
MAX_TOKENS = 1 << 20
MOST_LOGPROBS = 20

OK, NOT_FINITE, ALL_MASKED = 0, 1, 2

ROW = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition", np.float64),
        ("presence", np.float64),
        ("frequency", np.float64),
        ("seed", np.uint64),
        ("row_index", np.int64),
        ("sample_index", np.int64),
        ("position", np.int64),
        ("purpose", np.int64),
        ("top_k", np.int64),
        ("num_logprobs", np.int64),
        ("seen_begin", np.int64),
        ("seen_end", np.int64),
        ("edit_begin", np.int64),
        ("edit_end", np.int64),
    ]
)


class Edits(NamedTuple):
    """What rows change in their logits; each row owns a range of both lists.

    seen_ids: (num_seen,) int32 tokens under penalties
    seen_counts: (num_seen,) int32 occurrences in the output, 0 for tokens of the prompt alone
    ids: (num_edits,) int32 tokens with a bias or a mask
    values: (num_edits,) float64 added to the logit; -inf masks the token
    """

    seen_ids: npt.NDArray[np.int32]
    seen_counts: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    values: npt.NDArray[np.float64]


class Choices(NamedTuple):
    """Outcome by row.

    token_ids: (num_rows,) int32
    status: (num_rows,) int32, OK or what is wrong with the row
    logprobs: (num_rows,) float64 of the chosen token
    top_ids, top_logprobs: (num_rows, MOST_LOGPROBS), most likely first
    """

    token_ids: npt.NDArray[np.int32]
    status: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float64]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float64]


class Scratch(NamedTuple):
    """Working memory of one worker, for rows of up to so many tokens."""

    row: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    weights: npt.NDArray[np.int64]
    block_max: npt.NDArray[np.float32]
    block_sums: npt.NDArray[np.int64]
    buckets: npt.NDArray[np.int64]


def new_scratch(num_tokens: int) -> Scratch:
    """Working memory for `choose_rows` over `num_tokens` tokens."""
    num_blocks = -(-num_tokens // BLOCK)
    return Scratch(
        row=np.empty(num_tokens, np.float32),
        values=np.empty(num_tokens, np.float32),
        ids=np.empty(num_tokens, np.int32),
        positions=np.empty(num_tokens, np.int32),
        weights=np.empty(num_tokens, np.int64),
        block_max=np.empty(num_blocks, np.float32),
        block_sums=np.empty(num_blocks, np.int64),
        buckets=np.empty(NUM_BUCKETS, np.int64),
    )


def no_edits() -> Edits:
    """Edits of rows that change nothing."""
    none = np.empty(0, np.int32)
    return Edits(none, none, none, np.empty(0, np.float64))


def new_choices(num_rows: int) -> Choices:
    """Room for the outcome of `num_rows` rows."""
    return Choices(
        token_ids=np.empty(num_rows, np.int32),
        status=np.empty(num_rows, np.int32),
        logprobs=np.empty(num_rows, np.float64),
        top_ids=np.empty((num_rows, MOST_LOGPROBS), np.int32),
        top_logprobs=np.empty((num_rows, MOST_LOGPROBS), np.float64),
    )


# ---- random numbers ------------------------------------------------------------------------

PHILOX_M0, PHILOX_M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
PHILOX_W0, PHILOX_W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOW_32, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@inlined
def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Ten rounds of Philox4x32: four 32-bit counter words and two key words, each in a uint64.

    Returns four 32-bit words. Source: Salmon et al. 2011, Random123 philox.h.
    """
    for _ in range(10):
        product_0 = PHILOX_M0 * c0
        product_1 = PHILOX_M1 * c2
        c0 = (product_1 >> HALF) ^ c1 ^ k0
        c1 = product_1 & LOW_32
        c2 = (product_0 >> HALF) ^ c3 ^ k1
        c3 = product_0 & LOW_32
        k0 = (k0 + PHILOX_W0) & LOW_32
        k1 = (k1 + PHILOX_W1) & LOW_32
    return c0, c1, c2, c3


@inlined
def _uniform_below(total: Any, row: Any) -> Any:
    """The row's own random integer in [0, total): the high half of a 64 x 64 bit product."""
    index = np.uint64(row.row_index)
    low, high, _, _ = philox4x32(
        index & LOW_32,
        np.uint64(row.sample_index) & LOW_32,
        np.uint64(row.position) & LOW_32,
        ((index >> HALF) << np.uint64(8)) & LOW_32 | np.uint64(row.purpose),
        row.seed & LOW_32,
        row.seed >> HALF,
    )
    total_low, total_high = np.uint64(total) & LOW_32, np.uint64(total) >> HALF
    middle = high * total_low + ((low * total_low) >> HALF)
    other = low * total_high + (middle & LOW_32)
    return np.int64(high * total_high + (middle >> HALF) + (other >> HALF))


# ---- maxima and weights --------------------------------------------------------------------

LOWEST = np.float32(np.finfo(np.float32).min)
HIGHEST = np.float32(np.finfo(np.float32).max)
MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITY_BITS = np.int32(0x7F800000)
SIGN_SHIFT = np.int32(31)


@inlined
def _block_maxima(bits: Any, block_max: Any) -> Any:
    """Largest value of each block of a row given as int32 bits; False where one is not finite.

    Integers that order like floats let the compiler use vector maxima without assuming that
    no value is NaN.
    """
    largest = np.int32(0)
    for block in range(block_max.shape[0]):
        best = np.int32(-0x80000000)
        for i in range(block * BLOCK, min((block + 1) * BLOCK, bits.shape[0])):
            b = bits[i]
            largest = max(largest, np.int32(b & MAGNITUDE))
            best = max(best, np.int32(b ^ np.int32(np.int32(b >> SIGN_SHIFT) & MAGNITUDE)))
        value = np.int32(best ^ np.int32(np.int32(best >> SIGN_SHIFT) & MAGNITUDE))
        block_max[block] = value.view(np.float32)
    return largest < INFINITY_BITS


@inlined
def _first_at_least(row: Any, block_max: Any, floor: Any) -> Any:
    block = 0
    while block_max[block] < floor:
        block += 1
    i = block * BLOCK
    while row[i] < floor:
        i += 1
    return i


LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
ROUND = 1.5 * 2.0**52  # added and taken off again, leaves the nearest integer
ONE_WEIGHT = 2.0**WEIGHT_BITS
MANTISSA = 2.0**52
MANTISSA_BITS = (1 << 52) - 1
SMALLEST_X = -40.0  # its weight is 0
T3, T4, T5, T6, T7, T8, T9, T10, T11 = (1.0 / math.factorial(n) for n in range(3, 12))


@inlined
def _weight(x: Any) -> Any:
    """exp(x) in units of 2^-42 for x <= 0, within one unit; 1 is exact.

    Cody-Waite reduction and a Taylor polynomial, so that the compiler can vectorise it.
    """
    x = max(x, SMALLEST_X)
    k = (x * LOG2_E + ROUND) - ROUND
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    p = T11 * r + T10
    p = ((((p * r + T9) * r + T8) * r + T7) * r + T6) * r + T5
    p = ((((p * r + T4) * r + T3) * r + 0.5) * r + 1.0) * r + 1.0
    fixed = np.float64(p * ONE_WEIGHT + MANTISSA).view(np.int64) & MANTISSA_BITS
    return fixed >> np.int64(-k)


@inlined
def _weigh(values: Any, count: Any, high: Any, scale: Any, weights: Any, block_sums: Any) -> Any:
    """weights = exp((values - high) * scale); returns their sum."""
    total = 0
    for block in range((count + BLOCK - 1) // BLOCK):
        block_sum = 0
        for i in range(block * BLOCK, min((block + 1) * BLOCK, count)):
            weight = _weight((np.float64(values[i]) - high) * scale)
            weights[i] = weight
            block_sum += weight
        block_sums[block] = block_sum
        total += block_sum
    return total


# ---- cuts ----------------------------------------------------------------------------------


@inlined
def _cut(values: Any, measures: Any, count: Any, target: Any, positions: Any, buckets: Any) -> Any:
    """Where the largest values, equal ones by position, have measures that reach `target`.

    values: (>= count,) float32, finite; measures: (>= count,) int64, >= 0, sum >= target > 0
    Returns (value, position): kept are v > value, and v == value up to position.
    """
    for i in range(count):
        positions[i] = i
    while True:
        low = high = values[positions[0]]
        for i in range(count):
            low = min(low, values[positions[i]])
            high = max(high, values[positions[i]])
        if low == high:
            break
        top = np.float64(high)
        # The largest falls into the first bucket and the smallest does not: each round shrinks.
        scale = (NUM_BUCKETS - 1) / (top - np.float64(low))
        buckets[:] = 0
        for i in range(count):
            p = positions[i]
            buckets[int((top - np.float64(values[p])) * scale)] += measures[p]
        bucket = 0
        while buckets[bucket] < target:
            target -= buckets[bucket]
            bucket += 1
        kept = 0
        for i in range(count):
            p = positions[i]
            positions[kept] = p
            kept += int((top - np.float64(values[p])) * scale) == bucket
        count = kept
    i = 0
    while measures[positions[i]] < target:
        target -= measures[positions[i]]
        i += 1
    return low, positions[i]


@inlined
def _keep_top(row: Any, block_max: Any, k: Any, scratch: Any) -> Any:
    """Put the k largest of a row, equal ones lowest id first, into scratch in order of id.

    The k-th largest block maximum is a lower bound of the k-th largest value, so most blocks
    are never looked into.
    """
    weights, values, ids = scratch.weights, scratch.values, scratch.ids
    num_blocks = block_max.shape[0]
    floor = LOWEST
    if k < num_blocks:
        weights[:num_blocks] = 1
        floor, _ = _cut(block_max, weights, num_blocks, k, scratch.positions, scratch.buckets)
    count = 0
    for block in range(num_blocks):
        if block_max[block] >= floor:
            for i in range(block * BLOCK, min((block + 1) * BLOCK, row.shape[0])):
                values[count] = row[i]
                ids[count] = i
                count += row[i] >= floor
    weights[:count] = 1
    value, last = _cut(values, weights, count, k, scratch.positions, scratch.buckets)
    kept = 0
    for i in range(count):
        keep = values[i] > value or (values[i] == value and i <= last)
        values[kept], ids[kept] = values[i], ids[i]
        kept += keep
    return kept


@inlined
def _trim(values: Any, count: Any, value: Any, last: Any, least: Any, scratch: Any) -> Any:
    """Zero the weights beyond a cut and those below `least`; returns the sum of the others."""
    weights, block_sums = scratch.weights, scratch.block_sums
    total = 0
    for block in range((count + BLOCK - 1) // BLOCK):
        block_sum = 0
        for i in range(block * BLOCK, min((block + 1) * BLOCK, count)):
            kept = (values[i] > value) | ((values[i] == value) & (i <= last))
            weight = weights[i] if kept & (weights[i] >= least) else 0
            weights[i] = weight
            block_sum += weight
        block_sums[block] = block_sum
        total += block_sum
    return total


# ---- rows ----------------------------------------------------------------------------------


@inlined
def _edit(row: Any, spec: Any, edits: Any) -> None:
    """Apply penalties, then biases and masks, in float64, rounded once to float32 each."""
    for i in range(spec.seen_begin, spec.seen_end):
        token, times = edits.seen_ids[i], edits.seen_counts[i]
        value = np.float64(row[token])
        value = value / spec.repetition if value > 0 else value * spec.repetition
        value -= spec.frequency * times + (spec.presence if times > 0 else 0.0)
        row[token] = np.float32(min(max(value, LOWEST), HIGHEST))
    for i in range(spec.edit_begin, spec.edit_end):
        token = edits.ids[i]
        value = np.float64(row[token]) + edits.values[i]
        row[token] = np.float32(min(max(value, LOWEST), HIGHEST))


@inlined
def _draw(row: Any, block_max: Any, high: Any, spec: Any, scratch: Any) -> Any:
    """One token by inverse CDF, in order of id, over what top_k, top_p and min_p keep."""
    values, count, weights = row, row.shape[0], scratch.weights
    gathered = 0 < spec.top_k < count
    if gathered:
        count = _keep_top(row, block_max, spec.top_k, scratch)
        values = scratch.values
    scale = min(1.0 / spec.temperature, 1e300)
    total = _weigh(values, count, np.float64(high), scale, weights, scratch.block_sums)
    value, last = LOWEST, count
    if spec.top_p < 1.0:
        target = min(max(np.int64(math.ceil(spec.top_p * total)), 1), total)
        value, last = _cut(values, weights, count, target, scratch.positions, scratch.buckets)
    if spec.top_p < 1.0 or spec.min_p > 0.0:
        least = np.int64(math.ceil(spec.min_p * ONE_WEIGHT))
        total = _trim(values, count, value, last, least, scratch)
    rest = _uniform_below(total, spec)
    block = 0
    while scratch.block_sums[block] <= rest:
        rest -= scratch.block_sums[block]
        block += 1
    i = block * BLOCK
    while weights[i] <= rest:
        rest -= weights[i]
        i += 1
    return scratch.ids[i] if gathered else i


@inlined
def _log_normaliser(row: Any, high: Any, scratch: Any) -> Any:
    total = _weigh(row, row.shape[0], np.float64(high), 1.0, scratch.weights, scratch.block_sums)
    return np.float64(high) + math.log(total / ONE_WEIGHT)


@inlined
def _top_logprobs(row: Any, norm: Any, k: Any, scratch: Any, ids: Any, logprobs: Any) -> None:
    """The k most likely tokens, most likely first, equal ones lowest id first."""
    count = _keep_top(row, scratch.block_max, min(k, row.shape[0]), scratch)
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
    if not _block_maxima(bits, block_max):
        return NOT_FINITE
    norm = 0.0
    if spec.num_logprobs >= 0:
        norm = _log_normaliser(row, block_max.max(), scratch)
    if spec.num_logprobs > 0:
        ids, logprobs = choices.top_ids[i], choices.top_logprobs[i]
        _top_logprobs(row, norm, spec.num_logprobs, scratch, ids, logprobs)
    edited = row
    if spec.seen_begin < spec.seen_end or spec.edit_begin < spec.edit_end:
        edited = scratch.row
        edited[:] = row
        _edit(edited, spec, edits)
        _block_maxima(edited.view(np.int32), block_max)
    high = block_max.max()
    if high == LOWEST:
        return ALL_MASKED
    if spec.temperature == 0.0:
        token = _first_at_least(edited, block_max, high)
    else:
        token = _draw(edited, block_max, high, spec, scratch)
    choices.token_ids[i] = token
    choices.logprobs[i] = np.float64(row[token]) - norm
    return OK


@kernel(
    numba.void(
        F32_MATRIX,
        numba.typeof(np.empty(0, ROW)),
        numba.typeof(no_edits()),
        numba.typeof(new_scratch(BLOCK)),
        numba.typeof(new_choices(0)),
        I64,
        I64,
    )
)
def choose_rows(
    logits: Any, specs: Any, edits: Any, scratch: Any, choices: Any, first: Any, step: Any
) -> None:
    """Choose a token for rows first, first + step, ... of `logits`.

    logits: (num_rows, >= num_tokens) float32, contiguous; num_tokens is the scratch's length,
        and columns from there on are padding
    specs: (num_rows,) of ROW
    edits, scratch, choices: see their classes
    """
    num_tokens = scratch.row.shape[0]
    for i in range(first, logits.shape[0], step):
        row = logits[i, :num_tokens]
        bits = row.view(np.int32)
        choices.status[i] = _choose_row(row, bits, specs[i], edits, scratch, choices, i)
