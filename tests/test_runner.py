"""What the runner does with jobs, whatever its engine does; the one of a state folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.control import (
    RunnerLock,
    RunnerStatus,
    check_environment,
    ensure_runner,
    environment_of,
    runner_status,
    stop_runner,
)
from jobs.home import Home
from jobs.job_run import plan_shards
from jobs.messages import AddShard, BatchDone
from jobs.publish import publish_part
from jobs.records import Job, Part, RunnerError, Shard, StorageError, UnreachableError
from jobs.runner import Runner
from jobs.stop_signal import StopSignal
from jobs.store import JobStore
from tests.job_factories import bad_row, ok_row
from tests.runner_helpers import ScriptedDriver, queue_job, wait_until

Start = Callable[[Home], ScriptedDriver]


def run_until_idle(home: Home, store: JobStore, start: Start, **options: Any) -> None:
    with RunnerLock(home) as lock, StopSignal() as stop:
        values = {"store": store, "stop": stop, "start_driver": start, "idle_exit_s": 0.0}
        Runner(home, lock, **values | options).run()


def prompts(count: int) -> list[str]:
    return [f"prompt {number}" for number in range(count)]


def result_rows(store: JobStore, job: Job) -> list[int]:
    """Row indices in the job's published parts, in the order of the files."""
    parts = [part.name for part in store.parts(job.id)]
    assert sorted(os.listdir(job.results_dir)) == parts
    tables = [pq.read_table(Path(job.results_dir) / name) for name in parts]
    assert tables[0].num_rows == 0, "part 0 only shows the schema"
    return [row for table in tables for row in table["row_index"].to_pylist()]


# ---- jobs --------------------------------------------------------------------------------


