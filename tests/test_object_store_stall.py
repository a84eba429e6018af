"""An engine whose input's store falls silent: what was read goes on, and reading does later."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine import Engine, SamplingParams
from jobs import remote
from jobs.dataset import build_manifest
from jobs.messages import AddShard, JobFailed, JobReady, StartJob
from jobs.records import JobSpec, Shard
from jobs.uris import absolute
from tests.object_store import CREDENTIALS, ObjectStore, running_store
from tests.runner_helpers import MODEL, SMALL_ENGINE
from tests.test_engine_loop import Loop, row_indices

NUM_ROWS = 40


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(MODEL, SMALL_ENGINE) as engine:
        yield engine


@pytest.fixture(scope="module")
def objects() -> Iterator[ObjectStore]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        patch.setattr(remote, "RETRY_S", 0.2)
        patch.setattr(remote, "TIMEOUT_S", 1.0)
        patch.setattr("jobs.row_source.ASK_AGAIN_S", 0.1)
        with running_store() as store:
            store.make_bucket("bkt")
            yield store


@pytest.fixture
def command(objects: ObjectStore) -> StartJob:
    prompts = [f"prompt {row}" for row in range(NUM_ROWS)]
    uri = objects.put_table("bkt/in.parquet", {"prompt": prompts}, row_group_size=10)
    spec = JobSpec(
        input=absolute(uri), model=str(MODEL), engine=SMALL_ENGINE,
        params=SamplingParams(max_tokens=4, ignore_eos=True),
    )  # fmt: skip
    return StartJob(1, spec, build_manifest(uri), 0.0)


def test_reading_goes_on_where_it_stopped_and_each_row_comes_once(
    engine: Engine, objects: ObjectStore, command: StartJob
) -> None:
    loop = Loop(lambda command: (engine, {}))
    loop.send(command)
    loop.until(JobReady)
    loop.send(AddShard(1, Shard(number=0, begin=0, end=15, done=(3, 4))))
    before = loop.until_shards(1)
    objects.suspend()
    try:
        loop.send(AddShard(1, Shard(number=1, begin=15, end=NUM_ROWS, done=(20,))))
        assert not [event for event in loop.poll(2.5) if isinstance(event, JobFailed)]
    finally:
        objects.go_on()
    batches = loop.until_shards(2)
    assert len(batches) > len(before)
    assert sorted(row_indices(batches)) == sorted({*range(NUM_ROWS)} - {3, 4, 20})


def test_after_long_silence_the_job_is_handed_back_with_all_that_was_read(
    engine: Engine, objects: ObjectStore, command: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.engine_loop.MAX_STALL_S", 0.5)
    loop = Loop(lambda command: (engine, {}))
    loop.send(command)
    loop.until(JobReady)
    loop.send(AddShard(1, Shard(number=0, begin=0, end=15)))
    loop.until_shards(1)
    objects.suspend()
    try:
        loop.send(AddShard(1, Shard(number=1, begin=15, end=NUM_ROWS)))
        (failed,) = loop.until(JobFailed)
    finally:
        objects.go_on()
    assert failed.store == "unreachable"
    assert "s3://bkt/in.parquet" in failed.reason
    # The engine is well, and takes the job again.
    loop.send(StartJob(2, command.spec, command.manifest, 0.0))
    loop.until(JobReady, 2)
    loop.send(AddShard(2, Shard(number=0, begin=15, end=NUM_ROWS)))
    batches = [event for event in loop.until_shards(2) if event.attempt == 2]
    assert sorted(row_indices(batches)) == list(range(15, NUM_ROWS))


def test_a_store_that_refuses_ends_the_attempt_at_once(
    engine: Engine, objects: ObjectStore, command: StartJob
) -> None:
    loop = Loop(lambda command: (engine, {}))
    loop.send(command)
    loop.until(JobReady)
    objects.put("bkt/in.parquet", b"changed")
    loop.send(AddShard(1, Shard(number=0, begin=0, end=15)))
    (failed,) = loop.until(JobFailed)
    assert failed.store is None
    assert "has changed since the job was submitted" in failed.reason
