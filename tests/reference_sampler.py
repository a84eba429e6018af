"""A plain sampler to compare with: sorts, sums and divides in float64, in the order documented."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.requests import SamplingParams

Float64 = npt.NDArray[np.float64]
WORD = 0xFFFFFFFF


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & WORD, (a >> 32) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def uniform(
    params: SamplingParams, *, row_index: int, sample_index: int, position: int, job_seed: int
) -> float:
    """The number in [0, 1) that chooses a row's token at a position."""
    own = params.seed is not None
    seed = (params.seed if params.seed is not None else job_seed) & (2**64 - 1)
    row = 0 if own else row_index
    counter = (row & WORD, sample_index, position, (row >> 32) << 8 | own)
    low, high, _, _ = philox(counter, (seed & WORD, seed >> 32))
    return (high << 32 | low) / 2**64


def adjusted(
    logits: npt.ArrayLike, params: SamplingParams, prompt: list[int], output: list[int]
) -> Float64:
    """Logits after penalties and biases."""
    values = np.array(logits, np.float64)
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(output):
        values[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    for token, bias in params.logit_bias:
        values[token] += bias
    return values


def probabilities(logits: npt.ArrayLike, params: SamplingParams) -> Float64:
    """The distribution that temperature, top_k, top_p and min_p leave, temperature above 0."""
    scaled = np.asarray(logits, np.float64) / params.temperature
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if params.top_k:
        order = order[: params.top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    weights /= weights.sum()
    if params.top_p < 1:
        reached = np.flatnonzero(np.cumsum(weights) >= params.top_p)
        order = order[: reached[0] + 1] if len(reached) else order
    out = np.zeros(len(scaled))
    kept = weights[: len(order)]
    out[order] = np.where(kept >= params.min_p * kept[0], kept, 0)
    out /= out.sum()
    return out