def test_jobs_run_one_after_the_other_in_the_order_of_submission(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    first = queue_job(store, tmp_path / "a.parquet", prompts(25), shard_rows=10)
    second = queue_job(store, tmp_path / "b.parquet", prompts(3), seed=1)
    drivers: list[ScriptedDriver] = []

    def start(home: Home) -> ScriptedDriver:
        drivers.append(ScriptedDriver(store))
        return drivers[-1]

    run_until_idle(home, store, start)
    assert len(drivers) == 1, "one driver serves both jobs"
    assert drivers[0].is_closed
    for job, count in ((first, 25), (second, 3)):
        done = store.job(job.id)
        assert (done.state, done.num_ok, done.total) == ("completed", count, count)
        assert result_rows(store, done) == list(range(count))
        assert done.record["device"] == "none"
        assert done.record["last_commit_at"] >= done.record["first_admission_at"]
    times = [store.job(job.id).finished_at or 0.0 for job in (first, second)]
    assert times == sorted(times)


def test_a_job_without_rows_completes_without_an_engine(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    empty = queue_job(store, tmp_path / "a.parquet", [])
    limited = queue_job(store, tmp_path / "b.parquet", prompts(3), limit=0)
    run_until_idle(home, store, lambda home: pytest.fail("no engine is needed"))
    for job in (empty, limited):
        assert store.job(job.id).state == "completed"
        assert store.job(job.id).exit_code == 0
        assert result_rows(store, job) == []


def test_limit_runs_only_the_first_rows(home: Home, store: JobStore, tmp_path: Path) -> None:
    job = queue_job(store, tmp_path / "a.parquet", prompts(30), limit=12, shard_rows=5)
    run_until_idle(home, store, lambda home: ScriptedDriver(store))
    assert store.job(job.id).total == 12
    assert result_rows(store, job) == list(range(12))


def test_a_job_of_which_no_row_succeeds_has_failed(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    """Case 14: all rows fail, one of some fails, the model does not load: three outcomes."""
    none = queue_job(store, tmp_path / "a.parquet", prompts(4))
    run_until_idle(home, store, lambda home: ScriptedDriver(store, answer=bad_row))
    some = queue_job(store, tmp_path / "b.parquet", prompts(4))
    run_until_idle(
        home,
        store,
        lambda home: ScriptedDriver(store, answer=lambda row: ok_row(row) if row else bad_row(row)),
    )
    unloadable = queue_job(store, tmp_path / "c.parquet", prompts(4))
    run_until_idle(home, store, lambda home: ScriptedDriver(store, fail="m.gguf: no such file"))
    jobs = [store.job(job.id) for job in (none, some, unloadable)]
    assert [job.exit_code for job in jobs] == [1, 3, 1]
    assert "none of 4 rows" in (jobs[0].reason or "")
    assert jobs[2].reason == "m.gguf: no such file"
    assert result_rows(store, none) == [0, 1, 2, 3]


def test_a_job_that_cannot_start_does_not_stop_the_next(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    gone = queue_job(store, tmp_path / "gone.parquet", prompts(4))
    (tmp_path / "gone.parquet").unlink()
    good = queue_job(store, tmp_path / "good.parquet", prompts(4))
    run_until_idle(home, store, lambda home: ScriptedDriver(store))
    assert store.job(gone.id).state == "failed"
    assert "gone.parquet" in (store.job(gone.id).reason or "")
    assert "gone.parquet" in home.job_log_path(gone.id).read_text()
    assert store.job(good.id).state == "completed"


def test_a_job_of_another_environment_is_refused(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    job = queue_job(
        store, tmp_path / "a.parquet", prompts(2), environment={"CUDA_VISIBLE_DEVICES": "7"}
    )
    run_until_idle(home, store, lambda home: ScriptedDriver(store))
    assert "CUDA_VISIBLE_DEVICES='7'" in (store.job(job.id).reason or "")


# ---- lost engines ------------------------------------------------------------------------


def test_a_lost_driver_is_replaced_and_gets_only_the_missing_rows(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    job = queue_job(store, tmp_path / "a.parquet", prompts(50), shard_rows=10)
    drivers: list[ScriptedDriver] = []

    def start(home: Home) -> ScriptedDriver:
        lost_after = 3 if not drivers else None
        drivers.append(ScriptedDriver(store, lost_after=lost_after))
        return drivers[-1]

    run_until_idle(home, store, start)
    assert len(drivers) == 2
    assert drivers[0].is_closed
    assert store.job(job.id).state == "completed"
    assert result_rows(store, job) == list(range(50))
    log = home.job_log_path(job.id).read_text()
    assert "lost its engines: a process of Ray (pid 1) is gone" in log


def test_a_job_that_loses_every_driver_fails_with_the_last_cause(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    job = queue_job(store, tmp_path / "a.parquet", prompts(5))
    starts: list[ScriptedDriver] = []

    def start(home: Home) -> ScriptedDriver:
        starts.append(ScriptedDriver(store, lost_after=0))
        return starts[-1]

    run_until_idle(home, store, start)
    assert len(starts) == 4, "three new starts after the first"
    assert store.job(job.id).state == "failed"
    assert "lost 4 times" in (store.job(job.id).reason or "")
    assert "a process of Ray" in (store.job(job.id).reason or "")


class HauntedDriver(ScriptedDriver):
    """Says everything twice, once as an attempt that is over."""

    def answer_to(self, attempt: int, shard: Shard) -> BatchDone:
        self._events.append(super().answer_to(attempt - 1, shard))
        return super().answer_to(attempt, shard)


def test_what_an_abandoned_attempt_still_says_is_dropped(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    job = queue_job(store, tmp_path / "a.parquet", prompts(30), shard_rows=10)
    run_until_idle(home, store, lambda home: HauntedDriver(store))
    assert store.job(job.id).state == "completed"
    assert result_rows(store, job) == list(range(30))


# ---- parts -------------------------------------------------------------------------------


def test_parts_are_cut_by_size(home: Home, store: JobStore, tmp_path: Path) -> None:
    job = queue_job(store, tmp_path / "a.parquet", prompts(30), shard_rows=10, part_nbytes=1)
    run_until_idle(home, store, lambda home: ScriptedDriver(store))
    assert [part.num_rows for part in store.parts(job.id)] == [0, 10, 10, 10]
    assert result_rows(store, job) == list(range(30))


def test_parts_are_cut_by_age(home: Home, tmp_path: Path) -> None:
    """Ten seconds pass between two looks at the clock."""
    seconds = iter(range(0, 10_000, 10))
    with JobStore(home.state_path, clock=lambda: float(next(seconds))) as store:
        job = queue_job(
            store, tmp_path / "a.parquet", prompts(30), shard_rows=10, part_interval_s=5.0
        )
        start = lambda home: ScriptedDriver(store)  # noqa: E731
        run_until_idle(home, store, start, clock=lambda: float(next(seconds)))
        assert [part.num_rows for part in store.parts(job.id)] == [0, 10, 10, 10]


def test_a_part_that_was_announced_is_published_by_the_next_runner(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    """A publisher that dies with its runner: the rows are neither lost nor doubled."""
    job = queue_job(store, tmp_path / "a.parquet", prompts(20), shard_rows=10, part_nbytes=1)

    def die(job: Job, part: Part, blobs: Any) -> None:
        if part.number == 1:
            raise KeyboardInterrupt
        publish_part(job, part, blobs)

    with pytest.raises(KeyboardInterrupt):
        run_until_idle(home, store, lambda home: ScriptedDriver(store), publish=die)
    assert [part.state for part in store.parts(job.id)] == ["committed", "publishing"]
    assert store.job(job.id).state == "running"
    run_until_idle(home, store, lambda home: ScriptedDriver(store))
    assert store.job(job.id).state == "completed"
    assert store.job(job.id).attempt == 2
    assert result_rows(store, job) == list(range(20))


# ---- requests and the end ----------------------------------------------------------------


class SlowDriver(ScriptedDriver):
    """Calls back when it has sent its first shard, and answers no more than that one."""

    def __init__(self, store: JobStore, on_first: Callable[[], None]) -> None:
        super().__init__(store)
        self._on_first = on_first

    def send(self, command: Any) -> None:
        if isinstance(command, AddShard) and self.shards:
            self.shards.append(command.shard)
            return
        super().send(command)
        if isinstance(command, AddShard):
            self._on_first()


@pytest.mark.parametrize(("request_", "state"), [("pause", "paused"), ("cancel", "cancelled")])
def test_a_request_stops_the_job_and_keeps_finished_rows(
    home: Home, store: JobStore, tmp_path: Path, request_: Any, state: str
) -> None:
    job = queue_job(store, tmp_path / "a.parquet", prompts(30), shard_rows=10)
    ask = lambda: store.set_request(job.id, request_)  # noqa: E731
    run_until_idle(home, store, lambda home: SlowDriver(store, ask))
    assert (store.job(job.id).state, store.job(job.id).num_ok) == (state, 10)


def test_a_stopped_runner_leaves_its_job_interrupted(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    job = queue_job(store, tmp_path / "a.parquet", prompts(30), shard_rows=10)
    with StopSignal() as stop:
        run_until_idle(home, store, lambda home: SlowDriver(store, stop.set), stop=stop)
    assert (store.job(job.id).state, store.job(job.id).num_ok) == ("interrupted", 10)
    assert store.runner() is None
    run_until_idle(home, store, lambda home: ScriptedDriver(store))
    assert store.job(job.id).state == "completed"
    assert result_rows(store, job) == list(range(30))


# ---- the one runner ----------------------------------------------------------------------


def test_a_state_folder_has_one_runner(home: Home) -> None:
    with RunnerLock(home):
        status = runner_status(home)
        assert (status.state, status.pid) == ("running", os.getpid())
        with pytest.raises(RunnerError, match=f"pid {os.getpid()}"):
            RunnerLock(home)
    assert runner_status(home).state == "absent"


def test_looking_for_a_runner_does_not_keep_one_from_starting(home: Home) -> None:
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            runner_status(home)

    watchers = [threading.Thread(target=look) for _ in range(4)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(20):
            RunnerLock(home).release()
    finally:
        stop.set()
        for watcher in watchers:
            watcher.join()


def test_a_runner_starts_detached_ends_when_idle_and_is_not_started_twice(home: Home) -> None:
    first = ensure_runner(home, idle_exit_s=1.0)
    assert first.pid is not None
    assert ensure_runner(home).pid == first.pid
    assert os.getsid(first.pid) == first.pid, "it outlives the terminal"
    wait_until(lambda: runner_status(home).state == "absent")
    os.waitpid(first.pid, 0)
    assert "the runner ends" in home.log_path.read_text()
    assert not stop_runner(home)


def test_a_runner_stops_when_told(home: Home) -> None:
    pid = ensure_runner(home).pid
    assert pid is not None
    assert stop_runner(home)
    assert runner_status(home).state == "absent"
    assert os.waitpid(pid, 0)[1] == 0


def test_a_runner_that_cannot_start_shows_its_log(home: Home) -> None:
    home.state_path.write_text("this is no database" * 100)
    with pytest.raises(RunnerError, match=r"state\.sqlite"):
        ensure_runner(home)


def test_another_environment_than_the_runners_is_refused(home: Home) -> None:
    with RunnerLock(home):
        status = runner_status(home)
        check_environment(status, {})
        with pytest.raises(RunnerError, match=r"CUDA_VISIBLE_DEVICES is '0' here and not set"):
            check_environment(status, {"CUDA_VISIBLE_DEVICES": "0"})
        with pytest.raises(RunnerError, match="RAY_ADDRESS"):
            check_environment(status, {"RAY_ADDRESS": "127.0.0.1:1"})


# ---- shards ------------------------------------------------------------------------------


@given(
    total=st.integers(0, 60),
    shard_rows=st.integers(1, 20),
    done=st.sets(st.integers(0, 179)),
    window_shards=st.integers(1, 5),
    samples=st.integers(1, 3),
)
def test_shards_cover_what_is_not_done_once(
    total: int, shard_rows: int, done: set[int], window_shards: int, samples: int
) -> None:
    done = {output for output in done if output < total * samples}

    def settled(begin: int, end: int) -> np.ndarray:
        return np.array(sorted(n for n in done if begin <= n // samples < end), np.int64)

    shards = list(plan_shards(total, shard_rows, settled, samples, window_shards))
    assert len({s.number for s in shards}) == len(shards)
    outputs = [outputs_of(shard, samples) for shard in shards]
    assert [n for some in outputs for n in some] == sorted(set(range(total * samples)) - done)
    assert all(s.end - s.begin <= shard_rows for s in shards)
    assert all(outputs)


def outputs_of(shard: Shard, samples: int) -> list[int]:
    numbers = range(shard.begin * samples, shard.end * samples)
    return [number for number in numbers if number not in shard.done]


def test_a_job_of_a_store_wants_the_runner_to_reach_the_same_store() -> None:
    """What says which store a URI means must be equal; secrets are neither kept nor compared."""
    here = {"AWS_ENDPOINT_URL": "http://one:9000", "AWS_SECRET_ACCESS_KEY": "tiger"}
    assert environment_of(here) == {"AWS_ENDPOINT_URL": "http://one:9000"}
    assert environment_of(here, stores=False) == {}
    assert environment_of({"AWS_ENDPOINT_URL": "http://me:tiger@one"}) == {
        "AWS_ENDPOINT_URL": "http://***@one"
    }
    status = RunnerStatus("running", 1, environment_of({"AWS_ENDPOINT_URL": "http://two:9000"}))
    check_environment(status, here)
    with pytest.raises(RunnerError, match=r"AWS_ENDPOINT_URL is 'http://one:9000' here and .*two"):
        check_environment(status, here, stores=True)


# ---- stores ------------------------------------------------------------------------------


def test_a_job_whose_store_is_silent_lets_others_run_and_goes_on_by_itself(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    """All its rows are finished, and none is computed again; an idle runner stays for it."""
    first = queue_job(store, tmp_path / "a.parquet", prompts(6))
    second = queue_job(store, tmp_path / "b.parquet", prompts(3), seed=1)
    drivers = [ScriptedDriver(store)]
    silent = [True] * 3

    def publish(job: Job, part: Part, blobs: Sequence[bytes]) -> None:
        if job.id == first.id and part.num_rows and silent:
            silent.pop()
            assert store.job(first.id).num_ok == 6
            raise UnreachableError("s3://bkt/out: the store does not answer")
        publish_part(job, part, blobs)

    run_until_idle(home, store, lambda home: drivers[0], publish=publish, store_retry_s=0.1)
    ended = [store.job(job.id) for job in (first, second)]
    assert [(job.state, job.num_ok) for job in ended] == [("completed", 6), ("completed", 3)]
    assert (ended[0].finished_at or 0) > (ended[1].finished_at or 0)
    assert ended[0].attempt == 4
    assert result_rows(store, ended[0]) == list(range(6))
    assert sum(shard.end - shard.begin for shard in drivers[0].shards) == 6 + 3


def test_a_job_whose_store_refuses_is_paused_and_says_how_to_go_on(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    job = queue_job(store, tmp_path / "a.parquet", prompts(6))

    def publish(job: Job, part: Part, blobs: Sequence[bytes]) -> None:
        if part.num_rows:
            raise StorageError("s3://bkt/out: there is no bucket bkt")
        publish_part(job, part, blobs)

    run_until_idle(home, store, lambda home: ScriptedDriver(store), publish=publish)
    paused = store.job(job.id)
    assert (paused.state, paused.num_ok, paused.exit_code) == ("paused", 6, 5)
    assert paused.reason is not None
    assert "no bucket bkt" in paused.reason
    assert f"ntx-batch resume {job.id}" in paused.reason
    store.set_state(job.id, "queued")
    run_until_idle(home, store, lambda home: pytest.fail("all rows are finished"))
    assert result_rows(store, store.job(job.id)) == list(range(6))
