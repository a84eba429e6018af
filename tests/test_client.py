"""The Python API: the same words as the command line."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ntx_batch
from jobs.control import stop_runner
from jobs.home import Home
from jobs.records import Job, JobNotFoundError, RunnerError
from jobs.store import JobStore
from ntx_batch import client
from ntx_batch.status import rates_of, status_record
from tests.cli_helpers import MODEL, ROOT, queue_job, write_prompts
from tests.job_factories import bad_row, finish_rows, make_job, ok_row
from tests.runner_helpers import make_home, wait_until


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a state folder `home`, whose runner is stopped in the end."""
    folder = tmp_path_factory.mktemp("client")
    home = make_home(folder / "home")
    yield folder
    stop_runner(home)


def test_submit_wait_results(work: Path) -> None:
    prompts = write_prompts(work / "prompts.parquet", ["one", "", "three"], id=[7, 8, 9])
    said: list[str] = []
    job = ntx_batch.submit(
        prompts, model=MODEL, max_tokens=4, ignore_eos=True, home=work / "home", say=said.append
    )
    assert job.wait() == 3
    table = job.results()
    assert table.column("id").to_pylist() == [7, 8, 9]
    assert table.column("row_index").to_pylist() == [0, 1, 2]
    assert table.column("status").to_pylist() == ["ok", "error", "ok"]
    assert table.column("completion_tokens").to_pylist()[0] == 4
    assert job.results(errors=True).column("error_code").to_pylist() == ["empty_prompt"]
    assert job.results(head=1).num_rows == 1
    assert said == ["3 rows of 1 file; prompts from column prompt"]
    assert job.status()["exit_code"] == 3


def test_run_waits_and_writes_to_the_folder_asked_for(work: Path) -> None:
    prompts = write_prompts(work / "again.parquet", ["one"])
    job = ntx_batch.run(
        prompts, model=str(MODEL), max_tokens=2, output=work / "answers", home=work / "home"
    )
    assert job.snapshot().state == "completed"
    assert job.snapshot().results_dir == str(work / "answers")
    assert all(path.suffix == ".parquet" for path in (work / "answers").iterdir())
    found = ntx_batch.job(job.id[:10], home=work / "home")
    assert found.results() == job.results()
    assert ntx_batch.list_jobs(home=work / "home")[0] == job


def test_run_pauses_its_job_when_interrupted_twice(work: Path) -> None:
    home = work / "home"
    prompts = write_prompts(work / "long.parquet", [f"word {row}" for row in range(2000)])
    options = {"model": str(MODEL), "max_tokens": 200, "ignore_eos": True, "home": str(home)}
    code = f"import ntx_batch; ntx_batch.run({str(prompts)!r}, **{options})"
    command = [sys.executable, "-c", code]

    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        wait_until(lambda: (found := long_job(home)) and found.num_ok)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in err
    wait_until(lambda: (found := long_job(home)) and found.state != "running")
    found = long_job(home)
    assert found is not None and found.state == "paused"


def long_job(home: Path) -> Job | None:
    jobs = client.snapshots(home=home)
    return next((job for job in jobs if job.spec.input.endswith("long.parquet")), None)


def test_a_folder_with_files_is_refused(work: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.parquet", ["one"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    with pytest.raises(ntx_batch.ResultsError, match="not empty"):
        ntx_batch.submit(prompts, model=MODEL, output=tmp_path / "full", home=work / "home")


def test_unknown_options_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ntx_batch.SpecError, match="did you mean temperature"):
        ntx_batch.submit("prompts.parquet", model=MODEL, temprature=1, home=tmp_path)


def test_export_counts_rows(tmp_path: Path) -> None:
    handle = finished_job(tmp_path)
    assert handle.export(tmp_path / "all.jsonl") == 2
    assert handle.export(tmp_path / "bad.jsonl", errors=True) == 1
    names, rows = handle.rows(head=1)
    assert dict(zip(names, next(rows), strict=True))["generated_text"] == "un"


def finished_job(folder: Path) -> client.JobHandle:
    prompts = write_prompts(folder / "prompts.parquet", ["one", "two"])
    job = queue_job(folder / "home", prompts)
    home = Home.open(folder / "home")
    with JobStore(home.state_path) as store:
        store.claim_job()
        store.commit_batch(job.id, finish_rows(job, [bad_row(1), ok_row(0, "un")]))
    return client.JobHandle(job.id, home)


def test_a_handle_shows_its_id_alone(tmp_path: Path) -> None:
    assert repr(client.JobHandle("d255kpmevbm8", Home(tmp_path))) == "JobHandle(id='d255kpmevbm8')"


def test_an_empty_id_names_no_job(tmp_path: Path) -> None:
    with JobStore(Home.open(tmp_path).state_path) as store:
        make_job(store)
    with pytest.raises(JobNotFoundError, match="is empty"):
        client.job("", home=tmp_path)


def test_a_prefix_that_fits_several_jobs_is_refused(tmp_path: Path) -> None:
    with JobStore(Home.open(tmp_path).state_path) as store:
        first, second = make_job(store).id, make_job(store).id
    same = "".join(a for a, b in zip(first, second, strict=True) if a == b)[:4]
    with pytest.raises(JobNotFoundError, match="2 jobs begin with"):
        client.job(same, home=tmp_path)


def test_waiting_for_a_job_that_no_runner_runs_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RUNNER_GRACE_S", 0.2)
    job = queue_job(tmp_path, write_prompts(tmp_path / "prompts.parquet", ["one"]))
    with pytest.raises(RunnerError, match="ntx-batch runner start"):
        client.job(job.id, home=tmp_path).wait()


# ---- numbers of a job at one moment --------------------------------------------------------


def test_rates_are_unknown_before_the_first_row(tmp_path: Path) -> None:
    with JobStore(Home.open(tmp_path).state_path) as store:
        rates = rates_of(make_job(store), 100.0)
    assert (rates.tokens_per_s, rates.prompt_tokens_per_s, rates.eta_s) == (None, None, None)


def test_rates_count_from_the_first_admission(tmp_path: Path) -> None:
    queued = queue_job(tmp_path, write_prompts(tmp_path / "p.parquet", ["x"] * 10))
    with JobStore(Home.open(tmp_path).state_path) as store:
        store.claim_job()
        store.set_record(queued.id, {"first_admission_at": 100.0})
        store.commit_batch(queued.id, finish_rows(queued, [ok_row(i) for i in range(4)]))
        job = store.job(queued.id)
    rates = rates_of(job, 108.0)
    assert rates.tokens_per_s == job.completion_tokens / 8 == 1.5
    assert rates.prompt_tokens_per_s == job.prompt_tokens / 8 == 1.0
    assert rates.eta_s == 8 / 4 * 6


def test_a_status_record_has_null_where_nothing_is_known(tmp_path: Path) -> None:
    with JobStore(Home.open(tmp_path).state_path) as store:
        record = status_record(make_job(store), 100.0)
    assert record["started_at"] is record["eta_s"] is record["exit_code"] is None
    assert record["created_at"].endswith("+00:00")
