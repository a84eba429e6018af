"""Runs of schedules in the store: each occurrence once, what is new, what is held, what is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs import schedule_store
from jobs.home import Home
from jobs.records import Job, ScheduleNotFoundError, SpecError
from jobs.schedule import iso_wall
from jobs.schedule_items import find_new_rows
from jobs.schedule_store import Schedule, ScheduleSpec, ScheduleStore, Settlement
from jobs.sql import QUERIES
from jobs.store import JobStore
from ntx_batch import schedule_runs
from ntx_batch.schedule_runs import ScheduleServer
from tests.cli_helpers import ROOT
from tests.golden import GOLDEN
from tests.job_factories import finish_rows, ok_row, write_input
from tests.test_schedule import HOUR, MINUTE, at

NOON = at("2026-11-30T12:00")
MODEL = GOLDEN / "llama-q4_0.gguf"


class House:
    """A state folder with a clock of its own and one schedule."""

    def __init__(self, folder: Path, **spec: Any) -> None:
        self.folder = folder
        self.now = NOON
        self.home = Home.open(folder / "home")
        self.jobs = JobStore(self.home.state_path, clock=lambda: self.now)
        self.store = ScheduleStore(self.jobs, lambda: self.now)
        self.job_file = folder / "nightly.toml"
        self.write_job()
        values = {"cron": "0 2 * * *", "tz": "UTC", "job_file": str(self.job_file)}
        self.store.add("nightly", ScheduleSpec(**values | spec), {})

    def write_job(self, text: str = "", input: str = "in/*.parquet") -> None:
        self.job_file.write_text(f'input = "{input}"\nmodel = "{MODEL}"\nmax_tokens = 2\n{text}')

    def put(self, name: str, *prompts: str, **columns: Any) -> None:
        columns = {"prompt": list(prompts), **columns}
        write_input(self.folder / "in" / f"{name}.parquet", columns)

    @property
    def schedule(self) -> Schedule:
        return self.store.get("nightly")

    def serve(self) -> None:
        """What the runner has done every few seconds."""
        ScheduleServer(self.home, self.store, lambda: self.now).serve_all()

    def serve_at(self, utc: str) -> list[str]:
        self.now = at(utc)
        self.serve()
        return self.states()

    def run_now(self) -> Any:
        server = ScheduleServer(self.home, self.store, lambda: self.now)
        return server.make_run(self.schedule, Settlement(), self.now)

    def finish(self, job: Job | None = None) -> Job:
        """Run the oldest waiting job to its end."""
        claimed = self.jobs.claim_job()
        assert claimed is not None and (job is None or claimed.id == job.id)
        total = claimed.total or 0
        selection = self.jobs.selection(claimed.id)
        rows = range(total) if selection is None else selection[:, 0].tolist()
        self.jobs.commit_batch(claimed.id, finish_rows(claimed, [ok_row(row) for row in rows]))
        self.jobs.set_state(claimed.id, "completed")
        return self.jobs.job(claimed.id)

    def states(self) -> list[str]:
        """What became of the occurrences, oldest first."""
        return [run.state for run in reversed(self.store.history(self.schedule))]

    def reason(self) -> str:
        return self.store.history(self.schedule)[0].reason or ""


@pytest.fixture
def make_house(tmp_path: Path) -> Iterator[Any]:
    houses: list[House] = []

    def make(**spec: Any) -> House:
        houses.append(House(tmp_path, **spec))
        return houses[-1]

    yield make
    for house in houses:
        house.jobs.close()


# ---- each occurrence once ----------------------------------------------------------------


def test_an_occurrence_becomes_an_ordinary_job_that_says_whose_run_it_is(make_house: Any) -> None:
    house = make_house()
    house.put("a", "one", "two")
    assert house.serve_at("2026-12-01T01:59:59") == []
    assert house.serve_at("2026-12-01T02:00:03") == ["queued"]
    assert house.serve_at("2026-12-01T02:00:08") == ["queued"]
    (job,) = house.jobs.list_jobs()
    assert (job.schedule, job.run, job.total, job.state) == ("nightly", 1, 2, "queued")
    run = house.store.history(house.schedule)[0]
    assert (run.scheduled_at, run.job_id, run.number) == (at("2026-12-01T02:00"), job.id, 1)
    house.finish(job)
    assert house.states() == ["completed"]
    assert house.schedule.next_at == at("2026-12-02T02:00")


def test_what_fails_between_the_occurrence_and_its_job_leaves_neither(make_house: Any) -> None:
    """A kill -9 in the middle of it is the same to SQLite: one transaction, or nothing of it."""
    house = make_house()
    house.now = at("2026-12-01T02:00")
    settlement = Settlement(at=house.now, looked_at=house.now)

    def fail() -> Job:
        raise OSError("killed")

    before = house.schedule
    with pytest.raises(OSError, match="killed"):
        house.store.begin_run(house.schedule, settlement, fail)
    assert (house.schedule, house.states(), house.jobs.list_jobs()) == (before, [], [])
    house.put("a", "one")
    house.serve()
    assert house.states() == ["queued"]


def test_of_two_servers_at_once_one_makes_the_run(make_house: Any) -> None:
    house = make_house()
    house.put("a", "one")
    house.now = at("2026-12-01T02:00")
    server = ScheduleServer(house.home, house.store, lambda: house.now)
    seen = house.schedule
    settlement = Settlement(at=house.now, looked_at=house.now)
    assert server.make_run(seen, settlement, house.now).state == "queued"
    assert server.make_run(seen, settlement, house.now).state == "taken"
    assert not house.store.settle(seen, settlement, "skipped")
    assert len(house.jobs.list_jobs()) == len(house.states()) == 1


def test_whenever_servers_are_killed_an_occurrence_has_one_job(make_house: Any) -> None:
    """Several at once, SIGKILL at any time, and one that gets to its end."""
    house = make_house(new_only=True)
    house.put("a", "one")
    house.store.set_looked(house.schedule, time.time() - 30 * HOUR)
    command = [sys.executable, "-m", "ntx_batch.schedule_runs", "--home", str(house.home.path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    killed = [subprocess.Popen(command, env=environment) for _ in range(3)]
    for number, process in enumerate(killed):
        time.sleep(max(0.0, started + 0.8 * (number + 1) - time.monotonic()))
        process.kill()
        process.wait()
    subprocess.run(command, env=environment, check=True)
    assert len(house.jobs.list_jobs()) == len(house.states()) == 1
    assert house.schedule.num_runs == 1


def test_an_odd_error_is_noted_and_keeps_nothing_else_from_running(
    make_house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = make_house()
    house.put("a", "one")
    house.store.add("other", house.schedule.spec, {})
    good = schedule_runs.check_job

    def fail_first(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(schedule_runs, "check_job", good)
        raise KeyError("odd")

    monkeypatch.setattr(schedule_runs, "check_job", fail_first)
    house.serve_at("2026-12-01T02:00")
    runs = [house.store.history(house.store.get(name))[0] for name in ("nightly", "other")]
    assert sorted(run.state for run in runs) == ["queued", "refused"]
    assert [run.reason for run in runs if run.reason] == ["KeyError: 'odd'"]


def test_through_clocks_set_back_and_forward_each_occurrence_has_one_job(make_house: Any) -> None:
    """Case 98."""
    house = make_house(cron="0 * * * *", overlap="allow")
    house.put("a", "one")
    times = ["12:30", "13:00", "13:30", "12:20", "13:01", "14:00", "13:59", "14:01"]
    for clock in times:
        house.serve_at(f"2026-11-30T{clock}")
    house.serve_at("2026-12-01T14:30")  # a day ahead, and right again
    house.serve_at("2026-11-30T14:30")
    for hour in range(15, 24):
        house.serve_at(f"2026-11-30T{hour}:00")
    for hour in range(16):
        house.serve_at(f"2026-12-01T{hour:02}:00")
    runs = house.store.history(house.schedule)
    ran = sorted(run.scheduled_at - NOON for run in runs)
    assert ran == [HOUR * n for n in range(1, 28)]
    assert len(house.jobs.list_jobs()) == 27


def test_a_stopped_runner_makes_one_run_for_all_that_it_missed(make_house: Any) -> None:
    house = make_house()
    house.put("a", "one")
    assert house.serve_at("2026-12-05T09:00") == ["queued"]
    run = house.store.history(house.schedule)[0]
    assert (run.scheduled_at, run.num_missed) == (at("2026-12-05T02:00"), 4)
    assert house.serve_at("2026-12-05T09:01") == ["queued"]


def test_without_catch_up_what_was_missed_is_noted_and_not_run(make_house: Any) -> None:
    house = make_house(catch_up=False)
    house.put("a", "one")
    assert house.serve_at("2026-12-05T09:00") == ["missed"]
    assert house.store.history(house.schedule)[0].num_missed == 5
    assert "2026-12-05T02:00:00+00:00" in house.reason()
    assert house.serve_at("2026-12-06T02:01") == ["missed", "queued"]


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/Santiago"])
@pytest.mark.parametrize("clock", ["30 2", "0 0"])
def test_the_nights_on_which_clocks_change_have_one_job_each(
    make_house: Any, zone: str, clock: str
) -> None:
    """Case 94, from the clock to the job; looked at every 20 minutes."""
    house = make_house(cron=f"{clock} * * *", tz=zone, overlap="allow")
    house.put("a", "one")
    cron, _ = house.schedule.spec.parse()
    for night in ("2026-03-28", "2026-04-04", "2026-09-05", "2026-10-24"):
        house.now = at(f"{night}T12:00")
        house.store.set_looked(house.schedule, house.now)
        for _ in range(2 * 24 * 3):
            house.now += 20 * MINUTE
            house.serve()
    runs = house.store.history(house.schedule)
    dates = [iso_wall(cron, run.scheduled_at)[:10] for run in runs]
    assert len(dates) == len(set(dates)) == 8 == len(house.jobs.list_jobs())


@pytest.mark.parametrize(
    ("cron", "zone", "ran_at"),
    [
        ("30 2 * * *", "Europe/Berlin", "2026-03-29T01:00"),  # 02:00 to 03:00 does not exist
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T00:30"),  # 02:00 to 03:00 comes twice
        ("0 0 * * *", "America/Santiago", "2026-09-06T04:00"),  # 00:00 to 01:00 does not exist
        ("30 23 * * *", "America/Santiago", "2026-04-05T02:30"),  # 23:00 to 24:00 comes twice
    ],
)
@pytest.mark.parametrize("stopped", [False, True])
def test_in_such_a_night_a_stopped_runner_and_a_wrong_clock_change_no_run(
    make_house: Any, cron: str, zone: str, ran_at: str, stopped: bool
) -> None:
    """Cases 94 and 98: the run is at its instant, once, wherever the clock is set to meanwhile."""
    house = make_house(cron=cron, tz=zone, overlap="allow")
    house.put("a", "one")
    instant = at(ran_at)
    house.now = instant - 12 * HOUR
    house.store.set_looked(house.schedule, house.now)
    hours = [-6, -2, 0, 1, 2, 6] if not stopped else [6]
    back_and_forward = [-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 6.0]
    for hour in [*hours, *back_and_forward]:
        house.now = instant + hour * HOUR
        house.serve()
    runs = house.store.history(house.schedule)
    assert [(run.scheduled_at, run.num_missed) for run in runs] == [(instant, 0)]
    assert len(house.jobs.list_jobs()) == 1


def test_a_paused_schedule_makes_no_runs_and_has_missed_none_when_it_goes_on(
    make_house: Any,
) -> None:
    house = make_house()
    house.put("a", "one")
    house.store.set_paused(house.schedule, paused=True)
    assert house.serve_at("2026-12-02T09:00") == []
    house.store.set_paused(house.schedule, paused=False)
    assert house.serve_at("2026-12-02T09:01") == []
    assert house.serve_at("2026-12-03T02:00") == ["queued"]


# ---- runs that overlap -------------------------------------------------------------------


def test_while_a_run_is_not_over_the_next_is_skipped_with_the_reason(make_house: Any) -> None:
    house = make_house()
    house.put("a", "one")
    house.serve_at("2026-12-01T02:00")
    assert house.serve_at("2026-12-02T02:00") == ["queued", "skipped"]
    (job,) = house.jobs.list_jobs()
    assert house.reason() == f"run 1 is queued (job {job.id})"
    house.finish()
    assert house.serve_at("2026-12-03T02:00") == ["completed", "skipped", "queued"]
    assert house.jobs.list_jobs()[-1].run == 2


def test_one_queued_run_waits_for_the_one_before_it(make_house: Any) -> None:
    house = make_house(overlap="queue")
    house.put("a", "one")
    house.serve_at("2026-12-01T02:00")
    assert house.serve_at("2026-12-02T02:00") == ["queued", "waiting"]
    assert house.serve_at("2026-12-03T02:00") == ["queued", "waiting", "skipped"]
    house.finish()
    assert house.serve_at("2026-12-03T09:00") == ["completed", "queued", "skipped"]
    assert [job.run for job in house.jobs.list_jobs()] == [1, 2]
    assert house.store.history(house.schedule)[1].scheduled_at == at("2026-12-02T02:00")


# ---- nothing to do, and what cannot be done ----------------------------------------------


def test_input_is_looked_for_at_each_run(make_house: Any) -> None:
    house = make_house(overlap="allow")
    assert house.serve_at("2026-12-01T02:00") == ["nothing"]
    assert "in/*.parquet matches no files" in house.reason()
    house.put("a", "one")
    house.put("b", "two")
    assert house.serve_at("2026-12-02T02:00") == ["nothing", "queued"]
    (job,) = house.jobs.list_jobs()
    assert (len(job.manifest.files), job.run) == (2, 1)


def test_a_run_that_cannot_be_made_is_noted_and_the_next_is_tried(make_house: Any) -> None:
    house = make_house()
    house.put("a", "one")
    for text, said in (
        ("tempratur = 1", "did you mean temperature"),
        ('key = "k"', "would make all runs one job"),
        ('output = "out"', "put {date} or {run}"),
        ('model = "gone"', "not TOML"),
    ):
        house.write_job(text)
        assert house.run_now().state == "refused"
        assert said in house.reason()
    house.job_file.unlink()
    assert house.serve_at("2026-12-01T02:00")[-1] == "refused"
    assert "nightly.toml cannot be read" in house.reason()
    house.write_job()
    assert house.serve_at("2026-12-02T02:00")[-1] == "queued"


def test_date_and_run_go_into_input_output_and_template(make_house: Any) -> None:
    house = make_house(tz="Europe/Madrid", cron="30 0 * * *")
    house.put("2026-12-01", "one")
    house.write_job(
        'output = "out/{date}/{run}"\nprompt_template = "{date}: {{prompt}} no {run}"',
        input="in/{date}.parquet",
    )
    house.serve_at("2026-11-30T23:31")
    (job,) = house.jobs.list_jobs()
    assert job.spec.input == str(house.folder / "in" / "2026-12-01.parquet")
    assert job.results_dir == str(house.folder / "out" / "2026-12-01" / "1")
    assert job.spec.prompt_template == "2026-12-01: {{prompt}} no 1"
    house.finish()
    assert house.serve_at("2026-12-01T23:31") == ["completed", "nothing"]
    assert "there is no input" in house.reason() and "2026-12-02.parquet" in house.reason()


# ---- only what is new --------------------------------------------------------------------


def files_of(job: Job) -> list[str]:
    return [Path(file.path).stem for file in job.manifest.files]


def test_new_only_runs_each_file_once_its_job_has_completed(make_house: Any) -> None:
    house = make_house(new_only=True)
    house.put("a", "one")
    house.put("b", "two", "three")
    first = house.run_now().job
    assert files_of(first) == ["a", "b"]
    house.finish()
    assert house.run_now().state == "nothing"
    assert "all 2 files of" in house.reason()
    house.put("c", "four")
    second = house.run_now().job
    assert files_of(second) == ["c"]
    assert (second.total, second.manifest.files[0].first_row) == (1, 0)
    house.put("d", "five")
    assert files_of(house.run_now().job) == ["d"], "c is on its way"
    house.jobs.set_request(second.id, "cancel")
    assert files_of(house.run_now().job) == ["c"], "and is not done now"
    house.finish()


def test_a_file_that_was_written_anew_is_new(make_house: Any) -> None:
    house = make_house(new_only=True)
    house.put("a", "one")
    house.run_now()
    house.finish()
    house.put("a", "another", "two")
    assert house.run_now().job.total == 2


def test_files_that_are_done_need_not_go_with_the_new_ones(make_house: Any) -> None:
    house = make_house(new_only=True)
    house.put("a", "one", score=["high"])
    house.run_now()
    house.finish()
    house.put("b", "two", score=[{"value": 1}])
    assert files_of(house.run_now().job) == ["b"]


def test_new_only_with_an_id_column_runs_rows_whose_id_is_new(make_house: Any) -> None:
    house = make_house(new_only=True, id_column="id")
    house.write_job("samples = 2\ntemperature = 1.0\n")
    house.put("a", "one", "two", "three", id=["x", "y", None])
    first = house.run_now().job
    assert house.jobs.selection(first.id).tolist() == [[r, s] for r in range(3) for s in range(2)]
    house.jobs.claim_job()
    house.jobs.set_state(first.id, "completed")
    house.put("a", "zero", "one", "two", "three", "four", id=["w", "x", "y", None, "w"])
    second = house.run_now().job
    assert np.unique(house.jobs.selection(second.id)[:, 0]).tolist() == [0, 3, 4]
    assert second.total == 6


def test_ids_of_text_files_are_read_to_their_end(make_house: Any) -> None:
    house = make_house(new_only=True, id_column="id")
    lines = [json.dumps({"prompt": f"p{n}", "id": n}) for n in range(30)]
    (house.folder / "in").mkdir()
    path = house.folder / "in" / "a.jsonl"
    path.write_text("\n".join(lines[:20]))
    house.write_job("limit = 12\n", input="in/a.jsonl")
    first = house.run_now().job
    assert house.jobs.selection(first.id)[:, 0].tolist() == list(range(12))
    house.jobs.claim_job()
    house.jobs.set_state(first.id, "completed")
    path.write_text("\n".join([*lines, "no json"]))
    assert house.jobs.selection(house.run_now().job.id)[:, 0].tolist() == list(range(12, 24))


def test_an_id_column_that_is_not_there_is_refused_by_name(make_house: Any) -> None:
    house = make_house(new_only=True, id_column="key")
    house.put("a", "one", id=[1])
    assert house.run_now().state == "refused"
    assert "--id-column key" in house.reason() and "prompt, id" in house.reason()


def test_ids_are_looked_up_by_blocks(make_house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.schedule_items.BLOCK_ROWS", 4)
    house = make_house()
    house.put("a", *"abcdefghij", id=list(range(10)))
    manifest = house.run_now().job.manifest
    found = find_new_rows(manifest, "id", lambda items: {i for i in items if int(i) % 3 == 0})
    assert found.rows == [0, 3, 6, 9] and list(found.items) == ["0", "3", "6", "9"]
    assert find_new_rows(manifest, "id", set, limit=6).rows == list(range(6))


# ---- what is kept ------------------------------------------------------------------------


def test_keep_runs_removes_older_jobs_and_results_and_no_folder_of_output(make_house: Any) -> None:
    house = make_house(keep_runs=2)
    house.put("a", "one")
    made = []
    for day in range(1, 4):
        house.serve_at(f"2026-12-0{day}T02:00")
        made.append(house.finish())
        Path(made[-1].results_dir).mkdir(parents=True, exist_ok=True)
    house.write_job('output = "out/{run}"')
    house.serve_at("2026-12-04T02:00")
    last = house.finish()
    Path(last.results_dir).mkdir(parents=True)
    kept = [job.id for job in house.jobs.list_jobs()]
    assert kept == [made[2].id, last.id]
    assert [house.home.job_dir(job.id).exists() for job in made] == [False, False, True]
    for day in range(5, 8):
        house.serve_at(f"2026-12-0{day}T02:00")
        house.finish()
    assert last.id not in [job.id for job in house.jobs.list_jobs()]
    assert (house.folder / "out" / "4").is_dir()
    assert house.states() == ["completed"] * 7, "the history stays"


def test_a_job_that_is_removed_before_its_end_leaves_a_run_that_is_over(make_house: Any) -> None:
    house = make_house(new_only=True)
    house.put("a", "one")
    job = house.run_now().job
    house.jobs.remove_job(job.id)
    assert (house.states(), house.reason()) == (["cancelled"], "its job was removed")
    assert files_of(house.run_now().job) == ["a"]


# ---- when jobs run -----------------------------------------------------------------------


def test_a_job_waits_for_its_window(make_house: Any) -> None:
    house = make_house(window="22:00-07:00", tz="Europe/Madrid")
    house.put("a", "one")
    job = house.run_now().job  # 13:00 there
    assert job.state == "paused"
    assert job.reason == "outside its window 22:00-07:00 Europe/Madrid; goes on at 22:00"
    house.store.hold_back(at("2026-11-30T20:59"))
    assert house.jobs.claim_job() is None
    house.store.hold_back(at("2026-11-30T21:00"))
    assert house.states() == ["queued"]
    house.store.hold_back(at("2026-12-01T06:00"))
    assert house.states() == ["paused"], "it did not get its turn in the night"
    house.jobs.set_state(job.id, "queued")
    house.store.hold_back(at("2026-12-01T06:01"))
    assert house.states() == ["paused"], "a resume by hand does not open it"


def test_a_pause_by_hand_is_not_ended_by_the_window(make_house: Any) -> None:
    house = make_house(window="22:00-07:00")
    house.put("a", "one")
    house.now = at("2026-11-30T23:00")
    job = house.run_now().job
    house.jobs.set_request(job.id, "pause")
    for hour in ("23:30", "12:00", "22:30"):
        house.store.hold_back(at(f"2026-12-01T{hour}"))
        assert house.states() == ["paused"]


def test_a_job_that_ran_for_long_enough_goes_on_when_the_next_run_is_due(make_house: Any) -> None:
    house = make_house(max_runtime_s=2 * HOUR)
    house.put("a", "one")
    house.serve_at("2026-12-01T02:00")
    job = house.jobs.claim_job()
    for seconds, expected in ((HOUR, None), (HOUR - 1, None), (1, "max_runtime")):
        house.store.add_run_time(job.id, seconds)
        refusal = house.store.bounds(job.id).why_not(house.now)
        assert (refusal and refusal[0]) == expected
    house.store.set_held(job.id, "max_runtime")
    house.jobs.set_state(job.id, "paused", reason=refusal[1])
    house.store.hold_back(at("2026-12-01T23:00"))
    assert house.states() == ["paused"]
    assert "ran for 2h (--max-runtime)" in house.reason()
    assert house.serve_at("2026-12-02T02:00") == ["queued", "skipped"]
    assert house.reason() == f"run 1 is paused (job {job.id}), and goes on"
    assert house.store.bounds(job.id).why_not(house.now) is None
    house.finish()


def test_a_held_job_that_is_killed_before_it_pauses_is_held_no_more(make_house: Any) -> None:
    house = make_house(window="22:00-07:00")
    house.put("a", "one")
    house.now = at("2026-11-30T23:00")
    job = house.run_now().job
    house.jobs.claim_job()
    house.store.set_held(job.id, "window")
    house.jobs.mark_interrupted()
    assert house.store.history(house.schedule)[0].held is None
    house.store.hold_back(at("2026-12-01T12:00"))
    assert house.states() == ["paused"]
    house.store.hold_back(at("2026-12-01T22:00"))
    assert house.states() == ["queued"]


# ---- schedules themselves ----------------------------------------------------------------


def test_names_are_unique_and_unknown_ones_are_told(make_house: Any) -> None:
    house = make_house()
    with pytest.raises(SpecError, match="another name with --name"):
        house.store.add("nightly", house.schedule.spec, {})
    with pytest.raises(ScheduleNotFoundError, match="'daily'; there are nightly"):
        house.store.get("daily")


def test_a_schedule_that_is_removed_leaves_its_jobs(make_house: Any) -> None:
    house = make_house(new_only=True)
    house.put("a", "one")
    job = house.run_now().job
    house.store.remove(house.schedule)
    assert house.store.list_schedules() == []
    assert house.jobs.job(job.id).schedule == "nightly"
    house.finish()


def test_an_idle_runner_stays_while_a_schedule_may_want_it(make_house: Any) -> None:
    house = make_house()
    house.jobs.set_runner(pid=1, pid_start_time=1.0, boot_id="b", host="h", environment={})
    assert not house.jobs.stop_if_idle()
    house.store.set_paused(house.schedule, paused=True)
    assert house.jobs.stop_if_idle()


def test_a_number_whose_folder_has_results_is_passed_over(make_house: Any, tmp_path: Path) -> None:
    """As after a schedule that was removed, whose runs were named by the same job file."""
    house = make_house()
    house.write_job(f'output = "{tmp_path}/out/{{date}}-{{run}}"')
    house.put("a", "one")
    for number in (1, 2):
        folder = tmp_path / "out" / f"2026-12-01-{number}"
        folder.mkdir(parents=True)
        (folder / "part.parquet").write_bytes(b"kept")
    assert house.serve_at("2026-12-01T02:00:03") == ["queued"]
    (job,) = house.jobs.list_jobs()
    assert job.run == 3
    assert job.results_dir == f"{tmp_path}/out/2026-12-01-3"
    assert (tmp_path / "out" / "2026-12-01-1" / "part.parquet").read_bytes() == b"kept"


@pytest.mark.parametrize(
    ("query", "index"),
    [
        ("select_taken_items", "USING PRIMARY KEY (schedule_id=? AND item=?)"),
        ("select_schedules_to_serve", "schedule_run USING INDEX schedule_run_open"),
        ("select_bounded_runs", "schedule_run USING INDEX schedule_run_open"),
        ("forget_old_occurrences", "(schedule_id=? AND scheduled_at<?)"),
    ],
)
def test_a_long_history_is_not_read_through(make_house: Any, query: str, index: str) -> None:
    """What the runner asks every few seconds, and what is asked for each block of ids."""
    connection = make_house().jobs.database._connection
    values = {"schedule_id": 1, "items": "[]", "now": 0.0, "num_kept": 10}
    plan = connection.execute(f"EXPLAIN QUERY PLAN {QUERIES[query]}", values).fetchall()
    assert any(index in row["detail"] for row in plan), [row["detail"] for row in plan]


def test_of_occurrences_without_a_job_the_newest_are_kept_and_all_with_one(
    make_house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule that finds nothing to do, each minute for a year, does not fill the disk."""
    monkeypatch.setattr(schedule_store, "MAX_OCCURRENCES", 5)
    house = make_house(cron="* * * * *", new_only=True)
    house.put("a", "one")
    house.serve_at("2026-11-30T12:01")
    house.finish()
    for minute in range(2, 40):
        house.serve_at(f"2026-11-30T12:{minute:02}")
        house.serve()
    assert house.states() == ["completed"] + ["nothing"] * 6
    runs = house.store.history(house.schedule)
    assert [run.scheduled_at for run in runs[:6]] == [NOON + MINUTE * n for n in range(39, 33, -1)]
    house.put("a", "one", "two")
    assert house.serve_at("2026-11-30T12:40")[-1] == "queued", "it is known what was done"
