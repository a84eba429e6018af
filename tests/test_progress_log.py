"""Points of a job's progress: sums over attempts, bounded in number, kept with the record."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.job_run import JobRun
from jobs.messages import BatchDone, Progress
from jobs.progress_log import MAX_POINTS, MIN_INTERVAL_S, ProgressLog, ProgressPoint
from jobs.store import JobStore
from tests.job_factories import make_batch, make_job

POINT = ProgressPoint(at=100.0, work_s=10.0, num_ok=1, prompt_tokens=20, energy_j=5.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with JobStore(tmp_path / "state.sqlite") as opened:
        yield opened


def told(
    completion_tokens: int, job_s: float, energy_j: float | None = None, began_at: float = 1.0
) -> Progress:
    achieved = {"job_s": job_s, "sweeps_s": job_s / 2, "wait_s": job_s / 4, "streamed_nbytes": 8}
    return Progress(1, 0, 1, 10, completion_tokens, began_at, achieved, energy_j)


def take(log: ProgressLog, attempt: int, progress: Progress, now: float) -> None:
    log.take(attempt, progress, num_ok=1, num_error=0, now=now)


def test_attempts_add_up() -> None:
    log = ProgressLog(None)
    take(log, 1, told(5, 2.0, 30.0), 10.0)
    take(log, 1, told(9, 4.0, 50.0), 12.0)
    take(log, 2, told(3, 1.0, 7.0, began_at=98.0), 99.0)
    point = log.next_point(is_last=True)
    assert point == ProgressPoint(
        at=99.0,
        work_s=5.0,
        num_ok=1,
        prompt_tokens=20,
        completion_tokens=12,
        sweep_s=2.5,
        wait_s=1.25,
        streamed_nbytes=16,
        energy_j=57.0,
    )


def test_prompt_tokens_that_were_reused_are_not_counted_as_computed() -> None:
    log = ProgressLog(None)
    take(log, 1, replace(told(5, 2.0), reused_tokens=4), 10.0)
    take(log, 2, replace(told(5, 2.0), reused_tokens=9), 20.0)
    point = log.next_point(is_last=True)
    assert point is not None and point.prompt_tokens == (10 - 4) + (10 - 9)


def test_engines_add_up_and_time_that_they_share_counts_once() -> None:
    log = ProgressLog(None)
    for engine, told_now in (
        (0, told(5, 4.0, 30.0, began_at=10.0)),
        (1, told(7, 5.0, 20.0, began_at=12.0)),
        (0, told(9, 8.0, 50.0, began_at=10.0)),
    ):
        log.take(10 + engine, told_now, num_ok=1, num_error=0, now=20.0, engine=engine)
    # Engine 1 is lost and comes back, while engine 0 works on.
    again = told(2, 1.0, 3.0, began_at=17.5)
    log.take(12, again, num_ok=2, num_error=0, now=20.0, engine=1)
    point = log.next_point(is_last=True)
    assert point is not None
    assert point.work_s == 8.5
    assert (point.prompt_tokens, point.completion_tokens) == (30, 9 + 7 + 2)
    assert (point.sweep_s, point.wait_s) == (4.0 + 2.5 + 0.5, 2.0 + 1.25 + 0.25)
    assert (point.streamed_nbytes, point.energy_j) == (24, 50.0 + 20.0 + 3.0)


def test_a_claimed_job_goes_on_from_its_last_point() -> None:
    log = ProgressLog(POINT)
    assert log.next_point(is_last=True) is None
    take(log, 1, told(5, 2.0, 1.0), 200.0)
    point = log.next_point()
    assert point is not None
    assert (point.work_s, point.prompt_tokens, point.energy_j) == (12.0, 30, 6.0)


def test_energy_is_unknown_once_it_could_not_be_read() -> None:
    log = ProgressLog(POINT)
    take(log, 1, told(5, 2.0, None), 200.0)
    take(log, 2, told(5, 2.0, 3.0), 300.0)
    point = log.next_point(is_last=True)
    assert point is not None and point.energy_j is None


def test_points_are_rarer_the_longer_a_job_is() -> None:
    log = ProgressLog(None)
    take(log, 1, told(1, 1.0), 1000.0)
    assert log.next_point() is not None
    take(log, 1, told(1, 1.0), 1000.0 + MIN_INTERVAL_S / 2)
    assert log.next_point() is None
    assert log.next_point(is_last=True) is not None
    take(log, 1, told(1, 1e6), 2000.0)
    assert log.next_point() is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100)), max_size=30))
def test_sums_never_fall(steps: list[tuple[int, int]]) -> None:
    log, before, attempt, tokens = ProgressLog(None), 0, 0, 0
    for number, (restarts, more) in enumerate(steps):
        attempt, tokens = attempt + restarts, more if restarts else tokens + more
        take(log, attempt, told(tokens, 1.0), float(number))
        point = log.next_point(is_last=True)
        assert point is not None and point.completion_tokens >= before
        before = point.completion_tokens


def test_a_store_keeps_at_most_so_many_points_and_the_newest_of_all(store: JobStore) -> None:
    job, other = make_job(store), make_job(store)
    store.set_record(other.id, {}, POINT)
    for number in range(2 * MAX_POINTS):
        store.set_record(job.id, {}, replace(POINT, at=float(number)))
    times = [point.at for point in store.progress_points(job.id)]
    assert MAX_POINTS / 2 <= len(times) <= MAX_POINTS
    assert times == sorted(times) and times[-1] == 2 * MAX_POINTS - 1
    assert times[0] < 10 and max(b - a for a, b in itertools.pairwise(times)) <= 8
    assert store.progress_points(other.id) == [POINT]


def test_points_of_a_removed_job_go_with_it(store: JobStore) -> None:
    job = make_job(store)
    store.set_record(job.id, {}, POINT)
    store.remove_job(job.id)
    assert store.progress_points(job.id) == []


def test_a_run_keeps_points_and_the_last_when_its_job_stops(store: JobStore) -> None:
    make_job(store)
    job = store.claim_job()
    assert job is not None
    now = [1000.0]
    run = JobRun(store, job, lambda *_: None, clock=lambda: now[0])
    for number in range(4):
        now[0] += 1.0
        event = BatchDone(1, make_batch([number]), (), told(number, number + 1.0))
        run.commit(event)
    assert [point.at for point in store.progress_points(job.id)] == [1001.0, 1003.0]
    run.stop("interrupted")
    points = store.progress_points(job.id)
    assert [(point.at, point.num_ok) for point in points] == [(1001, 1), (1003, 3), (1004, 4)]
    assert points[-1].work_s == 4.0
