"""Where Ray keeps its sockets and logs: a short, private folder that is ours alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from jobs.records import RunnerError

TEMP_VARIABLE = "NTX_TEMP"
# A Unix socket's path has at most 107 bytes; ours and Ray's names come after the temp folder.
RAY_FOLDER = "r"
_SOCKET_NAME = f"/{RAY_FOLDER}/session_2000-01-01_00-00-00_000000_1234567/sockets/plasma_store"
MAX_ROOT_LEN = 107 - len("/ntx-0123456789ab-01234567") - len(_SOCKET_NAME)
PREFIX = "ntx-"
MIN_ABANDONED_S = 60.0  # between the making of a folder and its lock nobody seems to use it
_LOCK_NAME = "in-use"
_OF_A_STATE_FOLDER = re.compile(PREFIX + "([0-9a-f]{12})-[a-z0-9_]{8}")
MIN_FREE_NBYTES = 200 << 20
MAX_USED_SHARE = 0.95
MIN_SHM_NBYTES = 88 << 20  # Ray's object store and a little


def temp_roots(environ: Mapping[str, str]) -> list[Path]:
    """Folders to make ours in, the first choice first."""
    named = [environ.get(TEMP_VARIABLE), environ.get("TMPDIR"), tempfile.gettempdir(), "/tmp"]
    others = [environ.get("XDG_RUNTIME_DIR"), "/var/tmp"]
    return [Path(root) for root in dict.fromkeys([*named, *others]) if root]


def make_temp_folder(prefix: str, environ: Mapping[str, str]) -> Path:
    """Make a folder that only this user can enter, named `prefix` and something.

    Raises RunnerError: no folder is short and writable, or not the one that NTX_TEMP names.
    """
    named = environ.get(TEMP_VARIABLE)
    roots = [Path(named)] if named else temp_roots(environ)
    refusals = []
    for root in roots:
        if len(os.fsencode(root)) > MAX_ROOT_LEN:
            refusals.append(f"{root} is longer than the {MAX_ROOT_LEN} bytes that sockets leave")
            continue
        try:
            return Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        except OSError as error:
            refusals.append(f"{root}: {error.strerror}")
    raise RunnerError(
        f"no folder for Ray's sockets and logs: {'; '.join(refusals)}; name a short, writable one "
        f"on a local disk with {TEMP_VARIABLE}"
    )


def clear_temp_folders(prefix: str, environ: Mapping[str, str]) -> None:
    """Remove folders that `make_temp_folder` made with this prefix, in any of the roots."""
    if not prefix:
        raise ValueError("an empty prefix would match everything in the temp roots, others' too")
    for root in temp_roots(environ):
        for folder in root.glob(f"{prefix}*"):
            shutil.rmtree(folder, ignore_errors=True)


def remove_worker_logs(ray_dir: Path, pid: int) -> None:
    """Remove what a worker process of a Ray of ours logged, once it has ended as it should.

    Ray keeps the log files of all workers that it ever had; each of them it rotates by itself.

    ray_dir: the temp folder that Ray was given
    """
    logs = ray_dir / "session_latest" / "logs"
    for name in (f"worker-*-{pid}.*", f"python-core-worker-*_{pid}.*", f"*events/*_{pid}.log"):
        for path in logs.glob(name):
            path.unlink(missing_ok=True)


def hold_folder(folder: Path) -> int:
    """Mark a folder as in use, as long as any process has the returned descriptor open."""
    fd = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def clear_abandoned_folders(
    environ: Mapping[str, str], is_alive: Callable[[str], bool], *, now: float | None = None
) -> list[Path]:
    """Remove what runners of any state folder of this user left and nobody uses any more.

    is_alive: asked for the key of a state folder, whether processes are left of its runs
    now: Unix seconds; None is now

    Returns what was removed.
    """
    now = time.time() if now is None else now
    removed = []
    for root in temp_roots(environ):
        for folder in root.glob(f"{PREFIX}*"):
            named = _OF_A_STATE_FOLDER.fullmatch(folder.name)
            if named and _is_abandoned(folder, now) and not is_alive(named[1]):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _is_abandoned(folder: Path, now: float) -> bool:
    """Whether it is an old folder of this user, held once and held by nobody now."""
    with contextlib.suppress(OSError):
        found = folder.lstat()
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if ours and now - found.st_mtime >= MIN_ABANDONED_S:
            fd = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(fd)
            return True
    return False


def space_warnings(environ: Mapping[str, str], shared_memory: str = "/dev/shm") -> Iterator[str]:
    """What may become tight: the disk below the temp folder, and shared memory."""
    root = next((root for root in temp_roots(environ) if root.is_dir()), None)
    if root is not None:
        usage = shutil.disk_usage(root)
        if usage.used > MAX_USED_SHARE * usage.total or usage.free < MIN_FREE_NBYTES:
            yield (
                f"the disk of {root}, where Ray keeps its logs, is {usage.used / usage.total:.0%} "
                f"full ({usage.free >> 20} MiB free); {TEMP_VARIABLE} names another folder"
            )
    if os.path.isdir(shared_memory):
        free = shutil.disk_usage(shared_memory).free
        if free < MIN_SHM_NBYTES:
            yield (
                f"{shared_memory} has {free >> 20} MiB free; Ray's object store, which holds no "
                "prompts and no results, uses the temp folder instead"
            )
