"""The runner and schedules: it has them served, stays for them, and holds their jobs to bounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.control import RunnerLock, ensure_runner, runner_status, stop_runner
from jobs.home import Home
from jobs.messages import AddShard, BatchDone, Command, Event
from jobs.records import Shard
from jobs.runner import Runner
from jobs.schedule_store import ScheduleSpec, ScheduleStore, Settlement
from jobs.schedule_watch import ScheduleWatch
from jobs.stop_signal import StopSignal
from jobs.store import JobStore
from ntx_batch.schedule_runs import ScheduleServer
from tests.job_factories import write_input
from tests.runner_helpers import MODEL, ScriptedDriver, make_home, wait_until
from tests.test_schedule import HOUR, MINUTE, at


class Ended:
    """A server that has served and ended. status: its exit status"""

    def __init__(self, status: int | None = 0) -> None:
        self.status = status

    def poll(self) -> int | None:
        return self.status


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return make_home(tmp_path / "home")


@pytest.fixture
def jobs(home: Home) -> Iterator[JobStore]:
    with JobStore(home.state_path) as jobs:
        yield jobs


def write_job(folder: Path, num_rows: int, text: str = "") -> Path:
    write_input(folder / "a.parquet", {"prompt": [f"prompt {n}" for n in range(num_rows)]})
    file = folder / "nightly.toml"
    file.write_text(f'input = "a.parquet"\nmodel = "{MODEL}"\nmax_tokens = 2\n{text}')
    return file


def add(store: ScheduleStore, job_file: Path, **spec: Any) -> None:
    values = {"cron": "0 2 * * *", "tz": "UTC", "job_file": str(job_file)}
    store.add("nightly", ScheduleSpec(**values | spec), {})


def states(store: ScheduleStore) -> list[str]:
    return [run.state for run in reversed(store.history(store.get("nightly")))]


class Night:
    """A runner with a scripted clock and engine. meanwhile: called when it looks at the clock"""

    def __init__(self, home: Home, jobs: JobStore, utc: str) -> None:
        self.home, self.jobs, self.now = home, jobs, at(utc)
        self.store = ScheduleStore(jobs, lambda: self.now)
        self.stop = StopSignal()
        self.meanwhile: Callable[[], None] = lambda: None

    def clock(self) -> float:
        self.meanwhile()
        return self.now

    def server(self) -> ScheduleServer:
        return ScheduleServer(self.home, self.store, lambda: self.now)

    def serve(self, home: Home) -> Ended:
        self.server().serve_all()
        return Ended()

    def run(self, hours_for_a_row: float = 0.0) -> None:
        with RunnerLock(self.home) as lock, self.stop as stop:
            Runner(
                self.home,
                lock,
                store=self.jobs,
                stop=stop,
                start_driver=lambda home: HourlyDriver(self, hours_for_a_row),
                clock=self.clock,
                start_schedules=self.serve,
                idle_exit_s=0.0,
            ).run()


class HourlyDriver(ScriptedDriver):
    """An engine that hands over one row at a time; the night's clock goes on for each."""

    def __init__(self, night: Night, hours_for_a_row: float) -> None:
        super().__init__(night.jobs)
        self._night = night
        self._row_s = hours_for_a_row * HOUR

    def send(self, command: Command) -> None:
        if not isinstance(command, AddShard):
            super().send(command)
            return
        shard = command.shard
        for row in sorted(set(range(shard.begin, shard.end)) - set(shard.done)):
            one = Shard(number=shard.number, begin=row, end=row + 1)
            self._events.append(self.answer_to(command.attempt, one))

    def wait(self, timeout_s: float, others: Sequence[int] = ()) -> list[Event]:
        events = super().wait(timeout_s, others)
        self._night.now += self._row_s * sum(isinstance(event, BatchDone) for event in events)
        return events


@pytest.fixture(autouse=True)
def look_at_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.runner.HEARTBEAT_INTERVAL_S", 0.0)
    monkeypatch.setattr("jobs.schedule_watch.LOOK_INTERVAL_S", 0.0)


def test_a_runner_runs_what_is_due_and_stays_while_there_are_schedules(
    home: Home, jobs: JobStore, tmp_path: Path
) -> None:
    night = Night(home, jobs, "2026-11-30T12:00")
    add(night.store, write_job(tmp_path, 3))
    looks_since = 0

    def meanwhile() -> None:
        nonlocal looks_since
        found = states(night.store)
        if len(found) < 2 and set(found) <= {"completed"}:
            night.now += 5 * HOUR
        looks_since += found == ["completed", "completed"]
        if looks_since == 3:
            night.store.set_paused(night.store.get("nightly"), paused=True)

    night.meanwhile = meanwhile
    night.run()
    assert looks_since >= 3, "idle for longer than it may be, it had stayed"
    found = [(job.state, job.num_ok, job.schedule, job.run) for job in jobs.list_jobs()]
    assert found == [("completed", 3, "nightly", 1), ("completed", 3, "nightly", 2)]


