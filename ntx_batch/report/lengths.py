"""Lengths of texts in tokens: counted exactly, whatever their number, and cut into bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ntx_batch.report.scale import nice_step

MAX_BARS = 40
LONG_TAIL = 2.0  # where the longest is so many times the 99th percentile, one bar takes the tail


@dataclass(frozen=True, slots=True)
class Bar:
    """Texts of [begin, end) tokens; end None: of `begin` and more."""

    begin: int
    end: int | None
    num_rows: int


class Lengths:
    """How many texts have each number of tokens."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, np.int64)

    def add(self, lengths: npt.NDArray[np.int64]) -> None:
        """Count more texts. lengths: (num_texts,), tokens of each"""
        counts = np.bincount(lengths, minlength=len(self._counts)).astype(np.int64)
        counts[: len(self._counts)] += self._counts
        self._counts = counts

    @property
    def num_texts(self) -> int:
        return int(self._counts.sum())

    @property
    def num_tokens(self) -> int:
        return int(self._counts @ np.arange(len(self._counts)))

    @property
    def mean(self) -> float:
        return self.num_tokens / self.num_texts

    def quantile(self, share: float) -> int:
        """The least length that this share of the texts does not exceed; 0 gives the shortest."""
        wanted = max(1, int(np.ceil(share * self.num_texts)))
        return int(np.searchsorted(np.cumsum(self._counts), wanted))

    def bars(self) -> Sequence[Bar]:
        """Bars of one round width from 0 on that hold every text once."""
        if not self.num_texts:
            return ()
        longest, most = self.quantile(1), self.quantile(0.99)
        has_tail = longest > LONG_TAIL * max(most, MAX_BARS)
        width = max(1, int(nice_step((most if has_tail else longest) + 1, MAX_BARS)))
        end = (most if has_tail else longest) // width + 1
        padded = np.zeros(end * width, np.int64)
        padded[: len(self._counts)] = self._counts[: len(padded)]
        sums = padded.reshape(end, width).sum(axis=1)
        bars = [Bar(n * width, (n + 1) * width, int(each)) for n, each in enumerate(sums)]
        if has_tail:
            bars.append(Bar(end * width, None, int(self._counts[end * width :].sum())))
        return bars
