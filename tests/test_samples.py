"""Jobs of several outputs for each row: what is counted, left to run, retried and shown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import SamplingParams
from jobs.job_run import JobRun
from jobs.messages import BatchDone, Progress
from jobs.publish import publish_part
from jobs.records import Job, Shard, SpecError
from jobs.results import read_results
from jobs.retry import create_retry
from jobs.store import JobStore
from ntx_batch.spec import build_spec
from tests.job_factories import bad_row, finish_rows, ok_row
from tests.runner_helpers import make_home, queue_job

Key = tuple[int, int]
PROGRESS = Progress(0, 0, 1, 2, 3, time.time())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with JobStore(make_home(tmp_path / "home").state_path) as store:
        yield store


@pytest.fixture
def job(store: JobStore, tmp_path: Path) -> Job:
    """Claimed; four rows of three samples, in shards of two rows."""
    params = SamplingParams(temperature=1.0)
    queue_job(store, tmp_path / "in.parquet", list("abcd"), params=params, samples=3, shard_rows=6)
    job = store.claim_job()
    assert job is not None
    return job


def open_run(store: JobStore, job: Job) -> JobRun:
    run = JobRun(store, store.job(job.id), publish_part)
    run.open()
    return run


def commit(run: JobRun, *keys: Key, failed: tuple[Key, ...] = ()) -> None:
    rows = [ok_row(row, f"{row}.{sample}", sample_index=sample) for row, sample in keys]
    rows += [bad_row(row, "worker_crashed", sample_index=sample) for row, sample in failed]
    run.commit(BatchDone(1, finish_rows(run.job, rows), (), PROGRESS))


def shown(store: JobStore, job: Job) -> list[tuple[int, int, str]]:
    table = read_results(store.finished(job.id))
    names = ("row_index", "sample_index", "generated_text", "status")
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    return [(row, sample, text or status) for row, sample, text, status in rows]


def keys_of(shards: Iterator[Shard]) -> list[Key]:
    return [
        divmod(output, 3)
        for shard in shards
        for output in range(shard.begin * 3, shard.end * 3)
        if output not in shard.done
    ]


def test_all_samples_are_counted_and_only_missing_ones_are_left_to_run(
    store: JobStore, job: Job
) -> None:
    run = open_run(store, job)
    assert (run.total, store.job(job.id).total) == (12, 12)
    commit(run, (0, 2), (2, 0), (0, 0), failed=((3, 1),))
    run.cut_part_if_due()
    now = store.job(job.id)
    assert (now.num_ok, now.num_error, now.num_remaining) == (3, 1, 8)
    again = open_run(store, job)
    left = {(row, sample) for row in range(4) for sample in range(3)}
    assert keys_of(again.shards()) == sorted(left - {(0, 2), (2, 0), (0, 0), (3, 1)})
    assert not again.is_complete
    commit(again, *keys_of(again.shards()))
    assert again.is_complete and list(again.shards()) == []


def test_results_are_in_the_order_of_rows_and_samples(store: JobStore, job: Job) -> None:
    run = open_run(store, job)
    commit(run, (1, 2), (0, 1))
    run.stop("interrupted")
    store.claim_job()
    run = open_run(store, job)
    commit(run, (1, 0), (0, 0))
    assert shown(store, job) == [(0, 0, "0.0"), (0, 1, "0.1"), (1, 0, "1.0"), (1, 2, "1.2")]
    run.stop("cancelled")
    rows = shown(store, job)
    assert [row[:2] for row in rows] == [(row, sample) for row in range(4) for sample in range(3)]
    assert [text for *_, text in rows if text != "cancelled"] == ["0.0", "0.1", "1.0", "1.2"]


def test_a_suspect_row_is_settled_with_its_last_sample(store: JobStore, job: Job) -> None:
    run = open_run(store, job)
    commit(run, (2, 1))
    assert keys_of(run.shards_of([0, 2])) == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 2)]
    commit(run, (0, 0), (0, 2), (2, 2))
    assert run.whole_rows((0, 0, 2)) == set()
    commit(run, (0, 1))
    assert run.whole_rows((0,)) == {0}
    commit(run, (2, 0))
    assert run.whole_rows((2,)) == {2}


def test_a_retry_runs_failed_samples_alone(store: JobStore, job: Job) -> None:
    run = open_run(store, job)
    failed = ((1, 1), (3, 0), (3, 2))
    every = [(row, sample) for row in range(4) for sample in range(3)]
    commit(run, *(key for key in every if key not in failed), failed=failed)
    assert run.finish() == "completed"
    again = create_retry(store, job.id, {})
    assert again.total == 3
    claimed = store.claim_job()
    assert claimed is not None and claimed.id == again.id
    retry = open_run(store, again)
    assert keys_of(retry.shards()) == list(failed)
    assert keys_of(retry.shards_of([3])) == [(3, 0), (3, 2)]
    assert keys_of(retry.shards(without=[3])) == [(1, 1)]
    commit(retry, (3, 2), failed=((3, 0),))
    assert retry.whole_rows((3, 3)) == {3}
    rows = shown(store, job)
    assert (3, 2, "3.2") in rows
    assert [(row, sample) for row, sample, text in rows if text == "error"] == [(1, 1), (3, 0)]
    retry.stop("cancelled")
    assert shown(store, again) == [(1, 1, "cancelled"), (3, 0, "error"), (3, 2, "3.2")]


def test_samples_that_would_all_be_the_same_are_refused(tmp_path: Path) -> None:
    def spec(**options: object) -> object:
        return build_spec(tmp_path / "in.parquet", model=tmp_path / "m.gguf", **options)

    with pytest.raises(SpecError, match="4 samples of a row would all be the same"):
        spec(samples=4)
    with pytest.raises(SpecError, match="would all be the same"):
        spec(samples=4, param_columns="max_tokens")
    spec(samples=4, temperature=0.7)
    spec(samples=4, param_columns="temperature")
    spec(samples=1)
    with pytest.raises(SpecError, match="samples is at least 1, not 0"):
        spec(samples=0, temperature=0.7)
    with pytest.raises(SpecError, match="samples is at most 10000, not 10001"):
        spec(samples=10_001, temperature=0.7)