def test_a_job_pauses_when_its_window_closes_and_goes_on_in_the_next(
    home: Home, jobs: JobStore, tmp_path: Path
) -> None:
    """20 rows of an hour in nights of seven hours: three nights, each row once."""
    night = Night(home, jobs, "2026-11-30T23:00")
    add(night.store, write_job(tmp_path, 20), window="23:00-06:00")
    job = night.server().make_run(night.store.get("nightly"), Settlement(), night.now).job
    assert job is not None
    mornings: list[tuple[str, int]] = []

    def meanwhile() -> None:
        found = jobs.job(job.id)
        if found.state == "paused" and found.num_ok not in [count for _, count in mornings]:
            assert found.reason == "outside its window 23:00-06:00 UTC; goes on at 23:00"
            mornings.append((f"{datetime.fromtimestamp(night.now, UTC):%d. %H:%M}", found.num_ok))
            night.now += 16 * HOUR
        elif found.state == "completed":
            night.stop.set()

    night.meanwhile = meanwhile
    night.run(hours_for_a_row=1.0)
    # The sweep that is under way when it closes brings its row.
    assert mornings == [("01. 07:00", 8), ("02. 07:00", 16)]
    done = jobs.job(job.id)
    assert (done.state, done.num_ok) == ("completed", 20)
    rows = [
        row
        for part in jobs.parts(job.id)
        for row in pq.read_table(Path(done.results_dir) / part.name)["row_index"].to_pylist()
    ]
    assert sorted(rows) == list(range(20))


def test_a_job_pauses_after_its_longest_time_and_goes_on_at_the_next_run(
    home: Home, jobs: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    night = Night(home, jobs, "2026-11-30T12:00")
    add(night.store, write_job(tmp_path, 12), max_runtime_s=4 * HOUR)
    monkeypatch.setattr("jobs.schedule_watch.time", SimpleNamespace(monotonic=lambda: night.now))
    night.now = at("2026-12-01T02:00")
    counts: list[int] = []

    def meanwhile() -> None:
        (found,) = jobs.list_jobs() or [None]
        if found is not None and found.state == "paused" and found.num_ok not in counts:
            assert "it ran for 4h (--max-runtime)" in (found.reason or "")
            counts.append(found.num_ok)
            night.now = at("2026-12-01T02:00") + len(counts) * 24 * HOUR
        elif found is not None and found.state == "completed":
            night.stop.set()

    night.meanwhile = meanwhile
    night.run(hours_for_a_row=1.0)
    assert counts == [5, 10], "four hours, and the sweep that was under way"
    assert states(night.store) == ["completed", "skipped", "skipped"]
    assert jobs.list_jobs()[0].num_ok == 12


def test_a_server_that_fails_is_started_again_after_a_while(
    home: Home, jobs: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("jobs.schedule_watch.time", SimpleNamespace(monotonic=lambda: now[0]))
    store = ScheduleStore(jobs, lambda: at("2026-11-30T12:00"))
    add(store, write_job(tmp_path, 1))
    started: list[Ended] = []

    def start(home: Home) -> Ended:
        started.append(Ended(None))
        return started[-1]

    watch = ScheduleWatch(home, jobs, clock=lambda: at("2026-12-01T02:00"), start=start)
    watch.serve()
    watch.serve()
    assert len(started) == 1, "one at a time"
    started[0].status = 1
    watch.serve()
    assert len(started) == 1
    now[0] += 31
    watch.serve()
    assert len(started) == 2


def test_a_schedule_from_the_clock_to_the_answers(tmp_path: Path) -> None:
    """The real runner, its server and an engine: what came up while no runner was there."""
    home = make_home(tmp_path / "home")
    with JobStore(home.state_path) as jobs:
        store = ScheduleStore(jobs)
        add(store, write_job(tmp_path, 2, 'kv_memory = "64MiB"'), cron="* * * * *", new_only=True)
        schedule = store.get("nightly")
        store.set_looked(schedule, time.time() - 10 * MINUTE)
        try:
            ensure_runner(home)
            wait_until(lambda: [job for job in jobs.list_jobs() if job.exit_code is not None])
            assert runner_status(home).state == "running"
        finally:
            stop_runner(home)
        runs = store.history(schedule)
        assert (runs[-1].state, runs[-1].num_missed >= 8) == ("completed", True)
        assert {run.state for run in runs[:-1]} <= {"nothing", "skipped"}
        (job,) = jobs.list_jobs()
        assert (job.num_ok, job.total, job.run) == (2, 2, 1)
