"""What the runner sees of an engine from outside: its rows, its memory, its sweeps, its death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engine import EngineConfig
from jobs.board import Board, create_board, read_board
from jobs.driver_process import DriverLostError, DriverProcess
from jobs.home import Home
from jobs.memory import private_nbytes
from jobs.messages import ActorStarted, EngineLost, JobReady, StartJob
from jobs.processes import ProcessId, read_leader
from jobs.records import JobSpec, Manifest
from tests.runner_helpers import make_home, wait_until

SPEC = JobSpec(input="in.parquet", model="model.gguf")


def start(memory_nbytes: int | None = None) -> StartJob:
    spec = replace(SPEC, engine=EngineConfig(memory_nbytes=memory_nbytes))
    return StartJob(7, spec, Manifest(files=()), 0.0)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return make_home(tmp_path / "home")


@contextmanager
def watched(
    home: Home, command: StartJob, watchdog_s: float = 60.0
) -> Iterator[tuple[DriverProcess, int]]:
    """A driver that does nothing, and the pid of what it calls its engine actor."""
    driver = DriverProcess(home, module="tests.silent_driver", watchdog_s=watchdog_s)
    try:
        driver.send(command)
        events = wait_until(
            lambda: [e for e in driver.wait(0.1) if isinstance(e, ActorStarted)], 20
        )
        yield driver, events[0].process.pid
    finally:
        driver.close()


def loss(driver: DriverProcess) -> EngineLost:
    lost: list[EngineLost] = wait_until(
        lambda: [event for event in driver.wait(0.1) if isinstance(event, EngineLost)], 20
    )
    assert len(lost) == 1
    return lost[0]


def test_an_engine_that_works_within_its_limits_is_not_lost(home: Home) -> None:
    with watched(home, start(memory_nbytes=1 << 40)) as (driver, _):
        Board(home.board_path(0), 7).begin((4, 5))
        wait_until(lambda: [e for e in driver.wait(0.1) if isinstance(e, JobReady)], 20)
        for _ in range(3):
            assert driver.wait(0.05) == []


def test_a_sweep_that_takes_too_long_is_a_loss_charged_to_its_rows(home: Home) -> None:
    with watched(home, start(), watchdog_s=0.3) as (driver, pid):
        Board(home.board_path(0), 7).begin((4, 5))
        lost = loss(driver)
        assert (lost.attempt, lost.engine, lost.code) == (7, 0, "worker_crashed")
        assert "0 s are allowed" in lost.reason
        assert lost.rows == (4, 5)
        process = ProcessId.of(pid)
        assert process is None or not process.is_running(), "its memory is free again"


def test_long_sweeps_are_allowed_ten_times_what_they_take(home: Home) -> None:
    with watched(home, start(), watchdog_s=0.0) as (driver, _):
        board = Board(home.board_path(0), 7)
        board.begin((1,))
        time.sleep(0.3)
        board.end()
        board.begin((1,))
        assert not any(isinstance(event, EngineLost) for event in driver.wait(0.5))
        state = read_board(home.board_path(0), 7)
        assert state is not None
        assert 0.3 <= state.mean_step_s < 2


def test_more_memory_than_the_job_allows_is_a_loss(home: Home) -> None:
    with watched(home, start(memory_nbytes=1 << 10)) as (driver, _):
        lost = loss(driver)
        assert lost.code == "out_of_memory"
        assert "its limit under --memory is 1,024" in lost.reason


def test_the_death_of_one_engine_is_charged_to_its_rows_alone(home: Home) -> None:
    with watched(home, start()) as (driver, _):
        driver.send(replace(start(), attempt=8, engine=1))
        second = wait_until(
            lambda: [e for e in driver.wait(0.1) if isinstance(e, ActorStarted)], 20
        )[0]
        Board(home.board_path(0), 7).begin((4, 5))
        Board(home.board_path(1), 8).begin((6,))
        os.kill(second.process.pid, signal.SIGKILL)
        lost = loss(driver)
        assert (lost.attempt, lost.engine, lost.rows) == (8, 1, (6,))
        assert f"(pid {second.process.pid}) is gone" in lost.reason
        later = [event for event in driver.wait(0.5) if isinstance(event, EngineLost)]
        assert later == [], "it is told once, and the other works on"


def test_the_death_of_the_driver_is_charged_to_no_rows(home: Home) -> None:
    with watched(home, start()) as (driver, _):
        leader = read_leader(home.driver_path)
        assert leader is not None
        os.kill(leader.pid, signal.SIGKILL)
        with pytest.raises(DriverLostError):
            for _ in range(100):
                driver.wait(0.1)


# ---- the board ---------------------------------------------------------------------------


def test_a_board_outlives_the_process_that_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "board"
    create_board(path)
    code = (
        "import os, signal, sys; from jobs.board import Board;"
        "Board(sys.argv[1], 3).begin(range(500)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, path], cwd=Path(__file__).parents[1], check=False)
    state = read_board(path, 3)
    assert state is not None
    assert state.rows == tuple(range(500))
    assert state.began_at is not None


def test_a_board_of_another_attempt_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "board"
    assert read_board(path, 1) is None
    create_board(path)
    assert read_board(path, 1) is None
    with Board(path, 1) as board:
        board.begin((9,))
        assert read_board(path, 2) is None
        board.end()
        state = read_board(path, 1)
    assert state is not None
    assert (state.rows, state.began_at) == ((), None)
    create_board(path)
    assert read_board(path, 1) is None


def test_an_absurdly_long_board_is_cut_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "board"
    create_board(path)
    with Board(path, 1) as board:
        board.begin(range(10**6))
    state = read_board(path, 1)
    assert state is not None
    assert len(state.rows) > 100_000
    assert path.stat().st_size == 1 << 20


# ---- memory ------------------------------------------------------------------------------


def test_a_process_past_its_own_limit_gets_a_memory_error() -> None:
    code = (
        "import numpy as np; from jobs.memory import limit_own_memory;"
        "limit_own_memory(200 << 20); a = np.ones(100 << 20, np.uint8);\n"
        "try: np.ones(200 << 20, np.uint8)\n"
        "except MemoryError: print('refused')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "refused\n"


def test_private_memory_counts_what_is_touched() -> None:
    before = private_nbytes(os.getpid())
    hoard = bytearray(os.urandom(1)) * (64 << 20)
    assert 60 << 20 < private_nbytes(os.getpid()) - before < 100 << 20
    assert len(hoard) == 64 << 20
    assert private_nbytes(2**22 + 1) == 0
