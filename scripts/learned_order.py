"""An order of rows that learns lengths as rows end, to measure what that rule would give.

Rows of a beginning that few have been started of come first. Then come those of the beginning whose
rows generate most: its tokens so far, rows on board included, for each row that has ended. So a
beginning whose first rows do not end counts as long before one of them has. Few rows wait in the
engine, because their order is fixed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine import Engine, FinishedRow, Request
from engine.prefix_tree import pieces_of
from scripts.simulated_rows import Rows

FIRST_ROWS = 3  # of each beginning
WAITING_ROWS = 16  # in the engine


@dataclass(slots=True)
class _Beginning:
    """Rows that begin with the same page. num_tokens: that the ended ones generated"""

    waiting: deque[Request] = field(default_factory=deque)
    num_started: int = 0
    num_ended: int = 0
    num_tokens: int = 0

    def rank(self, tokens_on_board: int) -> tuple[bool, float]:
        if self.num_started < FIRST_ROWS:
            return True, -self.num_started
        return False, (self.num_tokens + tokens_on_board) / max(self.num_ended, 0.5)


class LearnedFeed:
    """Rows in the order described above."""

    def __init__(self, rows: Rows, context_length: int, end_id: int) -> None:
        self._beginnings: dict[bytes, _Beginning] = {}
        self._of_row: list[_Beginning] = []
        for index in range(len(rows)):
            request = rows.request(index, end_id)
            first_page = pieces_of(request.token_ids)[0]
            beginning = self._beginnings.setdefault(first_page, _Beginning())
            beginning.waiting.append(request)
            self._of_row.append(beginning)

    def fill(self, engine: Engine) -> None:
        on_board = self._tokens_on_board(engine) if engine.num_waiting < WAITING_ROWS else {}
        while engine.num_waiting < WAITING_ROWS:
            waiting = [each for each in self._beginnings.values() if each.waiting]
            if not waiting:
                break
            best = max(waiting, key=lambda each: each.rank(on_board.get(id(each), 0)))
            engine.add(best.waiting.popleft())
            best.num_started += 1

    def finish(self, row: FinishedRow) -> None:
        beginning = self._of_row[row.row_index]
        beginning.num_ended += 1
        beginning.num_tokens += row.completion_tokens

    def _tokens_on_board(self, engine: Engine) -> dict[int, int]:
        tokens: dict[int, int] = {}
        for row in engine._running.values():
            key = id(self._of_row[row.request.row_index])
            generated = row.num_known - len(row.request.token_ids)
            tokens[key] = tokens.get(key, 0) + generated
        return tokens
