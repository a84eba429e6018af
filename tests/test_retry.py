"""Failed rows run again as a job of their own; the first job's results show what that brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine import FinishedRow
from jobs.control import RunnerLock
from jobs.home import Home
from jobs.publish import publish_part
from jobs.records import Job, SpecError
from jobs.results import Results, read_results
from jobs.retry import create_retry, failed_keys
from jobs.runner import Runner
from jobs.stop_signal import StopSignal
from jobs.store import JobStore
from tests.job_factories import bad_row, finish_rows, ok_row
from tests.runner_helpers import ScriptedDriver, queue_job

NUM_ROWS = 12


@pytest.fixture
def job(store: JobStore, tmp_path: Path) -> Job:
    """A completed job whose rows 3, 4 and 11 failed; half of it is in a part, half in the spool."""
    prompts = [f"prompt {row}" for row in range(NUM_ROWS)]
    job = queue_job(store, tmp_path / "in.parquet", prompts, shard_rows=5)
    rows = [outcome(row, failed=(3, 4, 11), text="first") for row in range(NUM_ROWS)]
    finish(store, job, rows[:6])
    store.commit_batch(job.id, finish_rows(job, rows[6:]))
    store.set_state(job.id, "completed")
    return store.job(job.id)


def outcome(row: int, *, failed: Sequence[int], text: str) -> FinishedRow:
    return bad_row(row, "worker_crashed", text) if row in failed else ok_row(row, text)


def finish(store: JobStore, job: Job, rows: Sequence[FinishedRow]) -> None:
    """Take the job and finish these rows of it, in a published part."""
    if store.job(job.id).state == "queued":
        store.claim_job()
    for part, blobs in [store.begin_part(job.id)]:
        publish(store, job, part, blobs)
    store.commit_batch(job.id, finish_rows(job, rows))
    publish(store, job, *store.begin_part(job.id))


def publish(store: JobStore, job: Job, part: object, blobs: list[bytes]) -> None:
    Path(job.results_dir).mkdir(parents=True, exist_ok=True)
    publish_part(job, part, blobs)  # type: ignore[arg-type]
    store.commit_part(job.id, part.number)  # type: ignore[attr-defined]


def retry(store: JobStore, job: Job) -> Job:
    return create_retry(store, job.id, {})


def shown(store: JobStore, job: Job) -> dict[int, str]:
    """Row indices and texts, or error messages, of the job's results."""
    table = read_results(store.finished(job.id))
    rows = table["row_index"].to_pylist()
    assert rows == sorted(set(rows))
    texts = zip(table["generated_text"].to_pylist(), table["error_message"], strict=True)
    return dict(zip(rows, (text or str(error) for text, error in texts), strict=True))


def test_a_retry_has_the_failed_rows_alone(store: JobStore, job: Job) -> None:
    again = retry(store, job)
    assert (again.retry_of, again.total, again.num_remaining) == (job.id, 3, 3)
    assert again.spec == job.spec
    assert again.results_dir != job.results_dir
    selection = store.selection(again.id)
    assert selection is not None and selection.tolist() == [[3, 0], [4, 0], [11, 0]]
    assert store.selection(job.id) is None
    assert store.retries(job.id) == [again]


def test_results_show_the_rows_that_a_retry_brings(store: JobStore, job: Job) -> None:
    again = retry(store, job)
    before = shown(store, job)
    assert [before[row] for row in (2, 3, 4, 11)] == ["first"] * 4
    finish(store, again, [ok_row(3, "second"), bad_row(4, "timeout", "second"), ok_row(11, "x")])
    now = shown(store, job)
    assert now == before | {3: "second", 11: "x"}, "what failed again is as it was"
    table = read_results(store.finished(job.id), errors=True)
    assert table["row_index"].to_pylist() == [4]
    assert sorted(shown(store, again)) == [3, 4, 11]
    assert failed_keys(store.finished(job.id), hopeless=True).tolist() == [[4, 0]]
    counts = store.job(job.id)
    assert (counts.num_ok, counts.num_error) == (9, 3), "its own counts are its own"


