"""What long runs, and runs that died, leave on disk and in memory: bounded, and cleared away."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import driver_process, temp_folder
from jobs import job_log as job_log_module
from jobs import runner as runner_module
from jobs.control import RunnerLock
from jobs.driver_process import DriverProcess
from jobs.home import Home
from jobs.job_log import cap_log, job_log
from jobs.messages import Event
from jobs.publish import publish_part
from jobs.records import Job, Part
from jobs.runner import Runner
from jobs.stop_signal import StopSignal
from jobs.store import JobStore
from jobs.temp_folder import (
    MIN_ABANDONED_S,
    PREFIX,
    RAY_FOLDER,
    clear_abandoned_folders,
    hold_folder,
    make_temp_folder,
    remove_worker_logs,
    temp_roots,
)
from scripts.bench_long import Sample, judge
from scripts.bench_long import run as run_long_job
from tests.chatty_engine import LINE, NUM_LINES
from tests.golden import GOLDEN
from tests.runner_helpers import MODEL, ScriptedDriver, make_home, queue_job

KEY = "0123456789ab"
MAX_RAY_LOG_NBYTES = 256 << 10


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


# ---- logs --------------------------------------------------------------------------------


def test_the_log_of_a_job_is_two_files_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_log_module, "MAX_LOG_NBYTES", 10_000)
    path = tmp_path / "job" / "log.txt"
    log = logging.getLogger("jobs.test_long_runs")
    for attempt in range(3):
        with job_log(path):
            for number in range(500):
                log.warning("attempt %d says %d", attempt, number)
    sizes = {file.name: file.stat().st_size for file in path.parent.iterdir()}
    assert set(sizes) == {"log.txt", "log.txt.1"}
    assert max(sizes.values()) <= 10_000
    assert path.read_text().endswith("attempt 2 says 499\n")


def test_a_running_runner_caps_its_log_which_its_children_write_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver and the server of schedules append to runner.log; the runner alone halves it."""
    home = make_home(tmp_path / "home")
    monkeypatch.setattr(runner_module, "HEARTBEAT_INTERVAL_S", 0.0)
    monkeypatch.setattr(runner_module, "cap_log", lambda path: cap_log(path, 10_000))
    child = home.log_path.open("a")
    sizes = []

    class TalkingDriver(ScriptedDriver):
        def wait(self, timeout_s: float, others: Sequence[int] = ()) -> list[Event]:
            child.write("what a driver says\n" * 100)
            child.flush()
            sizes.append(home.log_path.stat().st_size)
            return super().wait(timeout_s, others)

    with JobStore(home.state_path) as store, child:
        queue_job(store, tmp_path / "in.parquet", ["p"] * 60, shard_rows=1)
        driver = TalkingDriver(store)
        with RunnerLock(home) as lock, StopSignal() as stop:
            Runner(
                home, lock, store=store, stop=stop, start_driver=lambda _: driver, idle_exit_s=0.0
            ).run()
    assert len(sizes) > 50 and max(sizes) <= 10_000 + 2000
    assert home.log_path.read_text().startswith("what a driver says\n")


def run_and_see_logs(
    home: Home, store: JobStore, start: Callable[[Home], DriverProcess] = DriverProcess
) -> dict[str, int]:
    """Run what is queued; the sizes of Ray's log files when the last job was through."""
    sizes: dict[str, int] = {}

    def publish(job: Job, part: Part, blobs: Sequence[bytes]) -> None:
        publish_part(job, part, blobs)
        sizes.clear()
        for root in temp_roots(os.environ):
            for logs in root.glob(f"{PREFIX}{home.key}-*/{RAY_FOLDER}/session_latest/logs"):
                sizes.update({path.name: path.stat().st_size for path in logs.glob("*.*")})

    with RunnerLock(home) as lock, StopSignal() as stop:
        Runner(
            home,
            lock,
            store=store,
            stop=stop,
            publish=publish,
            start_driver=start,
            idle_exit_s=0.0,
        ).run()
    return sizes


