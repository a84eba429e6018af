"""What a backend is told of rows of logits, and what it answers: tokens and log-probabilities."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MOST_LOGPROBS = 20
WEIGHT_BITS = 42
ONE_WEIGHT = 1 << WEIGHT_BITS  # of the most likely token; probabilities are integers
MAX_TOKENS = 1 << 20  # so many times ONE_WEIGHT stays below 2^63

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
Rows = npt.NDArray[np.void]  # of ROW


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
