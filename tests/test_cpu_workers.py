"""The worker team: barriers, errors, and its end."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kernels.cpu import CpuOps
from kernels.cpu.barrier import barrier, break_barrier
from kernels.cpu.jit import cache_folder, compile_all
from kernels.cpu.workers import Team, TeamBroken, default_num_threads
from kernels.ops import KernelError

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    compile_all()


def wait(team: Team) -> None:
    if not barrier(team.barrier_state, team.num_workers):
        raise TeamBroken("another worker failed")


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_every_worker_runs_once_and_worker_0_is_the_caller(num_workers: int) -> None:
    team = Team(num_workers)
    seen: list[tuple[int, int]] = []
    for _ in range(50):
        seen.clear()
        team.run(lambda worker: seen.append((worker, threading.get_ident())))
        assert sorted(worker for worker, _ in seen) == list(range(num_workers))
        assert dict(seen)[0] == threading.get_ident()
    team.close()


def test_no_worker_passes_a_barrier_before_all_arrive() -> None:
    """More workers than cores, uneven work: every step sees all of the step before."""
    team = Team(6)
    steps = np.zeros(6, np.int64)
    wrong: list[int] = []

    def body(worker: int) -> None:
        for step in range(1, 101):
            steps[worker] = step
            if worker == step % 6:
                time.sleep(0.0005)
            wait(team)
            if steps.min() < step:
                wrong.append(step)
            wait(team)

    team.run(body)
    assert not wrong
    team.close()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_releases_the_others_and_is_raised(failing: int) -> None:
    team = Team(3)

    def body(worker: int) -> None:
        if worker == failing:
            raise ValueError("bad row")
        wait(team)

    for _ in range(3):
        with pytest.raises(ValueError, match="bad row"):
            team.run(body)
    team.run(lambda worker: wait(team))  # the team works on
    team.close()


def test_an_interrupt_while_others_work_stops_them_and_is_raised() -> None:
    team = Team(3)

    def body(worker: int) -> None:
        if worker == 1:
            time.sleep(0.1)  # the caller is done by then and waits for the others
            os.kill(os.getpid(), signal.SIGINT)
        if worker == 2:
            wait(team)

    with pytest.raises(KeyboardInterrupt):
        team.run(body)
    team.run(lambda worker: wait(team))
    team.close()


def test_a_broken_barrier_lets_nobody_wait() -> None:
    team = Team(2)
    break_barrier(team.barrier_state)
    assert not barrier(team.barrier_state, 2)
    team.close()


def test_close_is_idempotent_and_a_closed_team_refuses_work() -> None:
    team = Team(3)
    threads = list(team._threads)
    team.close()
    team.close()
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(KernelError, match="stopped"):
        team.run(lambda worker: None)


def test_a_dropped_team_ends_its_threads() -> None:
    team = Team(3)
    threads = list(team._threads)
    team.run(lambda worker: None)
    del team
    gc.collect()
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)


def test_a_waiting_team_keeps_nothing_of_the_last_run_alive() -> None:
    class Sweep:
        pass

    team = Team(2)
    sweep = Sweep()
    held = gc.get_referrers

    def body(worker: int, sweep: Sweep = sweep) -> None:
        assert sweep

    team.run(body)
    del body
    time.sleep(0.05)
    assert [one for one in held(sweep) if not hasattr(one, "f_code") and one is not globals()] == []
    team.close()


def test_the_interpreter_ends_while_a_team_waits() -> None:
    code = "from kernels.cpu.workers import Team; t = Team(4); t.run(lambda w: None); print('end')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "end", "")


def test_number_of_threads() -> None:
    assert default_num_threads() >= 1
    with contextlib.closing(CpuOps(None)) as ops:
        assert ops.num_workers == default_num_threads()
    with pytest.raises(KernelError, match="num_threads is 0"):
        CpuOps(0)


def test_compiled_code_is_kept_under_the_state_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NTX_HOME", str(tmp_path))
    assert cache_folder().parent == tmp_path / "numba"
    monkeypatch.delenv("NTX_HOME")
    assert cache_folder().parent.parent.name == "ntx-batch"
