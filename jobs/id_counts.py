"""How many rows have an id that another row had before. They all run: a row's key is its number."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

ID_COLUMNS = ("id", "custom_id")
MAX_COUNTED_ROWS = 4_000_000  # 8 bytes each


class IdCounter:
    """Counts nulls and repetitions in the id column of the first rows.

    max_rows: rows after these are not looked at
    """

    def __init__(self, max_rows: int | None = None) -> None:
        self._max_rows = min(max_rows or MAX_COUNTED_ROWS, MAX_COUNTED_ROWS)
        self._num_rows = 0
        self._num_null = 0
        self._hashes = array("q")

    @property
    def is_full(self) -> bool:
        return self._num_rows >= self._max_rows

    def add(self, values: Iterable[Any]) -> None:
        """Take the ids of the next rows."""
        for value in values:
            if self.is_full:
                return
            self._num_rows += 1
            if value is None:
                self._num_null += 1
            else:
                # Of numbers the text: their own hash is weak, that of -1 is that of -2.
                self._hashes.append(hash(value if isinstance(value, str) else repr(value)))

    def facts(self) -> dict[str, int]:
        """What is worth a warning: repeated ids beyond the first of each, and nulls; else empty."""
        hashes = np.array(self._hashes, np.int64)
        hashes.sort()
        num_repeated = int(np.count_nonzero(hashes[1:] == hashes[:-1]))
        facts = {"duplicate_ids": num_repeated, "null_ids": self._num_null}
        return {name: count for name, count in facts.items() if count}


def id_column(names: Iterable[str]) -> str | None:
    """The column of ids among these, by its name."""
    known = set(names)
    return next((name for name in ID_COLUMNS if name in known), None)
