"""Which rows to run next, and how many at once, after rows went down with their engine.

Pure policy. The rows on board at a loss are a group: they run again before all others, at most half
as many at once as were on board. A loss among them makes a smaller group, down to single rows, and
a row that is alone when the engine is lost, again and again, is not run any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

MAX_LONE_LOSSES = 3

LossCode = Literal["worker_crashed", "out_of_memory", "internal_error"]


@dataclass(frozen=True, slots=True)
class RowLoss:
    """Why rows on board were lost. code: the error code of a row that turns out to be the cause"""

    code: LossCode
    reason: str


@dataclass(slots=True)
class _Group:
    rows: set[int]
    max_rows: int


class Isolation:
    """The groups of one job, innermost last, and the rows that are given up.

    failed: given up rows with what to say of each; they end as error rows
    """

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._lone_losses: Counter[int] = Counter()
        self._failed: dict[int, RowLoss] = {}
        self.num_failed_in_series = 0

    @property
    def failed(self) -> Mapping[int, RowLoss]:
        return self._failed

    @property
    def rows(self) -> list[int]:
        """Rows to run before all others, ascending; empty where any may run."""
        return sorted(self._groups[-1].rows) if self._groups else []

    @property
    def all_rows(self) -> frozenset[int]:
        """Rows of all groups."""
        return frozenset().union(*(group.rows for group in self._groups))

    @property
    def max_rows(self) -> int | None:
        """Most rows on board while `rows` run."""
        return self._groups[-1].max_rows if self._groups else None

    def accuse(self, rows: Collection[int], loss: RowLoss) -> None:
        """These rows, at least one, were on board when an engine was lost or its sweep failed."""
        self._groups.append(_Group(set(rows), max(1, len(rows) // 2)))
        if len(rows) > 1:
            return
        (row,) = rows
        self._lone_losses[row] += 1
        # An exception comes again; a death may have come from outside.
        if loss.code == "internal_error" or self._lone_losses[row] >= MAX_LONE_LOSSES:
            self._failed[row] = _told_times(loss, self._lone_losses[row])
            self.num_failed_in_series += 1

    def settle(self, rows: Iterable[int], num_ok: int) -> None:
        """These rows are finished, `num_ok` of them well."""
        done = set(rows)
        for group in self._groups:
            group.rows -= done
        while self._groups and not self._groups[-1].rows:
            self._groups.pop()
        for row in done & self._failed.keys():
            del self._failed[row]
        if num_ok:
            self.num_failed_in_series = 0


def _told_times(loss: RowLoss, times: int) -> RowLoss:
    if times == 1:
        return loss
    return RowLoss(loss.code, f"{loss.reason}; so {times} times with this row alone on board")
