"""Rows of a job that no engine has: the rest of its shards, and what lost engines gave back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from jobs.records import Shard


class ShardPool:
    """Hands out row ranges, each output once, in the order of the input.

    shards: all that there is, ascending
    num_samples: outputs of a row
    """

    def __init__(self, shards: Iterable[Shard], num_samples: int) -> None:
        self._shards: Iterator[Shard] = iter(shards)
        self._num_samples = num_samples
        self._returned: deque[Shard] = deque()
        self._num_taken = 0

    def take(self, max_outputs: int) -> Shard | None:
        """The next rows, of at most so many outputs, at least one row; None: there are none.

        Its number is one that no other has.
        """
        shard = self._returned.popleft() if self._returned else next(self._shards, None)
        if shard is None:
            return None
        first, rest = split_shard(shard, max_outputs, self._num_samples)
        if rest is not None:
            self._returned.appendleft(rest)
        self._num_taken += 1
        return replace(first, number=self._num_taken)

    def give_back(self, shards: Iterable[Shard]) -> None:
        """These rows run before all others that are here."""
        self._returned.extendleft(reversed(list(shards)))


def split_shard(shard: Shard, max_outputs: int, num_samples: int) -> tuple[Shard, Shard | None]:
    """Its first rows, with at most so many outputs to run but at least one row that has some."""
    rows = _outputs_to_run(shard, num_samples) // num_samples
    if len(rows) <= max_outputs:
        return shard, None
    cut = max(int(rows[max_outputs]), int(rows[0]) + 1)
    if rows[-1] < cut:
        return shard, None
    done = np.array(shard.done, np.int64)
    num_before = int(np.searchsorted(done, cut * num_samples))
    return (
        replace(shard, end=cut, done=shard.done[:num_before]),
        replace(shard, begin=cut, done=shard.done[num_before:]),
    )


def rows_to_run(shard: Shard, num_samples: int) -> list[int]:
    """Rows of a shard that have outputs to run, ascending."""
    rows: list[int] = np.unique(_outputs_to_run(shard, num_samples) // num_samples).tolist()
    return rows


def _outputs_to_run(shard: Shard, num_samples: int) -> npt.NDArray[np.int64]:
    """Each as row index * samples of a row + sample index, ascending."""
    outputs = np.arange(shard.begin * num_samples, shard.end * num_samples)
    return np.setdiff1d(outputs, np.array(shard.done, np.int64), assume_unique=True)
