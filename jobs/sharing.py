"""How much of a job's prompts need not be computed, estimated from runs of neighbouring rows.

In the sampled rows everything is counted: what a row takes over from those before it, and copies.
Each other row is taken to share as much as rows in the later half of a run do with the rows before
them in their run and with all other runs. It has at least as many others before it, of which those
were drawn, so in the mean of inputs that are alike all over this never promises too much. It
promises too little where what is shared comes back so rarely that a sample has it once: of pairs
of rows all over a large input it sees none.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine import Request
from jobs.duplicates import identity_of
from kernels.ops import PAGE_TOKENS

ID_NBYTES = 4


@dataclass(frozen=True, slots=True)
class SampledRow:
    """request: without a sample index

    sampling_params: as JSON
    output_tokens: that it may generate
    """

    request: Request
    sampling_params: str
    output_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """What rows have in common.

    outputs_per_row: that are computed; copies of others and rows that cannot run have none
    prompt_tokens, output_tokens: means of the sampled outputs that are computed
    reused_tokens, reused_pages: means over outputs that are computed: tokens of the prompt that
        others have computed, and whole KV pages of these
    """

    outputs_per_row: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    reused_tokens: float = 0.0
    reused_pages: float = 0.0


Run = Sequence[SampledRow | None]
Sums = npt.NDArray[np.float64]  # outputs computed; of these prompt, output, reused tokens, pages


def estimate_sharing(
    runs: Sequence[Run], *, num_rows: int, num_samples: int, dedupe: bool
) -> Sharing:
    """What is shared among `num_rows` rows, of which some were sampled.

    runs: rows that follow each other; None for a row that cannot run
    num_rows: within which rows may share
    num_samples: outputs of each row; dedupe: equal outputs are computed once
    """
    known = _Known(num_samples, dedupe)
    counted = [known.add(row) for run in runs for row in run]
    if not counted:
        return Sharing()
    sampled = np.sum(counted, axis=0)
    num_other = max(0, num_rows - len(counted))
    onward = np.mean([*_onward(runs, num_samples, dedupe)], axis=0) if num_other else 0.0
    total = sampled + num_other * onward
    return _means(sampled, total, len(counted) + num_other)


def _means(sampled: Sums, total: Sums, num_rows: int) -> Sharing:
    if not sampled[0]:
        return Sharing()
    prompt, output = sampled[1:3] / sampled[0]
    reused, pages = total[3:] / total[0] if total[0] else (0.0, 0.0)
    return Sharing(
        outputs_per_row=float(total[0] / num_rows),
        prompt_tokens=float(prompt),
        output_tokens=float(output),
        reused_tokens=float(min(reused, prompt - 1)),
        reused_pages=float(pages),
    )


def _onward(runs: Sequence[Run], num_samples: int, dedupe: bool) -> Iterator[Sums]:
    """What rows share that have all other runs, and at least half of their own, before them."""
    for number, run in enumerate(runs):
        known = _Known(num_samples, dedupe)
        for other in (*runs[:number], *runs[number + 1 :]):
            for row in other:
                known.add(row)
        counted = [known.add(row) for row in run]
        yield from counted[len(counted) // 2 :]


class _Known:
    """Rows so far: their prompts in order, and which outputs they have computed."""

    def __init__(self, num_samples: int, dedupe: bool) -> None:
        self._num_samples, self._dedupe = num_samples, dedupe
        self._prompts: list[bytes] = []
        self._identities: set[bytes] = set()

    def add(self, row: SampledRow | None) -> Sums:
        """What a row brings, after those before it."""
        if row is None or not (num_outputs := self._num_computed(row)):
            return np.zeros(5)
        prompt = row.request.token_ids.astype(">u4").tobytes()
        num_tokens = len(row.request.token_ids)
        # The last token of a prompt is computed in any case, for its logits.
        most = num_tokens - 1
        at = bisect.bisect_left(self._prompts, prompt)
        near = self._prompts[max(0, at - 1) : at + 1]  # no other has more in common
        first = min(max((_num_common(other, prompt) for other in near), default=0), most)
        self._prompts.insert(at, prompt)
        reused = np.array([first] + [most] * (num_outputs - 1))
        return np.array(
            [
                num_outputs,
                num_outputs * num_tokens,
                num_outputs * row.output_tokens,
                reused.sum(),
                (reused // PAGE_TOKENS).sum(),
            ],
            float,
        )

    def _num_computed(self, row: SampledRow) -> int:
        """Outputs of a row that are no copies; of a greedy row all samples are the same."""
        identity = identity_of(row.request, row.sampling_params) if self._dedupe else None
        if identity is None:
            return self._num_samples
        if identity in self._identities:
            return 0
        self._identities.add(identity)
        return self._num_samples if row.request.params.temperature > 0 else 1


def _num_common(a: bytes, b: bytes) -> int:
    """Tokens with which both prompts begin."""
    count = min(len(a), len(b)) // ID_NBYTES
    differ = np.frombuffer(a, ">u4", count) != np.frombuffer(b, ">u4", count)
    return int(differ.argmax()) if differ.any() else count
