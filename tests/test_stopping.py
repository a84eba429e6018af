"""Signals at the runner in each phase of a job: it ends soon, leaves nothing, and can go on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import EngineConfig
from jobs.control import RunnerLock, ensure_runner, runner_status, stop_runner
from jobs.driver_process import clear_leftovers
from jobs.home import Home
from jobs.messages import AddShard, Command
from jobs.processes import ProcessId, find_instance, read_leader
from jobs.publish import publish_part
from jobs.records import Job, Part
from jobs.results import read_results
from jobs.runner import Runner
from jobs.stop_signal import StopSignal
from jobs.store import JobStore
from tests.cli_helpers import MODEL, started_process, write_prompts
from tests.runner_helpers import ScriptedDriver, make_home, queue_job, wait_until

STOPS_WITHIN_S = 5.0
NUM_ROWS = 400


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = make_home(tmp_path / "home")
    yield home
    stop_runner(home)
    clear_leftovers(home)


def instance(home: Home) -> set[ProcessId]:
    leader = read_leader(home.driver_path)
    return find_instance(f"{home.key}-", [leader] if leader else [])


def unix_sockets(home: Home) -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line for line in lines if f"ntx-{home.key}-" in line]


def stop_in(
    home: Home, store: JobStore, job: Job, phase: Callable[[], Any], number: signal.Signals
) -> None:
    """Start the runner, signal it when the job is in a phase, and see that nothing is left."""
    shared_memory = set(os.listdir("/dev/shm"))
    pid = ensure_runner(home).pid
    assert pid is not None
    wait_until(phase)
    os.kill(pid, number)
    signalled_at = time.monotonic()
    wait_until(lambda: store.job(job.id).state == "interrupted", 30)
    wait_until(lambda: runner_status(home).state == "absent", 30)
    took_s = time.monotonic() - signalled_at
    os.waitpid(pid, 0)
    assert took_s < STOPS_WITHIN_S
    assert instance(home) == set()
    assert unix_sockets(home) == []
    assert set(os.listdir("/dev/shm")) <= shared_memory
    assert not list(Path("/tmp").glob(f"ntx-{home.key}-*"))


@pytest.mark.slow
def test_signals_in_load_prefill_and_decode(home: Home, tmp_path: Path) -> None:
    """Case 91: SIGINT and SIGTERM end the work within five seconds; SIGHUP does nothing."""
    with JobStore(home.state_path) as store:
        config = EngineConfig(kv_memory_nbytes=64 << 20, sweep_tokens=32)
        job = queue_job(
            store,
            tmp_path / "in.parquet",
            [f"{row} " + "long " * 90 for row in range(NUM_ROWS)],
            engine=config,
            max_tokens=30,
        )

        def is_loading() -> bool:
            return store.job(job.id).state == "running" and bool(instance(home))

        def is_prefilling() -> bool:
            record = store.job(job.id).record
            return "device" in record and "progress" not in record

        def is_decoding() -> bool:
            return store.job(job.id).num_ok > 0

        stop_in(home, store, job, is_loading, signal.SIGINT)
        assert store.job(job.id).num_ok == 0
        stop_in(home, store, job, is_prefilling, signal.SIGTERM)
        pid = ensure_runner(home).pid
        assert pid is not None
        wait_until(is_loading)
        os.kill(pid, signal.SIGHUP)
        stop_in(home, store, job, is_decoding, signal.SIGTERM)
        stopped = store.job(job.id)
        assert 0 < stopped.num_ok < NUM_ROWS
        rows = read_results(store.finished(job.id))["row_index"].to_pylist()
        assert len(set(rows)) == len(rows) == stopped.num_ok


class OneShardDriver(ScriptedDriver):
    """Answers its first shard and no other."""

    def send(self, command: Command) -> None:
        if not (isinstance(command, AddShard) and self.shards):
            super().send(command)


def test_a_signal_while_a_part_is_published_leaves_it_whole(tmp_path: Path) -> None:
    """Case 91, commit: the part is committed, and its job goes on later."""
    home = make_home(tmp_path / "home")
    with JobStore(home.state_path) as store:
        job = queue_job(store, tmp_path / "in.parquet", ["x"] * 30, shard_rows=10, part_nbytes=1)

        def run(driver: type[ScriptedDriver], **options: Any) -> None:
            with RunnerLock(home) as lock:
                start: Any = lambda home: driver(store)  # noqa: E731
                values = {"start_driver": start, "idle_exit_s": 0.0, "store": store}
                Runner(home, lock, **values | options).run()

        with StopSignal() as stop:

            def publish(job: Job, part: Part, blobs: Any) -> None:
                if part.number == 1:
                    stop.set()
                publish_part(job, part, blobs)

            run(OneShardDriver, publish=publish, stop=stop)
        assert store.job(job.id).state == "interrupted"
        assert [part.state for part in store.parts(job.id)] == ["committed"] * 2
        with StopSignal() as stop:
            run(ScriptedDriver, stop=stop)
        assert store.job(job.id).state == "completed"
        assert len(read_results(store.finished(job.id))) == 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_at_run_pauses_the_job(home: Home, tmp_path: Path, number: int) -> None:
    prompts = write_prompts(tmp_path / "in.parquet", [f"x {row}" for row in range(2000)])
    with (
        JobStore(home.state_path) as store,
        started_process(
            home.path, "run", prompts, "--model", MODEL, "--max-tokens", "200", "--ignore-eos"
        ) as run,
    ):
        wait_until(lambda: store.list_jobs() and store.list_jobs()[0].state == "running")
        time.sleep(0.5)
        run.send_signal(number)
        signalled_at = time.monotonic()
        _, err = run.communicate(timeout=30)
        assert time.monotonic() - signalled_at < STOPS_WITHIN_S
        assert run.returncode == 130
        assert "paused; its" in err
        assert store.list_jobs()[0].state == "paused"


def test_two_signals_at_run_end_it_at_once(home: Home, tmp_path: Path) -> None:
    """The runner, here a stopped process, finishes on its own."""
    prompts = write_prompts(tmp_path / "in.parquet", [f"x {row}" for row in range(2000)])
    with (
        JobStore(home.state_path) as store,
        started_process(
            home.path, "run", prompts, "--model", MODEL, "--max-tokens", "200", "--ignore-eos"
        ) as run,
    ):
        wait_until(lambda: store.list_jobs() and store.list_jobs()[0].state == "running")
        time.sleep(0.5)
        pid = runner_status(home).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        run.send_signal(signal.SIGINT)
        wait_until(lambda: store.list_jobs()[0].request == "pause", 10)
        with pytest.raises(subprocess.TimeoutExpired):
            run.wait(0.3)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=5)
        assert run.returncode == 130
        assert "will be paused when its sweep ends" in err
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: store.list_jobs()[0].state == "paused", 15)
