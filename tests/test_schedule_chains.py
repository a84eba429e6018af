"""Schedules whose job file reads what another schedule's newest run made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.records import SpecError
from ntx_batch import schedules
from tests.hook_helpers import hook_of
from tests.test_schedule_runs import MODEL, House, make_house

__all__ = ["make_house"]
TITLES = 'after = "schedule:nightly"\nprompt_template = "{{ generated_text }}"\nmax_tokens = 2\n'


@pytest.fixture
def house(make_house: Callable[..., House]) -> House:
    """Two schedules: one over files, and one, `titles`, over the results of that."""
    house = make_house()
    house.put("a", "one", "two")
    add_titles(house)
    return house


def add_titles(house: House, text: str = TITLES, **options: Any) -> None:
    file = house.folder / "titles.toml"
    file.write_text(f'model = "{MODEL}"\n{text}')
    schedules.add("0 3 * * *", file, tz="UTC", home=house.home.path, **options)


@pytest.fixture(autouse=True)
def no_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.control.ensure_runner", lambda *_, **__: None)


def history(house: House) -> list[tuple[str, str | None]]:
    runs = house.store.history(house.store.get("titles"))
    return [(run.state, run.reason) for run in reversed(runs)]


def run_titles(house: House) -> str | None:
    return schedules.run("titles", home=house.home.path)["job"]


def test_a_run_waits_for_the_job_of_the_other_schedules_newest_run(house: House) -> None:
    house.serve_at("2026-12-01T02:00:03")
    house.serve_at("2026-12-01T03:00:03")
    first, second = house.jobs.list_jobs()
    assert (second.schedule, second.run, second.spec.after) == ("titles", 1, first.id)
    assert second.reason == f"waits for job {first.id}"
    house.finish(first)
    claimed = house.jobs.claim_job()
    assert claimed is not None and claimed.id == second.id
    assert history(house) == [("running", None)]


def test_without_a_new_run_of_the_other_there_is_nothing_to_do(house: House) -> None:
    assert run_titles(house) is None
    assert history(house) == [("nothing", "no run of schedule nightly has a job yet")]
    house.serve_at("2026-12-01T02:00:03")
    first = run_titles(house)
    assert run_titles(house) is None
    (newest, *_) = house.jobs.list_jobs()
    assert history(house)[-1] == (
        "nothing",
        f"run 1 reads the results of job {newest.id} already",
    )
    assert first is not None
    house.jobs.set_request(first, "cancel")
    # What was cancelled has read nothing for good.
    assert run_titles(house) is not None


def test_a_run_after_one_that_failed_is_refused_with_the_reason(house: House) -> None:
    house.serve_at("2026-12-01T02:00:03")
    (first,) = house.jobs.list_jobs()
    house.jobs.set_request(first.id, "cancel")
    with pytest.raises(SpecError, match=f"job {first.id} is cancelled"):
        run_titles(house)


def test_a_job_file_that_names_a_job_is_no_schedule(house: House) -> None:
    with pytest.raises(SpecError, match=r'after = "schedule:NAME"'):
        add_titles(house, TITLES.replace("schedule:nightly", "d254e"), name="other")
    with pytest.raises(SpecError, match="--new-only is for input files"):
        add_titles(house, name="other", new_only=True)


def test_a_column_is_checked_as_soon_as_there_is_a_job(house: House) -> None:
    house.serve_at("2026-12-01T02:00:03")
    with pytest.raises(SpecError, match="no column generatd_text"):
        add_titles(house, TITLES.replace("generated", "generatd"), name="other")


def test_keeping_few_runs_spares_what_is_yet_to_be_read(house: House) -> None:
    house.store.remove(house.store.get("nightly"))
    schedules.add(
        "0 2 * * *", house.job_file, tz="UTC", name="nightly", keep_runs=1, home=house.home.path
    )
    schedules.run("nightly", home=house.home.path)
    first = house.finish()
    later = run_titles(house)
    schedules.run("nightly", home=house.home.path)
    ids = [job.id for job in house.jobs.list_jobs()]
    assert first.id in ids and later in ids


def test_priority_and_hooks_of_a_job_file_reach_each_run(house: House) -> None:
    house.write_job('priority = 4\non_failure = "https://example.com/secret"\n')
    house.serve_at("2026-12-01T02:00:03")
    (job,) = house.jobs.list_jobs()
    assert (job.priority, hook_of(house.jobs, job).event) == (4, "failure")


def test_what_a_command_line_reads_may_be_a_schedules_newest_run_too(house: House) -> None:
    from ntx_batch import client

    house.serve_at("2026-12-01T02:00:03")
    (first,) = house.jobs.list_jobs()
    job = client.queue(
        after="schedule:nightly",
        model=MODEL,
        prompt_template="{{ generated_text }}",
        home=Path(house.home.path),
    )
    assert job.snapshot().spec.after == first.id