@pytest.mark.slow
def test_an_actor_that_made_way_for_another_model_leaves_no_logs(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    with JobStore(home.state_path) as store:
        for name in ("llama-q4_0", "llama-q8_0"):
            model = str(GOLDEN / f"{name}.gguf")
            queue_job(store, tmp_path / f"{name}.parquet", ["a", "b"], model=model)
        sizes = run_and_see_logs(home, store)
        assert [job.state for job in store.list_jobs()] == ["completed"] * 2
    workers = {name.rpartition("-")[2] for name in sizes if fnmatch(name, "worker-*.err")}
    assert len(workers) == 1


@pytest.mark.slow
def test_ray_rotates_all_that_it_and_the_engine_actor_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 68: log cap. What the actor writes to its standard output and error is bounded too."""
    monkeypatch.setattr(driver_process, "MAX_RAY_LOG_NBYTES", MAX_RAY_LOG_NBYTES)
    home = make_home(tmp_path / "home")
    drivers: list[DriverProcess] = []

    def start(home: Home) -> DriverProcess:
        drivers.append(DriverProcess(home, module="tests.chatty_engine"))
        return drivers[-1]

    with JobStore(home.state_path) as store:
        job = queue_job(store, tmp_path / "in.parquet", ["a", "b"])
        sizes = run_and_see_logs(home, store, start)
        assert store.job(job.id).state == "completed"
    assert len(drivers) == 1
    for kind in ("err", "out"):
        mine = [size for name, size in sizes.items() if fnmatch(name, f"worker-*.{kind}*")]
        assert len(mine) == 2, "the file and one before it"
        assert MAX_RAY_LOG_NBYTES < sum(mine) < NUM_LINES * len(LINE)
    assert max(sizes.values()) <= 1.1 * MAX_RAY_LOG_NBYTES
    assert {"raylet.out", "gcs_server.out"} <= set(sizes)


# ---- memory ------------------------------------------------------------------------------


@given(
    slope_mib=st.floats(-5, 5),
    noise_mib=st.floats(0, 2),
    num_rows=st.integers(50, 2500).map(lambda steps: 400 * steps),
)
def test_the_slope_of_memory_is_found_after_the_warm_up(
    slope_mib: float, noise_mib: float, num_rows: int
) -> None:
    samples = []
    for step in range(401):
        rows = num_rows // 400 * step
        mib = 500.0 if rows < num_rows / 4 else 100 + slope_mib * rows / 10_000
        mib += noise_mib * (-1) ** step
        samples.append(Sample("engine actor", rows, int(mib * 2**20), int(mib * 2**20)))
    found = judge(samples, num_rows)["engine actor"]
    assert found is not None
    # What the noise, which alternates, can do to a line through 300 points.
    tolerance = 1e-5 + 0.1 * noise_mib / (num_rows / 10_000)
    assert abs(found.slope_mib - slope_mib) <= tolerance
    assert found.is_flat or found.slope_mib > 1


def test_too_few_samples_say_nothing() -> None:
    samples = [Sample("runner", 1000 * n, 100, 100) for n in range(12)]
    assert judge(samples, 11_000) == {"runner": None}
    assert judge([], 11_000) == {}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """Case 106: 60,000 short rows, in every process; `scripts/bench_long.py` runs 200,000.

    The bound is for so short a job: a KiB that a row leaves behind would be 10 MiB.
    """
    make_home(tmp_path / "home")
    samples = run_long_job(
        MODEL,
        tmp_path,
        num_rows=60_000,
        num_prompts=60_000,
        part_interval_s=0.5,
        sample_s=0.0,
    )
    judged = judge(samples, 60_000)
    known = {role: one for role, one in judged.items() if one is not None}
    assert {"runner", "driver", "engine actor", "raylet", "gcs"} <= set(known)
    assert [one for one in known.values() if one.slope_mib > 3] == []