def test_retries_of_retries_and_second_retries_count(store: JobStore, job: Job) -> None:
    first = retry(store, job)
    finish(store, first, [ok_row(3, "a"), bad_row(4, "timeout"), bad_row(11, "timeout")])
    store.set_state(first.id, "completed")
    inner = retry(store, first)
    finish(store, inner, [ok_row(4, "b"), bad_row(11, "timeout")])
    store.set_state(inner.id, "completed")
    second = retry(store, job)
    selection = store.selection(second.id)
    assert selection is not None and selection.tolist() == [[11, 0]]
    finish(store, second, [ok_row(11, "c")])
    assert {row: shown(store, job)[row] for row in (3, 4, 11)} == {3: "a", 4: "b", 11: "c"}
    assert [other.id for other in store.retries(job.id)] == [first.id, inner.id, second.id]
    store.set_state(second.id, "completed")
    with pytest.raises(SpecError, match=f"job {job.id} has no failed rows to retry"):
        retry(store, job)


def test_windows_of_results_hold_what_a_retry_brings(store: JobStore, job: Job) -> None:
    again = retry(store, job)
    finish(store, again, [ok_row(3, "second"), ok_row(4, "second"), ok_row(11, "second")])
    tables = list(Results(store.finished(job.id), window_rows=4).tables())
    rows = [row for table in tables for row in table["row_index"].to_pylist()]
    assert rows == list(range(NUM_ROWS))
    texts = np.array([text for table in tables for text in table["generated_text"].to_pylist()])
    assert np.flatnonzero(texts == "second").tolist() == [3, 4, 11]


def test_a_cancelled_retry_shows_its_own_rows_as_cancelled(store: JobStore, job: Job) -> None:
    again = retry(store, job)
    finish(store, again, [ok_row(4, "second")])
    store.set_state(again.id, "cancelled")
    table = read_results(store.finished(again.id))
    assert table["row_index"].to_pylist() == [3, 4, 11]
    assert table["status"].to_pylist() == ["cancelled", "ok", "cancelled"]
    assert table["id"].to_pylist() == ["row 3", "row 4", "row 11"]
    first = read_results(store.finished(job.id))
    assert first["status"].to_pylist().count("error") == 2


def test_only_a_job_that_is_over_can_be_retried_and_once_at_a_time(
    store: JobStore, job: Job, tmp_path: Path
) -> None:
    again = retry(store, job)
    with pytest.raises(SpecError, match=f"job {again.id} retries job {job.id} already and is que"):
        retry(store, job)
    with pytest.raises(SpecError, match=f"job {again.id} is queued: retry it when it is over"):
        retry(store, again)


def test_a_runner_runs_the_selected_rows_alone(home: Home, store: JobStore, job: Job) -> None:
    again = retry(store, job)
    driver = ScriptedDriver(store, answer=lambda row: ok_row(row, "second"))
    with RunnerLock(home) as lock, StopSignal() as stop:
        Runner(
            home, lock, store=store, stop=stop, start_driver=lambda _: driver, idle_exit_s=0.0
        ).run()
    done = store.job(again.id)
    assert (done.state, done.num_ok, done.num_error, done.total) == ("completed", 3, 0, 3)
    ran = [row for s in driver.shards for row in range(s.begin, s.end) if row not in s.done]
    assert ran == [3, 4, 11]
    assert [shown(store, job)[row] for row in (2, 3, 4, 11)] == ["first"] + ["second"] * 3


def test_a_removed_retry_takes_its_rows_along(store: JobStore, job: Job) -> None:
    again = retry(store, job)
    finish(store, again, [ok_row(3, "second")])
    store.set_state(again.id, "cancelled")
    store.remove_job(again.id)
    assert shown(store, job)[3] == "first"
    another = retry(store, job)
    store.remove_job(job.id)
    assert store.job(another.id).retry_of is None
    assert sorted(shown(store, another)) == []


def test_rows_that_their_input_makes_fail_are_left_out_unless_asked_for(
    store: JobStore, tmp_path: Path
) -> None:
    """They depend on the row alone: what ran into a limit of the machine may do better."""
    job = queue_job(store, tmp_path / "in.parquet", ["a", None, "b", "c"])
    rows = [ok_row(0), bad_row(1, "invalid_prompt"), ok_row(2), bad_row(3, "invalid_prompt")]
    finish(store, job, rows)
    store.set_state(job.id, "completed")
    with pytest.raises(SpecError, match=r"no failed rows to retry: all 2 .* input.*--all"):
        retry(store, job)
    again = create_retry(store, job.id, {}, hopeless=True)
    assert again.total == 2
    finish(store, again, [bad_row(1, "timeout"), bad_row(3, "timeout")])
    store.set_state(again.id, "completed")
    assert failed_keys(store.finished(again.id), hopeless=False).tolist() == [[1, 0], [3, 0]]
