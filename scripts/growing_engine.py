"""An engine whose rows reserve KV pages as they grow, to measure what that rule would give.

The engine reserves all that a row's limit allows, so that growing cannot fail. Where rows end long
before their limits, most of that stays empty. Here a row reserves what it has and a little more,
and where pages run out the row that came last is preempted.
"""

from __future__ import annotations

from engine import Engine
from engine.kv_cache import RowKv, pages_for
from engine.rows import WaitingRow
from engine.scheduler import LOOK_AHEAD, admission_budget
from kernels.ops import PAGE_TOKENS

SPARE_SWEEPS = 8  # of growth of all rows on board, for which pages are free when others come


class GrowingEngine(Engine):
    """Admits by what rows hold, not by what they may come to hold."""

    def admit(self) -> None:
        self._grow()
        rows = [row.progress() for row in self._running.values()]
        budget = admission_budget(rows, self.plan.sweep_tokens)
        self._keep_for_waiting()
        passed: list[WaitingRow] = []
        while self._waiting and self._free_slots and budget > 0 and len(passed) < LOOK_AHEAD:
            row = self._waiting.popleft()
            if self._cache.is_coming(row.prompt):
                passed.append(row)
                continue
            kv = self._open(row)
            if kv is None:
                passed.append(row)
                break
            self._take_on_board(row, kv)
            budget -= row.num_tokens - kv.num_tokens
        self._waiting.extendleft(reversed(passed))

    def _open(self, row: WaitingRow) -> RowKv | None:
        most = min(self._most_stored(row.request), row.num_tokens + PAGE_TOKENS)
        spare = -(-len(self._running) * SPARE_SWEEPS // PAGE_TOKENS)
        if pages_for(most) + spare > self._cache.num_unreserved and self._running:
            return None
        return self._cache.open_row(most, row.prompt)

    def _grow(self) -> None:
        """Give each row the page that its next token needs; those that came first, first."""
        for slot, row in list(self._running.items()):
            while slot in self._running and pages_for(row.num_known) > row.kv.max_pages:
                if self._cache.num_unreserved:
                    row.kv.max_pages += 1
                    self._cache._reserved += 1
                else:
                    self.preempt(1)
