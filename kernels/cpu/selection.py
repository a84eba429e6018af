"""Passes over a row of logits: maxima, weights, the best k, cuts by probability, one draw.

Probabilities are integers, exp(x - max) in units of 2^-42, so their sums are exact in any order
and a draw is the same for any vector width. Nothing is sorted: a cut is found by bisection, each
step one vectorised pass that counts what lies above.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from kernels.choices import ONE_WEIGHT
from kernels.cpu.jit import inlined

BLOCK = 64  # tokens that share a maximum
PASSES_OVER_ALL = 9  # halve the logarithm of a band of 42 octaves to a twelfth of one

LOWEST = np.float32(np.finfo(np.float32).min)
HIGHEST = np.float32(np.finfo(np.float32).max)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY_KEY = np.int32(0x7F800000)
_SIGN_SHIFT = np.int32(31)
_LEAST_KEY = np.int32(-0x80000000)


@inlined
def _key(bits: Any) -> Any:
    """The bits of a float32 as an int32 that orders like it, and back again."""
    return np.int32(bits ^ np.int32(np.int32(bits >> _SIGN_SHIFT) & _MAGNITUDE))


@inlined
def _key_of(value: Any) -> Any:
    return _key(np.float32(value).view(np.int32))


@inlined
def _value_of(key: Any) -> Any:
    return np.int32(_key(np.int32(key))).view(np.float32)


@inlined
def block_maxima(bits: Any, block_max: Any) -> Any:
    """Largest value of each block of a row given as int32 bits.

    Returns (largest of all, whether all are finite).
    Integer maxima vectorise without the assumption that no value is NaN, and loops of a fixed
    length with half the time; so the last, shorter block has a loop of its own.
    """
    highest, largest = _LEAST_KEY, np.int32(0)
    num_full = bits.shape[0] // BLOCK
    for block in range(num_full):
        best, magnitude = _LEAST_KEY, np.int32(0)
        for i in range(block * BLOCK, block * BLOCK + BLOCK):
            best = max(best, _key(bits[i]))
            magnitude = max(magnitude, np.int32(bits[i] & _MAGNITUDE))
        block_max[block] = _value_of(best)
        highest, largest = max(highest, best), max(largest, magnitude)
    best = _LEAST_KEY
    for i in range(num_full * BLOCK, bits.shape[0]):
        best = max(best, _key(bits[i]))
        largest = max(largest, np.int32(bits[i] & _MAGNITUDE))
    if num_full < block_max.shape[0]:
        block_max[num_full] = _value_of(best)
    return _value_of(max(highest, best)), largest < _INFINITY_KEY


@inlined
def first_at_least(row: Any, block_max: Any, floor: Any) -> Any:
    """Lowest position of a value >= floor; there is one."""
    block = 0
    while block_max[block] < floor:
        block += 1
    i = block * BLOCK
    while row[i] < floor:
        i += 1
    return i


# ---- weights -------------------------------------------------------------------------------

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_ROUND = 1.5 * 2.0**52  # added and taken off again, leaves the nearest integer
_MANTISSA = 2.0**52
_MANTISSA_BITS = (1 << 52) - 1
_SMALLEST_X = -40.0  # its weight is 0
_T3, _T4, _T5, _T6, _T7, _T8, _T9, _T10, _T11 = (1.0 / math.factorial(n) for n in range(3, 12))


@intrinsic  # type: ignore[untyped-decorator]
def _fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c in float64, rounded once."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float64(types.float64, types.float64, types.float64), generate


@inlined
def _whole(shifted: Any) -> Any:
    """The integer n, 0 <= n < 2^52, of n + 2^52 as a float64."""
    return np.float64(shifted).view(np.int64) & _MANTISSA_BITS


@inlined
def _weight(x: Any) -> Any:
    """exp(x) in units of 2^-42 for x <= 0, within one unit; exp(0) is exact.

    Cody-Waite reduction and a Taylor polynomial, which the compiler can vectorise.
    """
    x = max(x, _SMALLEST_X)
    k = _fma(x, _LOG2_E, _ROUND) - _ROUND
    r = _fma(-k, _LN2_LOW, _fma(-k, _LN2_HIGH, x))
    p = _fma(_fma(_fma(_fma(_T11, r, _T10), r, _T9), r, _T8), r, _T7)
    p = _fma(_fma(_fma(_fma(p, r, _T6), r, _T5), r, _T4), r, _T3)
    p = _fma(_fma(_fma(p, r, 0.5), r, 1.0), r, 1.0)
    fixed = _whole(_fma(p, float(ONE_WEIGHT), _MANTISSA))
    return np.int64(np.uint64(fixed) >> np.uint64(_whole(_MANTISSA - k)))


@inlined
def weigh(values: Any, count: Any, high: Any, scale: Any, weights: Any) -> Any:
    """weights = exp((values - high) * scale); returns their sum."""
    total = 0
    for i in range(count):
        weight = _weight((np.float64(values[i]) - high) * scale)
        weights[i] = weight
        total += weight
    return total


@inlined
def _mass_between(weights: Any, count: Any, low: Any, above: Any) -> Any:
    mass = 0
    for i in range(count):
        mass += weights[i] if (weights[i] >= low) & (weights[i] < above) else 0
    return mass


@inlined
def _gather_between(weights: Any, count: Any, low: Any, above: Any, out: Any) -> Any:
    num = 0
    for i in range(count):
        out[num] = weights[i]
        num += (weights[i] >= low) & (weights[i] < above)
    return num


@inlined
def cut_of_mass(weights: Any, count: Any, target: Any, band: Any) -> Any:
    """Where the largest weights, equal ones by position, first sum to `target` > 0.

    band: (>= count,) int64 scratch
    Returns (weight, position): kept are those above the weight, and equal ones up to the position.
    """
    low, above, rest = 1, ONE_WEIGHT + 1, target
    pool, num_pool, num_passes = weights, count, 0
    while above - low > 1:
        middle = int(math.sqrt(low) * math.sqrt(above))
        middle = min(max(middle, low + 1), above - 1)
        mass = _mass_between(pool, num_pool, middle, above)
        if mass >= rest:
            low = middle
        else:
            above, rest = middle, rest - mass
        num_passes += 1
        if num_passes == PASSES_OVER_ALL:
            num_pool = _gather_between(weights, count, low, above, band)
            pool = band
    last = -1
    while rest > 0:
        last += 1
        rest -= low if weights[last] == low else 0
    return low, last


@inlined
def trim(weights: Any, count: Any, floor: Any, last: Any) -> Any:
    """Zero weights below floor, and equal to it after position `last`; returns the sum left."""
    total = 0
    for i in range(count):
        least = floor if i <= last else floor + 1
        weight = weights[i] if weights[i] >= least else 0
        weights[i] = weight
        total += weight
    return total


@inlined
def position_at(weights: Any, count: Any, rest: Any) -> Any:
    """The position whose weight covers `rest`, in [0, sum), of the weights laid end to end."""
    i = 0
    for block in range(count // BLOCK):
        block_sum = 0
        for j in range(block * BLOCK, block * BLOCK + BLOCK):
            block_sum += weights[j]
        if block_sum > rest:
            break
        rest -= block_sum
        i += BLOCK
    while weights[i] <= rest:
        rest -= weights[i]
        i += 1
    return i


# ---- the best k ----------------------------------------------------------------------------


@inlined
def _num_from(values: Any, count: Any, floor: Any) -> Any:
    num = np.int32(0)
    for i in range(count):
        num += np.int32(values[i] >= floor)
    return num


@inlined
def _kth_largest(values: Any, count: Any, k: Any, high: Any) -> Any:
    """The k-th largest of values up to `high`, equal ones counted each."""
    low, above = np.int64(_key_of(LOWEST)), np.int64(_key_of(high)) + 1
    while above - low > 1:
        middle = (low + above) >> 1
        if _num_from(values, count, _value_of(middle)) >= k:
            low = middle
        else:
            above = middle
    return _value_of(low)


@inlined
def _gather(row: Any, block_max: Any, floor: Any, values: Any, ids: Any) -> Any:
    """Values >= floor and their positions; returns how many. Blocks without any are skipped."""
    count = 0
    for block in range(block_max.shape[0]):
        if block_max[block] >= floor:
            for i in range(block * BLOCK, min((block + 1) * BLOCK, row.shape[0])):
                values[count] = row[i]
                ids[count] = i
                count += row[i] >= floor
    return count


@inlined
def keep_top(row: Any, block_max: Any, k: Any, high: Any, values: Any, ids: Any) -> None:
    """The k largest of a row, equal ones lowest position first, in order of position.

    The k-th largest maximum of the blocks is a lower bound of the k-th largest value, so most
    blocks are never looked into.
    """
    num_blocks = block_max.shape[0]
    if k <= num_blocks:
        floor = _kth_largest(block_max, num_blocks, k, high)
        count = _gather(row, block_max, floor, values, ids)
        floor = _kth_largest(values, count, k, high)
    else:
        floor = _kth_largest(row, row.shape[0], k, high)
        count = _gather(row, block_max, floor, values, ids)
    num_equal_kept = k
    for i in range(count):
        num_equal_kept -= values[i] > floor
    kept = 0
    for i in range(count):
        value = values[i]
        values[kept], ids[kept] = value, ids[i]
        equal = value == floor
        kept += (value > floor) | (equal & (num_equal_kept > 0))
        num_equal_kept -= equal
