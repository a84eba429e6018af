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
    kill_all,
    kill_instance,
    marked_processes,
    read_instance,
    write_instance,
)

SLEEPER = "import sys, time; print('up', flush=True); time.sleep(60)"


@contextmanager
def sleeping(marker: str | None = None, code: str = SLEEPER) -> Iterator[ProcessId]:
    environment = dict(os.environ)
    if marker is not None:
        environment[INSTANCE_VARIABLE] = marker
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE
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
        assert set(marked_processes(f"{marker}-")) == {one, two}
        assert marked_processes(f"{marker}-one") == [one]


def test_grandchildren_carry_the_marker_and_are_ended_too(marker: str) -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPER!r}])"
    with sleeping(marker, code) as parent:
        doomed = marked_processes(marker)
        assert parent in doomed
        assert len(doomed) == 2
        assert kill_instance(marker) == []
        assert not any(process.is_running() for process in doomed)


def test_only_the_process_meant_is_killed(marker: str) -> None:
    with sleeping() as other:
        assert kill_all([replace(other, start_time=other.start_time + 1)]) == []
        assert other.is_running()
        assert kill_all([other]) == []
        assert not other.is_running()


def test_processes_noted_by_the_last_runner_are_ended_without_a_marker(
    tmp_path: Path, marker: str
) -> None:
    path = tmp_path / "instance.json"
    with sleeping() as noted:
        write_instance(path, [noted])
        assert read_instance(path) == [noted]
        kill_instance(marker, read_instance(path))
        assert not noted.is_running()


def test_notes_of_another_boot_or_damaged_ones_name_nobody(tmp_path: Path) -> None:
    path = tmp_path / "instance.json"
    assert read_instance(path) == []
    write_instance(path, [ProcessId.current()])
    path.write_text(path.read_text().replace(boot_id(), "another-boot"))
    assert read_instance(path) == []
    path.write_text('{"boot_id": ')
    assert read_instance(path) == []
