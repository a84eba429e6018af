"""Next tokens for the rows of a sweep.

A choice depends on the row alone: on its logits, its parameters, its own tokens and a random
number that is a pure function of (the row's seed, or the job's seed and the row's index; sample
index; token position). Neighbours, order, worker and restarts do not enter.

Rules beyond `SamplingParams`:
- Ids from `num_tokens` on are padding of the vocabulary and never chosen, greedy included.
- repetition_penalty looks at the whole prompt and the whole output, presence and frequency
  penalties at the output only. There is no window.
- Before min_tokens the tokens that would end the row are masked: stop_token_ids, and the
  end-of-generation tokens unless ignore_eos.
- top_k and top_p keep equal logits lowest id first; top_p counts within what top_k kept, and
  min_p compares with the most likely token.
- logprobs are those of the model: log-softmax of the logits before penalties, biases, masks and
  temperature, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.requests import Request, RowError, SamplingParams, TokenLogprob
from kernels.choices import MAX_TOKENS, NOT_FINITE, OK, ROW, Choices, Edits, Rows, no_edits
from kernels.ops import Float32, Ops

_JOB_SEED, _OWN_SEED = 0, 1  # the last word of a Philox counter says what the number is for
_WORD_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Chosen:
    """A chosen token, and its log-probability where the row asked for it."""

    token_id: int
    logprob: TokenLogprob | None = None


class SeenTokens:
    """Distinct tokens of a row under penalties, and how often each is in the output."""

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        distinct = np.unique(np.fromiter(prompt_ids, np.int32))
        self._size = len(distinct)
        self._ids = np.concatenate([distinct, np.empty(64, np.int32)])
        self._counts = np.zeros(len(self._ids), np.int32)
        self._slots = {int(token_id): slot for slot, token_id in enumerate(distinct)}

    def add(self, token_id: int) -> None:
        """Count a generated token."""
        slot = self._slots.setdefault(token_id, self._size)
        if slot == self._size:
            if slot == len(self._ids):
                self._ids = np.resize(self._ids, 2 * slot)
                self._counts = np.concatenate([self._counts, np.zeros(slot, np.int32)])
            self._ids[slot] = token_id
            self._size += 1
        self._counts[slot] += 1

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        return self._counts[: self._size]


class RowSampler:
    """What the choice of one row's tokens depends on.

    request: the row; its parameters have passed `validate_params`
    eog_ids: end-of-generation tokens of the model
    """

    def __init__(self, request: Request, eog_ids: frozenset[int]) -> None:
        params = request.params
        self.params = params
        self.num_generated = 0
        self.seen = _seen_tokens(request)
        self._request = request
        self.bias = _edit_arrays(params.logit_bias)
        masked = sorted({*params.stop_token_ids, *(() if params.ignore_eos else eog_ids)})
        self.bias_and_mask = _edit_arrays([*params.logit_bias, *((i, -np.inf) for i in masked)])

    def accept(self, token_id: int) -> None:
        """Take a token into the row's history."""
        self.num_generated += 1
        if self.seen is not None:
            self.seen.add(token_id)

    @property
    def edits(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """Ids and what is added to their logits, for the next token."""
        return self.bias_and_mask if self.num_generated < self.params.min_tokens else self.bias

    def spec(self, seen_begin: int, edit_begin: int) -> tuple[float, ...]:
        """The row as a `choices.ROW`, with its ranges of the edits beginning as given."""
        params, request = self.params, self._request
        own = params.seed is not None
        num_seen = 0 if self.seen is None else len(self.seen.ids)
        return (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            (request.job_seed if params.seed is None else params.seed) & _WORD_64,
            0 if own else request.row_index,
            request.sample_index,
            self.num_generated,
            _OWN_SEED if own else _JOB_SEED,
            params.top_k,
            -1 if params.logprobs is None else params.logprobs,
            seen_begin,
            seen_begin + num_seen,
            edit_begin,
            edit_begin + len(self.edits[0]),
        )


def choose(
    logits: Float32, rows: Sequence[RowSampler], *, num_tokens: int, ops: Ops
) -> list[Chosen | RowError]:
    """Choose the next token of each row; the rows themselves stay as they are.

    logits: (num_rows, vocab_size) float32, as `ops` made them
    num_tokens: ids from here on are padding
    Returns, by row, a choice, or the RowError of a row that has none.
    """
    assert len(logits) == len(rows) and num_tokens <= min(logits.shape[1], MAX_TOKENS)
    specs, edits = _batch(rows)
    choices = ops.choose(logits, specs, edits, num_tokens)
    outcomes: list[Chosen | RowError] = []
    for i, row in enumerate(rows):
        if choices.status[i] == OK:
            outcomes.append(_chosen(row, i, choices, num_tokens))
        elif choices.status[i] == NOT_FINITE:
            outcomes.append(_not_finite(row, ops.get(logits[i : i + 1])[0, :num_tokens]))
        else:
            outcomes.append(_all_masked(row))
    return outcomes


def ending_token(
    token_id: int, params: SamplingParams, eog_ids: frozenset[int], num_generated: int
) -> str | None:
    """The stop reason of a token that ends its row, its id as text, or None.

    num_generated: tokens of the output so far, this one included
    """
    ends = token_id in params.stop_token_ids or (token_id in eog_ids and not params.ignore_eos)
    return str(token_id) if ends and num_generated > params.min_tokens else None


def _seen_tokens(request: Request) -> SeenTokens | None:
    params = request.params
    if params.repetition_penalty != 1.0:
        return SeenTokens(request.token_ids)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        return SeenTokens(())
    return None


def _edit_arrays(
    edits: Sequence[tuple[int, float]],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    ids = np.array([token_id for token_id, _ in edits], np.int32)
    return ids, np.array([value for _, value in edits], np.float64)


def _batch(rows: Sequence[RowSampler]) -> tuple[Rows, Edits]:
    specs, seen_begin, edit_begin = [], 0, 0
    parts = [no_edits()]
    for row in rows:
        specs.append(row.spec(seen_begin, edit_begin))
        edit_ids, edit_values = row.edits
        if row.seen is not None or len(edit_ids):
            seen_ids, counts = (row.seen.ids, row.seen.counts) if row.seen else parts[0][:2]
            parts.append(Edits(seen_ids, counts, edit_ids, edit_values))
            seen_begin += len(seen_ids)
            edit_begin += len(edit_ids)
    edits = Edits(*(np.concatenate(lists) for lists in zip(*parts, strict=True)))
    return np.array(specs, ROW), edits


def _chosen(row: RowSampler, i: int, choices: Choices, num_tokens: int) -> Chosen:
    token_id = int(choices.token_ids[i])
    if row.params.logprobs is None:
        return Chosen(token_id)
    num_top = min(row.params.logprobs, num_tokens)
    ids, logprobs = choices.top_ids[i, :num_top], choices.top_logprobs[i, :num_top]
    return Chosen(
        token_id,
        TokenLogprob(
            token_id=token_id,
            logprob=float(choices.logprobs[i]),
            top=tuple(zip(ids.tolist(), logprobs.tolist(), strict=True)),
        ),
    )


def _not_finite(row: RowSampler, logits: Float32) -> RowError:
    bad = np.flatnonzero(~np.isfinite(logits))
    return RowError(
        "internal_error",
        f"{len(bad)} of {len(logits)} logits are not finite {_where(row)}, "
        f"first {logits[bad[0]]} for id {bad[0]}; check the model file",
    )


def _all_masked(row: RowSampler) -> RowError:
    message = f"logit_bias and min_tokens leave no token to choose {_where(row)}"
    return RowError("invalid_parameter", message)


def _where(row: RowSampler) -> str:
    return f"at token {row.num_generated} of the output"
