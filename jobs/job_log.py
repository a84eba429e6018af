"""What a runner writes for people: its own log, and one for each job, none without end."""

from __future__ import annotations

import contextlib
import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
MAX_LOG_NBYTES = 8 << 20


class job_log:
    """Within it, what is logged goes into the job's own file too.

    Where the file cannot be made, as on a full disk, it does nothing.
    """

    def __init__(self, path: Path) -> None:
        self._handler: logging.Handler | None = None
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._handler = RotatingFileHandler(path, maxBytes=MAX_LOG_NBYTES, backupCount=1)
            self._handler.setFormatter(logging.Formatter(LOG_FORMAT))

    def __enter__(self) -> None:
        if self._handler is not None:
            logging.getLogger("jobs").addHandler(self._handler)

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            logging.getLogger("jobs").removeHandler(self._handler)
            self._handler.close()


def cap_log(path: Path, max_nbytes: int = MAX_LOG_NBYTES) -> None:
    """Halve a log that others append to when it is too long; its last half stays."""
    with contextlib.suppress(OSError):
        if path.stat().st_size <= max_nbytes:
            return
        with path.open("r+b") as file:
            file.seek(-max_nbytes // 2, 2)
            kept = file.read().partition(b"\n")[2]
            file.seek(0)
            file.truncate()
            file.write(kept)
