"""An engine that says far too much while it loads, as the driver program of a test's runner."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from engine import Engine
from jobs.driver import main
from jobs.engine_load import load_engine
from jobs.messages import StartJob

NUM_LINES = 20_000
LINE = "what I always wanted to say, again and again and again, to whoever may read it"


def load_chatty_engine(command: StartJob) -> tuple[Engine, Mapping[str, Any]]:
    for number in range(NUM_LINES):
        print(number, LINE, file=sys.stderr)
        os.write(1, f"{number} {LINE}\n".encode())
    print("last words", file=sys.stderr, flush=True)
    return load_engine(command)


if __name__ == "__main__":
    from tests.chatty_engine import load_chatty_engine as importable

    main(importable)
