"""What long runs, and runs that died, leave on disk and in memory: bounded, and cleared away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import temp_folder
from jobs.temp_folder import (
    MIN_ABANDONED_S,
    clear_abandoned_folders,
    hold_folder,
    make_temp_folder,
    remove_worker_logs,
)

KEY = "0123456789ab"


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """One root for temp folders, of this test alone; no other is looked at."""
    with tempfile.TemporaryDirectory(prefix="n", dir="/tmp") as root:
        monkeypatch.setattr(temp_folder, "temp_roots", lambda _: [Path(root)])
        yield {"NTX_TEMP": root}


def later() -> float:
    return time.time() + 2 * MIN_ABANDONED_S


def nobody(key: str) -> bool:
    return False


def test_a_folder_whose_runner_and_driver_are_dead_is_removed_whatever_state_folder_it_was_of(
    environ: dict[str, str],
) -> None:
    """Case 68: old sessions are removed; those that live, after a kill -9 too, are not."""
    folder = make_temp_folder(f"ntx-{KEY}-", environ)
    fd = hold_folder(folder)
    driver = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, pass_fds=[fd])
    assert clear_abandoned_folders(environ, nobody, now=later()) == []
    os.close(fd)
    assert clear_abandoned_folders(environ, nobody, now=later()) == [], "its driver lives"
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert driver.stdin is not None
    driver.stdin.close()
    assert clear_abandoned_folders(environ, lambda key: key == KEY, now=later()) == []
    assert clear_abandoned_folders(environ, nobody) == [], "it may just have been made"
    assert clear_abandoned_folders(environ, nobody, now=later()) == [folder]
    assert not folder.exists()


def test_what_is_not_of_a_run_of_this_user_stays(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(environ["NTX_TEMP"])
    never_held = make_temp_folder(f"ntx-{KEY}-", environ)
    for name in ("ntx-doctor-abcd1234", "other", f"ntx-{KEY}-abcd1234x"):
        (root / name).mkdir()
        os.close(hold_folder(root / name))
    (root / f"ntx-{KEY}-aaaaaaaa").symlink_to(root / "other")
    kept = set(root.iterdir())
    assert clear_abandoned_folders(environ, nobody, now=later()) == []
    os.close(hold_folder(never_held))
    me = os.getuid()
    with monkeypatch.context() as other_user:
        other_user.setattr(os, "getuid", lambda: me + 1)
        assert clear_abandoned_folders(environ, nobody, now=later()) == []
    assert set(root.iterdir()) == kept


def test_the_logs_of_a_worker_that_ended_are_removed_and_no_others(tmp_path: Path) -> None:
    logs = tmp_path / "session_latest" / "logs"
    (logs / "export_events").mkdir(parents=True)
    names = ["worker-ab-01000000-{}.err.1", "python-core-worker-ab_{}.log"]
    names.append("export_events/event_EXPORT_TASK_{}.log")
    for name in [*(name.format(pid) for name in names for pid in (12, 123)), "raylet.out"]:
        (logs / name).touch()
    remove_worker_logs(tmp_path, 12)
    left = sorted(str(path.relative_to(logs)) for path in logs.rglob("*") if path.is_file())
    assert left == sorted([*(name.format(123) for name in names), "raylet.out"])
    remove_worker_logs(tmp_path / "absent", 12)
