"""Which job runs next: of the highest priority the oldest, and never in place of one that runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.records import Job, SpecError
from jobs.store import JobStore
from ntx_batch import actions, client
from ntx_batch.submission import read_submission
from tests.cli_helpers import run_here
from tests.job_factories import make_manifest, make_spec
from tests.runner_helpers import make_home

PRIORITIES = st.lists(st.integers(-3, 3), min_size=1, max_size=12)


def add(store: JobStore, priority: int) -> Job:
    return store.create_job(make_spec(), make_manifest(), {}, priority=priority)


def claim_all(store: JobStore) -> list[str]:
    claimed = []
    while (job := store.claim_job()) is not None:
        claimed.append(job.id)
    return claimed


@given(PRIORITIES)
def test_jobs_run_by_priority_and_then_by_age(priorities: Sequence[int]) -> None:
    with JobStore(":memory:") as store:
        jobs = [add(store, priority) for priority in priorities]
        ages = range(len(jobs))
        wanted = sorted(ages, key=lambda age: (-priorities[age], age))
        assert claim_all(store) == [jobs[age].id for age in wanted]


@given(PRIORITIES, st.data())
def test_a_priority_that_is_changed_counts_from_then_on(
    priorities: list[int], data: st.DataObject
) -> None:
    with JobStore(":memory:") as store:
        jobs = [add(store, priority) for priority in priorities]
        ages = list(range(len(jobs)))
        while ages:
            changed = data.draw(st.sampled_from(ages))
            priorities[changed] = data.draw(st.integers(-3, 3))
            assert store.set_priority(jobs[changed].id, priorities[changed])
            due = min(ages, key=lambda age: (-priorities[age], age))
            claimed = store.claim_job()
            assert claimed is not None and claimed.id == jobs[due].id
            ages.remove(due)


def test_an_interrupted_job_goes_by_the_same_rule(tmp_path: Path) -> None:
    with JobStore(tmp_path / "state.sqlite") as store:
        low, high = add(store, 0), add(store, 5)
        store.set_request(high.id, "pause")
        claimed = store.claim_job()
        assert claimed is not None and claimed.id == low.id
        store.set_state(high.id, "queued")
        assert store.job(low.id).state == "running"
        store.mark_interrupted()
        assert claim_all(store) == [high.id, low.id]


def test_the_priority_of_a_job_that_is_over_is_not_changed(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    with JobStore(home.state_path) as store:
        job = add(store, 0)
        store.set_request(job.id, "cancel")
    assert actions.set_priority(home, job.id, 4) == f"job {job.id} had already been cancelled"


@pytest.mark.parametrize("priority", [1.5, True, "high", 10**9])
def test_a_priority_is_a_whole_number(priority: object) -> None:
    with pytest.raises(SpecError, match="priority is a whole number from -1000000 to 1000000"):
        read_submission("a.parquet", {"model": "m.gguf", "priority": priority})


def test_priorities_are_shown_where_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path / "home")
    monkeypatch.setenv("NTX_HOME", str(home.path))
    with JobStore(home.state_path) as store:
        job, _ = add(store, 0), add(store, 0)
    assert "PRIORITY" not in run_here(capsys, "list").out
    ran = run_here(capsys, "priority", job.id, "-7")
    assert (ran.code, ran.err) == (0, f"job {job.id} has priority -7\n")
    (line,) = (line for line in run_here(capsys, "list").out.splitlines() if job.id in line)
    assert "-7" in line.split()
    assert "priority  -7" in run_here(capsys, "status", job.id).out
    assert client.job(job.id).status()["priority"] == -7
