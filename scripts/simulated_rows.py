"""Made-up rows of jobs: prompts with common beginnings, output lengths by distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine import Request, SamplingParams
from scripts.simulated_ops import Lengths

TokenIds = npt.NDArray[np.int32]
LOWEST_ID = 10  # below are special tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Output lengths: most from a lognormal, some from a Pareto, cut at the job's max_tokens.

    median, sigma: of the lognormal
    tail_share: of rows with Pareto lengths; tail_from: the least of these; tail_alpha: their
        exponent
    """

    median: float = 64.0
    sigma: float = 0.8
    tail_share: float = 0.1
    tail_from: float = 256.0
    tail_alpha: float = 1.2

    def draw(self, num_rows: int, most: int, seed: int) -> Lengths:
        rng = np.random.default_rng([seed, 1])
        body = self.median * np.exp(self.sigma * rng.standard_normal(num_rows))
        tail = self.tail_from * (1 + rng.pareto(self.tail_alpha, num_rows))
        lengths = np.where(rng.random(num_rows) < self.tail_share, tail, body)
        return _whole(lengths, most)


@dataclass(frozen=True, kw_only=True, slots=True)
class ByPrefix:
    """Output lengths that go with the beginning of a prompt: a lognormal for each of them.

    median, sigma: of the medians of these; row_sigma: of rows around theirs
    """

    median: float = 64.0
    sigma: float = 1.0
    row_sigma: float = 0.5

    def draw(self, prefixes: npt.NDArray[np.int64], most: int, seed: int) -> Lengths:
        """prefixes: (num_rows,) index of each row's beginning"""
        rng = np.random.default_rng([seed, 3])
        medians = self.median * np.exp(self.sigma * rng.standard_normal(prefixes.max() + 1))
        factors = np.exp(self.row_sigma * rng.standard_normal(len(prefixes)))
        return _whole(medians[prefixes] * factors, most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """prompts: token ids; lengths: that each row generates; max_tokens: that it may"""

    prompts: list[TokenIds]
    lengths: Lengths
    max_tokens: Lengths

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def known(self) -> Rows:
        """The same rows with limits that say how long they are."""
        return Rows(prompts=self.prompts, lengths=self.lengths, max_tokens=self.lengths)

    def request(self, index: int, end_id: int) -> Request:
        """A row that ends with `end_id`, or at its limit."""
        params = SamplingParams(
            max_tokens=int(self.max_tokens[index]), stop_token_ids=(end_id,), ignore_eos=True
        )
        return Request(row_index=index, token_ids=self.prompts[index], params=params)


def _whole(lengths: npt.NDArray[np.float64], most: int) -> Lengths:
    whole: Lengths = np.clip(np.rint(lengths), 1, most).astype(np.int64)
    return whole


def prefixes_of(num_rows: int, num_prefixes: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """(num_rows,) index of the beginning of each prompt; its own for each row where there are 0."""
    if not num_prefixes:
        return np.arange(num_rows)
    return np.random.default_rng([seed, 4]).integers(0, num_prefixes, num_rows)


def random_prompts(
    num_rows: int,
    num_tokens: int,
    vocab_size: int,
    *,
    num_prefixes: int = 0,
    prefix_tokens: int = 0,
    seed: int = 0,
) -> list[TokenIds]:
    """Prompts of `num_tokens`, the first `prefix_tokens` out of so many beginnings, shuffled."""
    rng = np.random.default_rng([seed, 2])
    prefixes = prefixes_of(num_rows, num_prefixes, seed)
    ends = rng.integers(LOWEST_ID, vocab_size, (num_rows, num_tokens - prefix_tokens), np.int32)
    begins = rng.integers(LOWEST_ID, vocab_size, (prefixes.max() + 1, prefix_tokens), np.int32)
    return list(np.concatenate([begins[prefixes], ends], axis=1))
