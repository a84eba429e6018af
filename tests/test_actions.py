"""cancel, pause, resume, retry, rm, keys and limits: what they do in each state, and say."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine import ROW_ERROR_CODES, FinishedRow
from jobs.control import RunnerLock, runner_status
from jobs.home import HOME_VARIABLE, Home
from jobs.job_run import error_limit
from jobs.messages import Event
from jobs.processes import ProcessId
from jobs.records import INPUT_ERROR_CODES, Job, JobState
from jobs.results import read_results
from jobs.runner import Runner
from jobs.stop_signal import StopSignal
from jobs.store import JobStore
from ntx_batch import client
from ntx_batch.actions import hopeless_rows
from ntx_batch.submission import queue_job as queue_submission
from ntx_batch.submission import read_submission
from tests.cli_helpers import MODEL, Ran, run_here, write_prompts
from tests.job_factories import bad_row, ok_row
from tests.runner_helpers import ScriptedDriver, make_home, queue_job, wait_over, wait_until

NUM_ROWS = 60
Command = Callable[..., Ran]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    return make_home(tmp_path / "home")


@pytest.fixture
def store(home: Home) -> Iterator[JobStore]:
    with JobStore(home.state_path) as store:
        yield store


@pytest.fixture
def ntx(home: Home, capsys: pytest.CaptureFixture[str]) -> Command:
    return lambda *arguments: run_here(capsys, *arguments)


@pytest.fixture
def job(store: JobStore, tmp_path: Path) -> Job:
    prompts = [f"prompt {row}" for row in range(NUM_ROWS)]
    return queue_job(store, tmp_path / "in.parquet", prompts, shard_rows=1)


class SlowDriver(ScriptedDriver):
    def wait(self, timeout_s: float, others: Sequence[int] = ()) -> list[Event]:
        time.sleep(0.01)
        return super().wait(timeout_s, others)


@contextmanager
def runner(
    home: Home, answer: Callable[[int], FinishedRow] = ok_row, **options: Any
) -> Iterator[list[SlowDriver]]:
    """A runner in a thread, which gives one row an answer each 10 ms; its drivers so far."""
    drivers: list[SlowDriver] = []
    ready = threading.Event()

    with StopSignal() as stop:

        def run() -> None:
            with RunnerLock(home) as lock, JobStore(home.state_path) as store:

                def start(home: Home) -> SlowDriver:
                    drivers.append(SlowDriver(store, answer=answer))
                    return drivers[-1]

                ready.set()
                Runner(home, lock, store=store, stop=stop, start_driver=start, **options).run()

        thread = threading.Thread(target=run)
        thread.start()
        assert ready.wait(10)
        try:
            yield drivers
        finally:
            stop.set()
            thread.join(20)
            assert not thread.is_alive()


def wait_rows(store: JobStore, job: Job, count: int = 3) -> None:
    wait_until(lambda: store.job(job.id).num_ok + store.job(job.id).num_error >= count)


def counts_add_up(job: Job) -> bool:
    return job.num_ok + job.num_error + job.num_cancelled + (job.num_remaining or 0) == job.total


# ---- cancel ------------------------------------------------------------------------------


def test_cancel_a_queued_job_at_once_and_again(ntx: Command, store: JobStore, job: Job) -> None:
    """Case 41: cancel while queued, cancel twice: harmless, and it says so."""
    ran = ntx("cancel", job.id[:8])
    assert (ran.code, ran.out) == (0, "")
    assert f"job {job.id} cancelled; its 0 finished rows are kept" in ran.err
    assert store.job(job.id).state == "cancelled"
    again = ntx("cancel", job.id)
    assert (again.code, again.err.strip()) == (0, f"job {job.id} was already cancelled")
    assert ntx("wait", job.id).code == 4
    assert counts_add_up(store.job(job.id))
    assert store.job(job.id).num_cancelled == NUM_ROWS


def test_cancel_a_running_job_keeps_its_rows(
    ntx: Command, home: Home, store: JobStore, job: Job
) -> None:
    """Case 41: finished rows kept; `results` shows the others as cancelled."""
    with runner(home):
        wait_rows(store, job)
        started = time.monotonic()
        assert "cancelled; its" in ntx("cancel", job.id).err
        assert time.monotonic() - started < 5
        done = store.job(job.id)
    assert done.state == "cancelled"
    assert 3 <= done.num_ok < NUM_ROWS
    assert counts_add_up(done)
    table = read_results(store.finished(job.id))
    assert table["status"].to_pylist().count("ok") == done.num_ok
    assert table["status"].to_pylist().count("cancelled") == done.num_cancelled
    assert table["row_index"].to_pylist() == list(range(NUM_ROWS))
    assert table["id"].to_pylist() == [f"row {row}" for row in range(NUM_ROWS)]


@pytest.mark.parametrize(
    ("state", "said"), [("completed", "had already completed"), ("failed", "had already failed")]
)
def test_cancel_a_job_that_is_over(
    ntx: Command, store: JobStore, job: Job, state: JobState, said: str
) -> None:
    """Case 41: cancel a finished job."""
    store.claim_job()
    store.set_state(job.id, state)
    for word in ("cancel", "pause"):
        ran = ntx(word, job.id)
        assert (ran.code, ran.err.strip()) == (0, f"job {job.id} {said}")
    assert store.job(job.id).state == state


# ---- pause and resume --------------------------------------------------------------------


def test_pause_and_resume_lose_and_double_no_row(
    ntx: Command, home: Home, store: JobStore, job: Job
) -> None:
    with runner(home) as drivers:
        wait_rows(store, job)
        said = ntx("pause", job.id).err
        assert "paused; its" in said and f"go on with `ntx-batch resume {job.id}`" in said
        assert ntx("pause", job.id).err.strip() == f"job {job.id} was already paused"
        assert ntx("wait", job.id).code == 5
        paused = store.job(job.id)
        assert paused.state == "paused" and paused.num_ok < NUM_ROWS and counts_add_up(paused)
        ran = ntx("resume", job.id)
        assert f"is queued again; its {paused.num_ok} finished rows are kept" in ran.err
        assert "was already" in ntx("resume", job.id).err
        done = wait_over(store, job)
    assert (done.state, done.num_ok, done.attempt) == ("completed", NUM_ROWS, 2)
    rows = [shard.begin for driver in drivers for shard in driver.shards]
    assert sorted(set(rows)) == list(range(NUM_ROWS))
    assert read_results(store.finished(job.id))["row_index"].to_pylist() == list(range(NUM_ROWS))
    assert "had already completed" in ntx("resume", job.id).err


def test_a_cancelled_job_goes_on_after_resume(
    ntx: Command, home: Home, store: JobStore, job: Job
) -> None:
    with runner(home):
        wait_rows(store, job)
        ntx("cancel", job.id)
        ntx("resume", job.id)
        done = wait_over(store, job)
    assert (done.state, done.num_ok, done.num_cancelled) == ("completed", NUM_ROWS, 0)


def test_resume_of_a_changed_job_is_usage_and_lists_the_differences(
    ntx: Command, home: Home, store: JobStore, job: Job, tmp_path: Path
) -> None:
    """Case 38: refused, with what differs; it stays as it was."""
    with runner(home):
        wait_rows(store, job)
        ntx("pause", job.id)
        write_prompts(tmp_path / "in.parquet", ["another"])
        ran = ntx("resume", job.id)
    assert (ran.code, ran.out) == (2, "")
    assert f"job {job.id} cannot go on, one thing changed" in ran.err
    assert "its size was" in ran.err
    assert store.job(job.id).state == "paused"


def test_an_interrupted_job_whose_model_changed_fails_with_the_list(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    """Case 38: a job that goes on by itself is refused too; put back, it can be resumed."""
    model = tmp_path / "model.gguf"
    model.write_bytes(MODEL.read_bytes())
    prompts = [f"prompt {row}" for row in range(NUM_ROWS)]
    job = queue_job(store, tmp_path / "m.parquet", prompts, shard_rows=1, model=str(model))
    with runner(home):
        wait_rows(store, job)
    assert store.job(job.id).state == "interrupted"
    model.write_bytes((MODEL.parent / "llama-q8_0.gguf").read_bytes())
    with runner(home):
        failed = wait_over(store, job)
        assert failed.state == "failed"
        assert "model sizes in bytes: was" in (failed.reason or "")
        model.write_bytes(MODEL.read_bytes())
        assert "queued again" in client.job(job.id).resume()
        assert wait_over(store, job).state == "completed"


def test_resume_says_what_it_cannot_help_with(
    ntx: Command, home: Home, store: JobStore, job: Job
) -> None:
    with runner(home, answer=bad_row):
        assert wait_over(store, job).state == "failed"
        assert "has finished all its rows; `ntx-batch retry" in ntx("resume", job.id).err
        assert store.job(job.id).state == "failed"


# ---- runners that are gone ---------------------------------------------------------------


def dead_runner(home: Home, pid: int) -> None:
    """What a runner that was killed leaves: a lock file that nobody holds, with its pid."""
    lock = RunnerLock(home)
    lock.release()
    facts = json.loads(home.lock_path.read_text())
    home.lock_path.write_text(json.dumps(facts | {"pid": pid}))


@pytest.mark.parametrize("reused", [False, True])
def test_a_job_whose_runner_was_killed_is_shown_as_interrupted(
    ntx: Command, home: Home, store: JobStore, job: Job, reused: bool
) -> None:
    """Case 40: `status` and `list` after kill -9; again with the pid that of another process."""
    store.claim_job()
    dead_runner(home, ProcessId.current().pid if reused else 2**22 + 1)
    assert runner_status(home).state == "absent"
    shown = json.loads(ntx("status", job.id, "--json").out)
    assert (shown["state"], shown["exit_code"]) == ("interrupted", None)
    assert shown["reason"] == "its runner ended without finishing it"
    (listed,) = json.loads(ntx("list", "--json").out)
    assert listed["state"] == "interrupted"
    with runner(home):
        assert wait_over(store, job).state == "completed"


@pytest.mark.parametrize(("word", "state"), [("cancel", "cancelled"), ("pause", "paused")])
def test_what_a_killed_runner_was_asked_for_is_done(
    ntx: Command, home: Home, store: JobStore, job: Job, word: str, state: str
) -> None:
    store.claim_job()
    store.set_request(job.id, "cancel" if word == "cancel" else "pause")
    dead_runner(home, 2**22 + 1)
    assert json.loads(ntx("status", job.id, "--json").out)["state"] == state
    assert store.claim_job() is None


def test_a_live_runner_is_not_taken_for_dead(ntx: Command, home: Home, store: JobStore) -> None:
    job = store.claim_job()
    assert job is None
    with runner(home):
        assert runner_status(home).state == "running"
        assert json.loads(ntx("runner", "status", "--json").out)["state"] == "running"


def test_a_pause_need_not_be_waited_for(home: Home, store: JobStore, job: Job) -> None:
    store.claim_job()
    with RunnerLock(home):
        said = client.JobHandle(job.id, home).pause(wait=False)
    assert said == (
        f"job {job.id} will be paused when its sweep ends; go on with `ntx-batch resume {job.id}`"
    )
    assert (store.job(job.id).state, store.job(job.id).request) == ("running", "pause")


def test_a_pause_does_not_take_back_a_cancel(store: JobStore, job: Job) -> None:
    store.claim_job()
    store.set_request(job.id, "cancel")
    store.set_request(job.id, "pause")
    assert store.job(job.id).request == "cancel"
    store.set_state(job.id, "interrupted")
    assert store.job(job.id).state == "cancelled"


# ---- retry and rm ------------------------------------------------------------------------


def test_retry_leaves_out_rows_that_their_input_makes_fail(
    ntx: Command, home: Home, store: JobStore, job: Job
) -> None:
    codes = {5: "empty_prompt", 8: "invalid_row", 40: "worker_crashed", 50: "empty_prompt"}

    def answer(row: int) -> FinishedRow:
        return bad_row(row, codes[row]) if row in codes else ok_row(row)

    with runner(home, answer=answer):
        wait_over(store, job)
        ran = ntx("retry", job.id)
        wait_over(store, store.job(ran.out.strip()))
        every = ntx("retry", job.id, "--all")
        assert store.job(every.out.strip()).total == 4
    assert (
        "warning: 3 of 4 rows failed for reasons in their input and are left out "
        "(2 empty_prompt, 1 invalid_row): correct the input and submit it anew" in ran.err
    )
    assert store.job(ran.out.strip()).total == 1
    assert "3 of 4 rows failed for reasons in their input and will fail again" in every.err
    assert hopeless_rows({"worker_crashed": 2, "kv_cache_exceeded": 1}, run=False) is None
    assert set(ROW_ERROR_CODES) > INPUT_ERROR_CODES


def test_retry_prints_the_new_job_and_results_show_its_rows(
    ntx: Command, home: Home, store: JobStore, job: Job, tmp_path: Path
) -> None:
    bad = {5, 40}
    with runner(
        home,
        answer=lambda row: bad_row(row, "worker_crashed") if row in bad else ok_row(row, "now"),
    ):
        wait_over(store, job)
        bad.clear()
        ran = ntx("retry", job.id, "--wait")
        again = ran.out.strip()
        assert ran.code == 0
        assert ntx("retry", job.id).code == 2
    shown = json.loads(ntx("status", again, "--json").out)
    assert (shown["retry_of"], shown["total"], shown["ok"]) == (job.id, 2, 2)
    assert ntx("results", job.id, "-o", tmp_path / "all.jsonl").code == 0
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [row["row_index"] for row in rows] == list(range(NUM_ROWS))
    assert {row["status"] for row in rows} == {"ok"}


def test_rm_forgets_a_job_with_its_folder(
    ntx: Command, home: Home, store: JobStore, job: Job
) -> None:
    with runner(home):
        wait_rows(store, job)
        ran = ntx("rm", job.id)
        assert ran.code == 1
        assert f"job {job.id} is running: cancel or pause it first" in ran.err
        ntx("cancel", job.id)
    assert home.job_dir(job.id).exists()
    assert f"job {job.id} removed with its results" in ntx("rm", job.id).err
    assert not home.job_dir(job.id).exists()
    assert store.list_jobs() == []
    assert ntx("rm", job.id).code == 2


def test_rm_never_touches_a_folder_of_o(
    ntx: Command, home: Home, store: JobStore, tmp_path: Path
) -> None:
    output = tmp_path / "answers"
    job = queue_job(store, tmp_path / "o.parquet", ["a", "b"], output=str(output))
    with runner(home):
        wait_over(store, job)
    before = sorted(path.name for path in output.iterdir())
    assert len(before) == 2
    assert f"removed; its results stay in {output}" in ntx("rm", job.id).err
    assert sorted(path.name for path in output.iterdir()) == before


# ---- keys --------------------------------------------------------------------------------


def test_a_second_submit_with_a_key_returns_the_first_job(
    ntx: Command, home: Home, store: JobStore, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "keyed.parquet", ["a", "b"])
    arguments = ("submit", prompts, "--model", MODEL, "--key", "nightly", "-o", tmp_path / "out")
    with runner(home):
        first = ntx(*arguments)
        job_id = first.out.strip()
        wait_over(store, store.job(job_id))
        second = ntx(*arguments, "--temperature", "0.5")
    assert (second.code, second.out) == (0, first.out)
    assert f"job {job_id} has the key nightly and is completed; no other was queued" in second.err
    assert f"not as in job {job_id}: temperature is 0.5 here, 0.0 there" in second.err
    assert [job.id for job in store.list_jobs()] == [job_id]
    assert json.loads(ntx("status", "--json").out)["key"] == "nightly"


def test_one_key_at_once_makes_one_job(home: Home, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "keyed.parquet", ["a"])
    start = threading.Barrier(6)
    ids: list[str] = []

    def submit() -> None:
        with JobStore(home.state_path) as store:
            submission = read_submission(prompts, {"model": MODEL, "key": "one"})
            start.wait()
            ids.append(queue_submission(store, submission, lambda _: None).id)

    threads = [threading.Thread(target=submit) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 6
    assert len(set(ids)) == 1


def test_submit_of_a_job_file_with_flags_before_it(
    ntx: Command, home: Home, store: JobStore, tmp_path: Path
) -> None:
    write_prompts(tmp_path / "p.parquet", ["a", "b", "c"])
    path = tmp_path / "job.toml"
    path.write_text(
        f'input = "p.parquet"\nmodel = "{MODEL}"\n'
        "max_tokens = 9\ntemperature = 0.5\nignore_eos = true"
    )
    with runner(home):
        ran = ntx("submit", path, "--limit", "2", "--temperature", "0")
    assert ran.code == 0
    spec = store.job(ran.out.strip()).spec
    assert (spec.limit, spec.params.max_tokens, spec.params.temperature) == (2, 9, 0.0)
    assert spec.params.ignore_eos, "a flag that is not given leaves it to the file"
    path.write_text('inptu = "p.parquet"')
    ran = ntx("submit", path)
    assert (ran.code, ran.out) == (2, "")
    assert "there is no option inptu; did you mean input?" in ran.err


# ---- limits ------------------------------------------------------------------------------


def test_too_many_errors_pause_the_job_and_resume_counts_anew(
    ntx: Command, home: Home, store: JobStore, tmp_path: Path
) -> None:
    prompts = [f"prompt {row}" for row in range(NUM_ROWS)]
    job = queue_job(store, tmp_path / "e.parquet", prompts, shard_rows=1, max_errors="4")
    with runner(home, answer=lambda row: ok_row(row) if row % 10 == 0 else bad_row(row)):
        paused = wait_over(store, job)
        assert (paused.state, paused.exit_code) == ("paused", 5)
        assert 5 <= paused.num_error <= 7, "a shard on its way may still come in"
        finished = paused.num_error + paused.num_ok
        assert paused.reason is not None
        assert f"{paused.num_error} of {finished} finished rows failed" in paused.reason
        assert "--max-errors 4 allows 4" in paused.reason
        ntx("resume", job.id)
        again = wait_over(store, job)
    assert again.state == "paused"
    assert paused.num_error + 5 <= again.num_error <= paused.num_error + 7


def test_a_share_of_errors_is_of_all_rows() -> None:
    assert error_limit(None, 50) is None
    assert error_limit("0", 50) == 0
    assert error_limit("12", 50) == 12
    assert error_limit("5%", 50) == 2
    assert error_limit("0.5%", 1_000_000) == 5000
    assert error_limit("100%", 7) == 7


def test_an_idle_engine_ends_and_the_runner_stays(home: Home, store: JobStore, job: Job) -> None:
    with runner(home, unload_after_s=0.3) as drivers:
        wait_over(store, job)
        wait_until(lambda: drivers[0].is_closed, 5)
        assert runner_status(home).state == "running"
        next_job = queue_job(store, home.path.parent / "next.parquet", ["a"])
        assert wait_over(store, next_job).state == "completed"
        assert len(drivers) == 2
