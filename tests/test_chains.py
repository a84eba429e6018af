"""Jobs that read the results of others: when they wait, run, fail with them, and come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.chains import next_move, outlook
from jobs.records import FINAL_STATES, Job, Manifest, StoreError
from jobs.sql import QUERIES
from jobs.store import JobStore
from tests.job_factories import make_batch, make_job, make_manifest, make_spec


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with JobStore(tmp_path / "state.sqlite") as store:
        yield store


def chain_after(store: JobStore, earlier: Job, **spec: Any) -> Job:
    """A job that is to read the results of another."""
    return store.create_job(make_spec(after=earlier.id, **spec), Manifest(files=()), {})


def retry_of(store: JobStore, job: Job) -> Job:
    return store.create_job(make_spec(), make_manifest(1), {}, retry_of=job.id)


def claim(store: JobStore, job: Job) -> None:
    claimed = store.claim_job()
    assert claimed is not None and claimed.id == job.id


def end(store: JobStore, job: Job, state: Any, *, rows: int = 0, num_error: int = 0) -> None:
    """Claim a job, finish rows of it, and end it."""
    claim(store, job)
    if rows:
        store.commit_batch(job.id, make_batch(range(rows), num_error=num_error))
    store.set_state(job.id, state, reason="bad luck" if state == "failed" else None)


def seen(store: JobStore, *jobs: Job) -> list[tuple[str, bool]]:
    return [(store.job(job.id).state, store.job(job.id).waits) for job in jobs]


# ---- waiting -----------------------------------------------------------------------------


def test_a_chain_runs_one_after_the_other(store: JobStore) -> None:
    first = make_job(store)
    second = chain_after(store, first)
    third = chain_after(store, second)
    assert seen(store, first, second, third) == [("queued", False), *[("queued", True)] * 2]
    assert second.reason == f"waits for job {first.id}"
    assert (second.total, third.reason) == (None, f"waits for job {second.id}")
    end(store, first, "completed", rows=10)
    assert seen(store, second, third) == [("queued", False), ("queued", True)]
    assert store.job(second.id).reason is None
    claim(store, second)
    assert store.claim_job() is None


def test_a_job_after_one_that_has_completed_does_not_wait(store: JobStore) -> None:
    first = make_job(store)
    end(store, first, "completed", rows=10)
    assert seen(store, chain_after(store, first)) == [("queued", False)]


def test_jobs_that_only_wait_do_not_keep_the_runner(store: JobStore) -> None:
    first = make_job(store)
    chain_after(store, first)
    store.set_runner(pid=1, pid_start_time=1.0, boot_id="b", host="h", environment={})
    assert not store.stop_if_idle()
    store.set_request(first.id, "pause")
    assert store.stop_if_idle()


def test_a_paused_job_of_a_chain_stays_paused_until_it_is_resumed(store: JobStore) -> None:
    first = make_job(store)
    second = chain_after(store, first)
    store.set_request(second.id, "pause")
    end(store, first, "completed", rows=10)
    assert seen(store, second) == [("paused", False)]
    store.set_state(second.id, "queued")
    claim(store, second)


def test_a_paused_job_that_is_resumed_too_early_waits_on(store: JobStore) -> None:
    first = make_job(store)
    second = chain_after(store, first)
    store.set_request(second.id, "pause")
    store.set_state(second.id, "queued")
    assert store.job(second.id).reason == f"waits for job {first.id}"


def test_taking_the_input_ends_the_tie_to_the_earlier_job(store: JobStore) -> None:
    first = make_job(store)
    second = chain_after(store, first)
    end(store, first, "completed", rows=10)
    claim(store, second)
    with pytest.raises(
        StoreError, match=f"job {second.id} has yet to read what job {first.id} has"
    ):
        store.remove_job(first.id)
    taken = store.take_input(second.id, make_manifest(3), {"after": {"rows": 3}}, None)
    assert (taken.after, taken.spec.after, taken.record) == (None, first.id, {"after": {"rows": 3}})
    store.remove_job(first.id)
    assert store.job(second.id).state == "running"


@pytest.mark.parametrize(
    ("query", "index"),
    [
        ("select_chained", "job_after"),
        ("claim_job", "job_waiting"),
        ("select_due_hooks", "hook_open"),
        ("select_running_hooks", "hook_open"),
    ],
)
def test_jobs_that_are_over_are_not_read_through(store: JobStore, query: str, index: str) -> None:
    """What is asked at each change of a state, and by the runner again and again."""
    values = {"now": 0.0, "passed_over": "[]"}
    connection = store.database._connection
    plan = connection.execute(f"EXPLAIN QUERY PLAN {QUERIES[query]}", values).fetchall()
    assert any(f"USING INDEX {index}" in row["detail"] for row in plan), [*map(tuple, plan)]


# ---- a chain that stops ------------------------------------------------------------------


@pytest.mark.parametrize(("state", "word"), [("failed", "failed"), ("cancelled", "was cancelled")])
def test_a_job_that_ends_badly_stops_all_that_come_after_it(
    store: JobStore, state: Any, word: str
) -> None:
    first = make_job(store)
    second = chain_after(store, first)
    third = chain_after(store, second)
    other = make_job(store)
    end(store, first, state)
    assert seen(store, second, third, other) == [*[("failed", True)] * 2, ("queued", False)]
    for job in (second, third):
        reason = store.job(job.id).reason
        assert reason is not None and f"its chain stopped: job {first.id} {word}" in reason
        assert store.job(job.id).exit_code == 1
        assert store.job(job.id).finished_at is not None


def test_resuming_the_job_that_stopped_a_chain_puts_all_of_it_back(store: JobStore) -> None:
    first = make_job(store)
    second = chain_after(store, first)
    third = chain_after(store, second)
    store.set_request(first.id, "cancel")
    store.set_state(first.id, "queued")
    assert seen(store, second, third) == [("queued", True)] * 2
    assert store.job(second.id).finished_at is None
    end(store, first, "completed", rows=10)
    claim(store, second)


def test_a_job_of_the_middle_that_was_cancelled_stays_so_when_the_first_is_resumed(
    store: JobStore,
) -> None:
    first = make_job(store)
    second = chain_after(store, first)
    third = chain_after(store, second)
    store.set_request(second.id, "cancel")
    store.set_request(first.id, "cancel")
    store.set_state(first.id, "queued")
    assert seen(store, second, third) == [("cancelled", True), ("failed", True)]
    store.set_state(second.id, "queued")
    assert seen(store, second, third) == [("queued", True)] * 2


def test_a_retry_of_a_job_whose_rows_all_failed_takes_its_place(store: JobStore) -> None:
    first = make_job(store)
    second = chain_after(store, first)
    end(store, first, "failed", rows=10, num_error=10)
    assert seen(store, second) == [("failed", True)]
    reason = store.job(second.id).reason
    assert reason is not None and f"`ntx-batch retry {first.id}` puts it back" in reason
    again = retry_of(store, first)
    assert seen(store, second) == [("queued", True)]
    assert store.job(second.id).reason == f"waits for job {again.id}, a retry of job {first.id}"
    end(store, again, "completed", rows=1)
    assert seen(store, second) == [("queued", False)]


def test_a_retry_does_not_stand_for_rows_that_never_ran(store: JobStore) -> None:
    first = make_job(store)
    second = chain_after(store, first)
    end(store, first, "failed", rows=5, num_error=1)
    again = retry_of(store, first)
    assert seen(store, second) == [("failed", True)]
    end(store, again, "completed", rows=1)
    assert seen(store, second) == [("failed", True)]
    reason = store.job(second.id).reason
    assert reason is not None and f"`ntx-batch resume {first.id}` puts it back" in reason


def test_a_retry_that_is_on_its_way_is_waited_for(store: JobStore) -> None:
    first = make_job(store)
    end(store, first, "completed", rows=10, num_error=1)
    again = retry_of(store, first)
    second = chain_after(store, first)
    assert seen(store, second) == [("queued", True)]
    end(store, again, "failed", rows=1, num_error=1)
    assert seen(store, second) == [("queued", False)]


def test_a_job_that_refused_the_rows_it_got_is_put_back_by_a_retry_alone(store: JobStore) -> None:
    first = make_job(store)
    second = chain_after(store, first, after_errors="fail")
    end(store, first, "completed", rows=10, num_error=1)
    claim(store, second)
    store.note_unreadable_input(second.id)
    store.set_state(second.id, "failed", reason="1 of 10 rows")
    make_job(store)
    assert seen(store, second) == [("failed", True)]
    again = retry_of(store, first)
    assert seen(store, second) == [("queued", True)]
    store.set_request(again.id, "cancel")
    assert seen(store, second) == [("queued", False)]


def test_a_job_that_others_wait_for_is_not_removed(store: JobStore) -> None:
    first = make_job(store)
    second = chain_after(store, first)
    with pytest.raises(StoreError, match=f"`ntx-batch cancel {second.id}`"):
        store.remove_job(first.id)
    store.set_request(second.id, "cancel")
    store.remove_job(first.id)
    assert store.job(second.id).after is None


def test_a_runner_that_died_with_a_cancel_pending_stops_the_chain(store: JobStore) -> None:
    first = make_job(store)
    second = chain_after(store, first)
    claim(store, first)
    store.set_request(first.id, "cancel")
    store.mark_interrupted()
    assert seen(store, first, second) == [("cancelled", False), ("failed", True)]


# ---- rules that hold whatever is done ----------------------------------------------------

ACTIONS = ("submit", "chain", "claim", "complete", "fail", "cancel", "pause", "resume", "retry")


def act(store: JobStore, jobs: list[Job], action: str, number: int) -> None:
    """Do something to one of the jobs, as far as it can be done."""
    job = store.job(jobs[number % len(jobs)].id)
    match action:
        case "submit":
            jobs.append(make_job(store))
        case "chain" if not job.retry_of:
            jobs.append(chain_after(store, job))
        case "claim":
            store.claim_job()
        case "complete" | "fail" if job.state == "running":
            if job.after is not None:
                store.take_input(job.id, make_manifest(), {}, None)
            if store.job(job.id).num_ok + store.job(job.id).num_error == 0 and not job.retry_of:
                store.set_total(job.id, 10)
                store.commit_batch(
                    job.id, make_batch(range(10), num_error=10 if action == "fail" else 1)
                )
            store.set_state(job.id, "completed" if action == "complete" else "failed")
        case "cancel" | "pause":
            store.set_request(job.id, "cancel" if action == "cancel" else "pause")
        case "resume" if job.state in ("paused", "failed", "cancelled"):
            store.set_state(job.id, "queued")
        case "retry" if job.state in FINAL_STATES and job.num_error:
            if all(one.state in FINAL_STATES for one in store.retries(job.id)):
                jobs.append(retry_of(store, job))


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9)), max_size=40))
def test_whatever_is_done_no_job_runs_too_early_and_none_waits_in_vain(
    steps: Sequence[tuple[str, int]],
) -> None:
    with JobStore(":memory:") as store:
        jobs = [make_job(store)]
        for action, number in steps:
            act(store, jobs, action, number)
            for job in store.list_jobs():
                check_chained(store, job)


def check_chained(store: JobStore, job: Job) -> None:
    if job.after is None or job.state in ("completed", "cancelled"):
        return
    earlier, retries = store.job(job.after), store.retries(job.after)
    now = outlook(earlier, retries)
    if job.state in ("queued", "paused", "interrupted"):
        assert job.waits == (now == "waits") and now != "stopped"
    if job.state == "failed" and job.waits:
        assert now != "waits"
    if job.state != "running":
        assert next_move(job, earlier, retries) is None


def test_a_job_is_not_removed_while_one_that_failed_with_it_can_come_back(store: JobStore) -> None:
    first = make_job(store)
    second = chain_after(store, first)
    store.set_request(first.id, "cancel")
    assert store.job(second.id).state == "failed"
    with pytest.raises(StoreError, match=f"ntx-batch rm {second.id}"):
        store.remove_job(first.id)
    store.remove_job(second.id)
    store.remove_job(first.id)


def test_a_cancelled_job_does_not_say_what_it_waited_for(store: JobStore) -> None:
    second = chain_after(store, make_job(store))
    assert store.job(second.id).reason is not None
    store.set_request(second.id, "cancel")
    assert store.job(second.id).reason is None
