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
from jobs.driver_process import DriverProcess, EngineLostError
from jobs.home import Home
from jobs.memory import private_nbytes
from jobs.messages import ActorStarted, StartJob
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


def loss(driver: DriverProcess) -> EngineLostError:
    with pytest.raises(EngineLostError) as lost:
        for _ in range(100):
            driver.wait(0.1)
    return lost.value


def test_an_engine_that_works_within_its_limits_is_not_lost(home: Home) -> None:
    with watched(home, start(memory_nbytes=1 << 40)) as (driver, _):
        Board(home.board_path, 7).begin((4, 5))
        for _ in range(3):
            assert driver.wait(0.05) == []
        assert driver.rows_on_board() == (4, 5)


def test_a_sweep_that_takes_too_long_is_a_loss_charged_to_its_rows(home: Home) -> None:
    with watched(home, start(), watchdog_s=0.3) as (driver, _):
        Board(home.board_path, 7).begin((4, 5))
        error = loss(driver)
        assert error.code == "worker_crashed"
        assert "0 s are allowed" in str(error)
        assert driver.rows_on_board() == (4, 5)


def test_long_sweeps_are_allowed_ten_times_what_they_take(home: Home) -> None:
    with watched(home, start(), watchdog_s=0.0) as (driver, _):
        board = Board(home.board_path, 7)
        board.begin((1,))
        time.sleep(0.3)
        board.end()
        board.begin((1,))
        assert driver.wait(0.5) == []
        state = read_board(home.board_path, 7)
        assert state is not None
        assert 0.3 <= state.mean_step_s < 2


def test_more_memory_than_the_job_allows_is_a_loss(home: Home) -> None:
    with watched(home, start(memory_nbytes=1 << 20)) as (driver, _):
        error = loss(driver)
        assert error.code == "out_of_memory"
        assert "its limit under --memory is 1,048,576" in str(error)


def test_a_death_of_the_actor_is_charged_to_rows_and_that_of_the_driver_is_not(home: Home) -> None:
    with watched(home, start()) as (driver, pid):
        os.kill(pid, signal.SIGKILL)
        # Here the actor is the driver, whose death explains the actor's.
        assert loss(driver).code is None


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
