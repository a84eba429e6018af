"""What sampler tests share: short ways to make rows and choices, and a plain sampler.

The plain one sorts, sums and divides in float64, in the order documented.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from engine import sampler
from engine.requests import Request, RowError, SamplingParams
from engine.sampler import Chosen, RowSampler
from kernels.choices import Choices, Edits, Rows
from kernels.cpu import sampling
from kernels.ops import Ops

Float64 = npt.NDArray[np.float64]
WORD = 0xFFFFFFFF
NO_EOG: frozenset[int] = frozenset()


class Workers:
    """The CPU's choices without a backend: its workers one after the other, the last one first."""

    def __init__(self, num_workers: int = 1) -> None:
        self.num_workers = num_workers

    def choose(self, logits: Any, specs: Rows, edits: Edits, num_tokens: int) -> Choices:
        workers = self.num_workers
        return sampling.choose(logits, specs, edits, num_tokens, run=self.run, num_workers=workers)

    def run(self, body: Callable[[int], None]) -> None:
        for worker in reversed(range(self.num_workers)):
            body(worker)

    def get(self, array: Any) -> Any:
        return array


def choose(
    logits: Any, rows: Sequence[RowSampler], *, num_tokens: int, ops: Any = None
) -> list[Chosen | RowError]:
    """`engine.sampler.choose`, in the calling thread where no backend is given."""
    return sampler.choose(logits, rows, num_tokens=num_tokens, ops=cast(Ops, ops or Workers()))


def row_of(
    params: SamplingParams | None = None,
    *,
    row_index: int = 0,
    sample_index: int = 0,
    job_seed: int = 0,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    eog_ids: frozenset[int] = NO_EOG,
    **changes: Any,
) -> RowSampler:
    request = Request(
        row_index=row_index,
        sample_index=sample_index,
        token_ids=np.array(prompt, np.int32),
        params=replace(params or SamplingParams(), **changes),
        job_seed=job_seed,
    )
    row = RowSampler(request, eog_ids)
    for token_id in output:
        row.accept(token_id)
    return row


def choose_all(logits: Any, rows: list[RowSampler], **kwargs: Any) -> list[Chosen | RowError]:
    matrix = np.array(np.broadcast_to(np.asarray(logits, np.float32), (len(rows), len(logits))))
    return choose(matrix, rows, **{"num_tokens": matrix.shape[1], **kwargs})


def ids_of(outcomes: list[Chosen | RowError]) -> list[int]:
    assert all(isinstance(outcome, Chosen) for outcome in outcomes), outcomes
    return [cast(Chosen, outcome).token_id for outcome in outcomes]


def choose_one(logits: Any, row: RowSampler, **kwargs: Any) -> int:
    return ids_of(choose_all(logits, [row], **kwargs))[0]


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
