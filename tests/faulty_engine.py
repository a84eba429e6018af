"""An engine that certain rows bring down, as the driver program of a test's runner.

`python -m tests.faulty_engine --fd N --temp-dir DIR` is a driver like jobs.driver.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import numpy as np

from engine import Engine, FinishedRow
from jobs.driver import main
from jobs.engine_load import load_engine
from jobs.messages import StartJob

KILLS, RAISES, EATS = 7, 12, 17
HUNGRY_NBYTES = 4 << 30


class FaultyEngine(Engine):
    """Fails in a sweep that has one of the rows above on board, and only where they are there."""

    def sweep(self) -> list[FinishedRow]:
        self.admit()
        rows = {row for row, _ in self.rows_on_board()}
        if KILLS in rows:
            os.kill(os.getpid(), signal.SIGKILL)
        if RAISES in rows:
            raise ValueError(f"row {RAISES} is not to my taste")
        if EATS in rows:
            hoard = [np.ones(8 << 20, np.uint8) for _ in range(HUNGRY_NBYTES >> 23)]
            raise AssertionError(f"{len(hoard)} pieces fitted")
        return super().sweep()


def load_faulty_engine(command: StartJob) -> tuple[Engine, Mapping[str, Any]]:
    return load_engine(command, FaultyEngine)


if __name__ == "__main__":
    from tests.faulty_engine import load_faulty_engine as importable

    main(importable)
