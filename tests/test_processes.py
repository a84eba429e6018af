"""Which processes are ours, and that they are ended, those and no others."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.processes import (
    INSTANCE_VARIABLE,
    ProcessId,
    boot_id,
    find_instance,
    kill_all,
    kill_instance,
    read_leader,
    write_leader,
)

SLEEPER = "import sys, time; print('up', flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPER!r}])"


@contextmanager
def sleeping(marker: str | None = None, code: str = SLEEPER) -> Iterator[ProcessId]:
    environment = dict(os.environ)
    if marker is not None:
        environment[INSTANCE_VARIABLE] = marker
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = ProcessId.of(child.pid)
        assert process is not None
        try:
            yield process
        finally:
            child.kill()


@pytest.fixture
def marker() -> str:
    return f"test-{secrets.token_hex(8)}"


def test_a_process_is_told_from_a_later_one_with_its_pid() -> None:
    """Case 40 (its pid reused by another process): pid and start time must both agree."""
    me = ProcessId.current()
    assert me.is_running()
    assert not replace(me, start_time=me.start_time - 1).is_running()


def test_a_zombie_is_not_running() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE) as child:
        process = ProcessId.of(child.pid)
        assert child.stdout is not None
        child.stdout.read()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process is not None
        assert not process.is_running()


def test_marked_processes_are_found_by_prefix(marker: str) -> None:
    with sleeping(f"{marker}-one") as one, sleeping(f"{marker}-two") as two, sleeping():
        assert find_instance(f"{marker}-") == {one, two}
        assert find_instance(f"{marker}-one") == {one}


def test_grandchildren_carry_the_marker_and_are_ended_too(marker: str) -> None:
    with sleeping(marker, PARENT) as parent:
        doomed = find_instance(marker)
        assert parent in doomed
        assert len(doomed) == 2
        assert kill_instance(marker) == []
        assert not any(process.is_running() for process in doomed)


def test_members_of_a_dead_drivers_session_are_ended(marker: str) -> None:
    """Also those that have no marker, as after a change of their title."""
    with sleeping(code=PARENT) as leader:
        (orphan,) = find_instance(marker, [leader]) - {leader}
        kill_all([leader])
        assert find_instance(marker, [leader]) == {orphan}
        assert kill_instance(marker, [leader]) == []
        assert not orphan.is_running()


def test_a_later_process_with_the_leaders_pid_leads_another_session(marker: str) -> None:
    with sleeping() as other:
        reused = replace(other, start_time=other.start_time - 1)
        assert find_instance(marker, [reused]) == set()
        assert find_instance(marker, [other]) == {other}


def test_only_the_process_meant_is_killed(marker: str) -> None:
    with sleeping() as other:
        assert kill_all([replace(other, start_time=other.start_time + 1)]) == []
        assert other.is_running()
        assert kill_all([other]) == []
        assert not other.is_running()


def test_the_note_of_a_driver_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "driver.json"
    assert read_leader(path) is None
    write_leader(path, ProcessId.current())
    assert read_leader(path) == ProcessId.current()


def test_a_note_of_another_boot_or_a_damaged_one_names_nobody(tmp_path: Path) -> None:
    path = tmp_path / "driver.json"
    write_leader(path, ProcessId.current())
    path.write_text(path.read_text().replace(boot_id(), "another-boot"))
    assert read_leader(path) is None
    path.write_text('{"boot_id": ')
    assert read_leader(path) is None
