"""A driver whose engines write down which rows they compute: `scripts/chaos.py` counts by that.

`python -m scripts.chaos_driver --fd N --temp-dir DIR` is a driver like jobs.driver.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine import Engine, FinishedRow
from jobs.driver import main
from jobs.engine_load import load_engine
from jobs.home import Home
from jobs.messages import StartJob

NOTES_NAME = "chaos.jsonl"


@dataclass(slots=True)
class Computed:
    """Rows of one engine: those that it admitted, and those of them that it finished."""

    begun: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)

    @property
    def on_board(self) -> set[int]:
        return self.begun - self.finished


class NotingEngine(Engine):
    """Notes rows when they are admitted and when they are finished, before they are handed over."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._name = secrets.token_hex(4)
        self._begun: set[int] = set()
        self._is_warm = False
        path = Home.open().path / NOTES_NAME
        self._notes = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def sweep(self) -> list[FinishedRow]:
        self.admit()
        on_board = {row for row, _ in self.rows_on_board()}
        if self._is_warm:
            self._note(begun=sorted(on_board - self._begun))
            self._begun |= on_board
        finished = super().sweep()
        if self._is_warm:
            self._note(finished=[row.row_index for row in finished])
        # The first row of all only brings kernels to be compiled.
        self._is_warm = self._is_warm or not self.has_work
        return finished

    def _note(self, **rows: list[int]) -> None:
        if any(rows.values()):
            os.write(self._notes, json.dumps({"engine": self._name, **rows}).encode() + b"\n")


def read_notes(home: Home) -> dict[str, Computed]:
    """What each engine of a state folder computed, in the order in which they began."""
    path, found = home.path / NOTES_NAME, dict[str, Computed]()
    for line in path.read_bytes().splitlines() if path.exists() else []:
        note = json.loads(line)
        computed = found.setdefault(note["engine"], Computed())
        computed.begun.update(note.get("begun", ()))
        computed.finished.update(note.get("finished", ()))
    return found


def load_noting_engine(command: StartJob) -> tuple[Engine, Mapping[str, Any]]:
    return load_engine(command, NotingEngine)


if __name__ == "__main__":
    from scripts.chaos_driver import load_noting_engine as importable

    main(importable)
