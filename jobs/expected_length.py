"""How many tokens a row is expected to generate, from its limit and the rows before it."""

from __future__ import annotations

import numpy as np

NUM_RECENT = 256


class ExpectedLength:
    """Learns from the lengths of the answers of one job, the last `NUM_RECENT` of them."""

    def __init__(self) -> None:
        self._recent = np.zeros(NUM_RECENT, np.int64)
        self._num_seen = 0

    def add(self, completion_tokens: int) -> None:
        """A row has ended with this many tokens."""
        self._recent[self._num_seen % NUM_RECENT] = completion_tokens
        self._num_seen += 1

    def of(self, max_tokens: int) -> float:
        """The mean of what recent rows would have made under this limit; the limit at first."""
        if not self._num_seen:
            return float(max_tokens)
        return float(np.minimum(self._recent[: self._num_seen], max_tokens).mean())
