"""A full disk: how it is known, and the room kept to write down that it is."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from jobs.records import DiskFullError

SPARE_NBYTES = 1 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or one that it came from, says that there is no room on a disk."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DiskFullError):
            return True
        if isinstance(cause, OSError) and cause.errno in _NO_SPACE:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def keep_spare(path: Path) -> None:
    """Take room on the disk, where there is some, for `release_spare`."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(fd, 0, SPARE_NBYTES)
        finally:
            os.close(fd)


def release_spare(path: Path) -> None:
    """Give it up."""
    path.unlink(missing_ok=True)
