"""What people read about a job: its last line, its progress, a table without rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from jobs.records import Job
from jobs.store import JobStore
from ntx_batch import render
from ntx_batch.report import facts as report_facts
from ntx_batch.status import status_record
from tests.job_factories import make_job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    with JobStore(tmp_path / "state.sqlite") as store:
        return replace(make_job(store), total=2)


def test_a_job_that_is_over_without_rows_has_no_speed(job: Job) -> None:
    cancelled = replace(job, state="cancelled")
    assert render.summary(cancelled, 0.0) == (
        f"job {job.id} cancelled: 0 ok, 0 failed of 2, 2 cancelled"
    )


def test_progress_tells_waiting_from_getting_ready(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    running = replace(job, state="running")
    assert list(render.show_progress([job, running])) == [job, running]
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"{job.id} queued: 0 ok, 0 failed of 2; not begun"
    assert "the engine gets ready" in second


def test_status_names_the_job_beside_what_it_achieved(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    achieved = {"num_sweeps": 3, "sweep_s": 0.5, "tokens_per_s": 8.0, "job_s": 6.2}
    render.print_status(replace(job, state="completed", record={"achieved": achieved}), 0.0)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["job", job.id] in lines
    assert ["computing", "6.2", "s"] in lines


def engine_record(node: str, num_lost: int = 0, **values: object) -> dict[str, object]:
    losses = ["its process is gone"] * num_lost
    record = {"node": node, "device_name": "cpu", "rows_on_board": 3, "tokens_per_s": 10.0}
    return record | {"losses": losses, "num_lost": num_lost} | values


def test_status_tells_of_engines_where_there_are_several_or_one_was_lost(job: Job) -> None:
    def told(*engines: dict[str, object]) -> dict[str, str]:
        return render.engine_facts(replace(job, record={"engines": list(engines)}))

    assert told() == {}
    assert told(engine_record("here")) == {}
    assert told(engine_record("here"), engine_record("there", 2, tokens_per_s=None)) == {
        "engine 0": "here: 3 rows on board, 10.0 tokens/s",
        "engine 1": "there: 3 rows on board; lost 2 times, the last time: its process is gone",
    }
    assert told(engine_record("here", 1))["engine 0"].endswith(
        "lost once, the last time: its process is gone"
    )
    report = dict(
        report_facts.engine_facts(
            {"device": "cpu", "engines": [engine_record("here"), engine_record("there", 2)]}
        )
    )
    assert report["engine 0"] == "cpu on here, 10 tokens/s generated"
    assert report["engine 1"].endswith("lost 2 times")


def test_status_tells_what_was_not_computed_again(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    done = replace(job, num_ok=2, prompt_tokens=4000, reused_tokens=3000, num_copied=1)
    render.print_status(done, 0.0)
    shown = capsys.readouterr().out
    assert "1 row is a copy of an equal one" in shown
    assert "3,000 prompt tokens, 75% of all" in shown
    assert (status_record(done, 0.0)["reused_tokens"], status_record(done, 0.0)["copied"]) == (
        3000,
        1,
    )
    render.print_status(job, 0.0)
    assert "copied" not in (shown := capsys.readouterr().out) and "reused" not in shown


def test_samples_of_a_row_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("row_index", "sample_index", "status", "generated_text", "completion_tokens")
    rows = [(7, sample, "ok", "text", 1) for sample in range(2)]
    names = (*names, "finish_reason")
    render.print_results(names, [(*row, "stop") for row in rows], prefix="", errors=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines if "text" in line][1:] == ["7", "7.1"]


def test_status_names_the_device_its_memory_and_why_it_was_chosen(job: Job) -> None:
    """Case 67."""
    assert render.device_facts(job) == {}
    on_cpu = {"device_name": "cpu", "device_reason": "no GPU can be used: there is no driver"}
    assert render.device_facts(replace(job, record=on_cpu)) == {
        "device": "cpu (no GPU can be used: there is no driver)"
    }
    on_gpu = {
        "device_name": "NVIDIA RTX 1",
        "device_reason": "one is there",
        "device_nbytes": 24 << 30,
        "device_free_nbytes": 23 << 30,
        "device_budget_nbytes": None,
        "driver_version": "570.86.10",
        "cuda_runtime": "12.8",
    }
    assert render.device_facts(replace(job, record=on_gpu)) == {
        "device": "NVIDIA RTX 1, 23.0 GiB of its 24.0 GiB, driver 570.86.10, CUDA 12.8 "
        "(one is there)"
    }


@pytest.mark.parametrize(("errors", "text"), [(True, "no failed rows"), (False, "no rows")])
def test_a_table_without_rows_is_a_note(
    errors: bool, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    render.print_results(["id", "row_index"], [], prefix="", errors=errors)
    printed = capsys.readouterr()
    assert printed.out == "" and text in printed.err
