"""The job store: queue, spool, parts and the runner row, under contention and kills."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.database import Database, migrate
from jobs.records import JobNotFoundError, ResultsError, RowBatch, StoreError
from jobs.row_keys import pack_keys, unpack_keys
from jobs.sql import STEPS, parse_queries
from jobs.store import JobStore, new_job_id
from tests.job_factories import make_batch, make_job, make_manifest, make_spec


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[JobStore]:
    with JobStore(path) as store:
        yield store


def publish_all(store: JobStore, job_id: str) -> int:
    """Announce and commit the next part; no file is made."""
    part, _ = store.begin_part(job_id)
    store.commit_part(job_id, part.number)
    return part.num_rows


# ---- jobs --------------------------------------------------------------------------------


def test_job_comes_back_as_it_was_submitted(store: JobStore, path: Path) -> None:
    spec = make_spec(limit=4, keep=("id",), template_kwargs={"date": "1 May"})
    job = store.create_job(spec, make_manifest(9), {"CUDA_VISIBLE_DEVICES": ""})
    with JobStore(path) as other:
        assert other.job(job.id) == job
    assert (job.state, job.spec, job.manifest) == ("queued", spec, make_manifest(9))
    assert job.environment == {"CUDA_VISIBLE_DEVICES": ""}
    assert job.total == job.num_remaining == 4
    assert job.results_dir == str(path.parent / "jobs" / job.id / "results")


def test_job_ids_are_short_and_sort_by_time() -> None:
    end_of_century = 4.1e9
    ids = [new_job_id(t + n / 1000) for t in (1.7e9, end_of_century) for n in range(500)]
    assert ids == sorted(ids)
    assert all(re.fullmatch("[0-9a-hjkmnp-tv-z]{12}", job_id) for job_id in ids)


def test_job_ids_of_one_millisecond_differ() -> None:
    # 20 draws out of 2**18: one collision has a chance of 1 in 1,400, two hardly any.
    assert len({new_job_id(1.7e9) for _ in range(20)}) >= 19


def test_job_is_found_by_unique_prefix_in_either_case(store: JobStore) -> None:
    job = make_job(store)
    assert store.find_job(job.id[:3]) == job
    assert store.find_job(f" {job.id.upper()} ") == job


def test_ambiguous_prefix_lists_the_matches(store: JobStore) -> None:
    jobs = [make_job(store, output=f"/out/{n}") for n in range(2)]
    with pytest.raises(JobNotFoundError) as caught:
        store.find_job(jobs[0].id[:2])
    assert all(job.id in str(caught.value) for job in jobs)


@pytest.mark.parametrize("prefix", ["zzz", "", "%", "_"])
def test_unknown_prefix_is_an_error(store: JobStore, prefix: str) -> None:
    make_job(store)
    with pytest.raises(JobNotFoundError, match="there is no job"):
        store.find_job(prefix)


def test_second_job_on_one_results_folder_is_refused(store: JobStore, tmp_path: Path) -> None:
    first = make_job(store, output=str(tmp_path / "out"))
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with pytest.raises(ResultsError, match=f"belongs to job {first.id}"):
        make_job(store, output=str(tmp_path / "link"))


def test_claim_takes_the_oldest_waiting_job_whatever_the_clock_says(path: Path) -> None:
    times = iter([1000.0] * 4 + [10.0] * 20)
    with JobStore(path, clock=lambda: next(times)) as store:
        jobs = [make_job(store) for _ in range(3)]
        claimed = [store.claim_job() for _ in range(4)]
    assert [job.id if job else None for job in claimed] == [*(job.id for job in jobs), None]
    assert claimed[0] is not None and (claimed[0].state, claimed[0].attempt) == ("running", 1)


def test_interrupted_job_is_claimed_again_and_keeps_its_start(store: JobStore) -> None:
    job = make_job(store)
    first = store.claim_job()
    assert store.mark_interrupted() == [job.id]
    assert store.job(job.id).reason == "its runner ended without finishing it"
    again = store.claim_job()
    assert first is not None and again is not None
    assert (again.id, again.attempt, again.reason) == (job.id, 2, None)
    assert again.started_at == first.started_at


def test_end_of_a_job_has_time_and_reason(store: JobStore) -> None:
    job = make_job(store)
    store.claim_job()
    store.set_state(job.id, "failed", reason="the model does not load")
    ended = store.job(job.id)
    assert (ended.state, ended.reason) == ("failed", "the model does not load")
    assert ended.finished_at is not None
    store.set_state(job.id, "queued")
    assert store.job(job.id).finished_at is None


def test_state_that_nothing_leads_to_is_refused(store: JobStore) -> None:
    job = make_job(store)
    with pytest.raises(StoreError, match=f"job {job.id} is queued and cannot become completed"):
        store.set_state(job.id, "completed")
    with pytest.raises(JobNotFoundError):
        store.set_state("nosuchjob", "cancelled")


def test_request_to_a_running_job_waits_for_its_runner(store: JobStore) -> None:
    job = make_job(store)
    store.claim_job()
    assert store.set_request(job.id, "cancel")
    assert (store.job(job.id).state, store.job(job.id).request) == ("running", "cancel")
    store.set_state(job.id, "cancelled")
    assert store.job(job.id).request is None
    assert not store.set_request(job.id, "cancel")


def test_request_to_a_waiting_job_takes_effect_at_once(store: JobStore) -> None:
    job = make_job(store)
    assert store.set_request(job.id, "pause")
    assert store.job(job.id).state == "paused"
    assert store.claim_job() is None
    assert store.set_request(job.id, "cancel")
    ended = store.job(job.id)
    assert (ended.state, ended.num_cancelled, ended.num_remaining) == ("cancelled", 10, 0)
    assert ended.finished_at is not None


def test_record_and_total_are_replaced(store: JobStore) -> None:
    job = make_job(store)
    store.set_total(job.id, 7)
    store.set_record(job.id, {"device": "cpu", "rates": [1.5, None]})
    assert store.job(job.id).total == 7
    assert store.job(job.id).record == {"device": "cpu", "rates": [1.5, None]}
    with pytest.raises(JobNotFoundError):
        store.set_total("nosuchjob", 7)


# ---- finished rows -----------------------------------------------------------------------


def test_batch_is_kept_and_counted(store: JobStore) -> None:
    job = make_job(store)
    assert store.commit_batch(job.id, make_batch([4, 1, 7], num_error=1, ipc=b"abc")) == 3
    assert store.commit_batch(job.id, make_batch([0])) == 4
    now = store.job(job.id)
    assert (now.num_ok, now.num_error, now.num_remaining) == (3, 1, 6)
    assert (now.prompt_tokens, now.completion_tokens) == (8, 12)
    assert store.done_keys(job.id)[:, 0].tolist() == [0, 1, 4, 7]
    assert store.spool(job.id) == [b"abc", b"rows"]
    size = store.spool_size(job.id)
    assert (size.nbytes, size.num_rows) == (7, 4)
    assert size.oldest_at is not None and size.oldest_at >= now.created_at


def commit_to_spool(store: JobStore, job_id: str) -> None:
    store.commit_batch(job_id, make_batch([3, 5]))


def commit_to_publishing_part(store: JobStore, job_id: str) -> None:
    publish_all(store, job_id)
    store.commit_batch(job_id, make_batch([3, 5]))
    store.begin_part(job_id)


def commit_to_committed_part(store: JobStore, job_id: str) -> None:
    commit_to_publishing_part(store, job_id)
    store.commit_part(job_id, 1)


@pytest.mark.parametrize(
    "commit", [commit_to_spool, commit_to_publishing_part, commit_to_committed_part]
)
def test_row_is_never_kept_twice(store: JobStore, commit: Callable[[JobStore, str], None]) -> None:
    job = make_job(store)
    commit(store, job.id)
    with pytest.raises(StoreError, match=f"job {job.id}: row 5 sample 0 is in .* already"):
        store.commit_batch(job.id, make_batch([2, 5]))
    assert store.done_keys(job.id)[:, 0].tolist() == [3, 5]
    assert store.job(job.id).num_ok == 2


def test_samples_of_one_row_are_kept_apart(store: JobStore) -> None:
    job = make_job(store)
    batch = RowBatch(
        row_indices=(2, 2),
        sample_indices=(0, 1),
        num_ok=2,
        num_error=0,
        prompt_tokens=0,
        completion_tokens=0,
        ipc=b"",
    )
    store.commit_batch(job.id, batch)
    assert store.done_keys(job.id)[:, 0].tolist() == [2, 2]
    with pytest.raises(StoreError, match="row 2 sample 1"):
        store.commit_batch(job.id, batch_of_sample(2, 1))
    store.commit_batch(job.id, batch_of_sample(2, 2))


def batch_of_sample(row: int, sample: int) -> RowBatch:
    batch = make_batch([row])
    return RowBatch(
        **{name: getattr(batch, name) for name in batch.__slots__} | {"sample_indices": (sample,)}
    )


def test_more_rows_than_the_total_are_refused(store: JobStore) -> None:
    job = make_job(store, num_rows=2)
    with pytest.raises(StoreError, match="CHECK constraint failed"):
        store.commit_batch(job.id, make_batch([0, 1, 2]))
    assert store.done_keys(job.id)[:, 0].tolist() == []


def test_first_part_is_empty_and_later_ones_take_the_spool(store: JobStore) -> None:
    job = make_job(store)
    store.commit_batch(job.id, make_batch([6, 2], ipc=b"first"))
    empty, blobs = store.begin_part(job.id)
    assert (empty.number, empty.num_rows, empty.state, blobs) == (0, 0, "publishing", [])
    part, blobs = store.begin_part(job.id)
    assert (part.number, part.num_rows, blobs) == (1, 2, [b"first"])
    assert part.name == f"part-00001-{job.id}.parquet"
    store.commit_batch(job.id, make_batch([1], ipc=b"second"))
    assert store.unfinished_parts(job.id) == [(empty, []), (part, [b"first"])]
    assert store.spool_size(job.id).num_rows == 1

    store.commit_part(job.id, 0)
    store.commit_part(job.id, 1)
    assert [part.state for part in store.parts(job.id)] == ["committed", "committed"]
    assert store.unfinished_parts(job.id) == []
    assert store.spool(job.id) == [b"second"]
    assert store.done_keys(job.id)[:, 0].tolist() == [1, 2, 6]


def test_part_is_committed_once(store: JobStore) -> None:
    job = make_job(store)
    publish_all(store, job.id)
    for number in (0, 1):
        with pytest.raises(StoreError, match=f"has no part {number} that is being published"):
            store.commit_part(job.id, number)


def test_jobs_do_not_see_each_others_rows(store: JobStore) -> None:
    one, two = make_job(store), make_job(store)
    store.commit_batch(one.id, make_batch([1, 2]))
    store.commit_batch(two.id, make_batch([2, 3]))
    publish_all(store, one.id)
    assert publish_all(store, one.id) == 2
    assert store.done_keys(two.id)[:, 0].tolist() == [2, 3]
    assert store.spool_size(two.id).num_rows == 2


OPERATIONS = st.lists(
    st.one_of(st.lists(st.integers(0, 59), max_size=8, unique=True), st.just("publish")),
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(operations=OPERATIONS, begin=st.integers(0, 60), length=st.integers(0, 60))
def test_done_keys_are_those_committed(
    tmp_path_factory: pytest.TempPathFactory,
    operations: list[list[int] | str],
    begin: int,
    length: int,
) -> None:
    done: set[int] = set()
    with JobStore(tmp_path_factory.mktemp("store") / "state.sqlite") as store:
        job = make_job(store, num_rows=60)
        for rows in operations:
            if isinstance(rows, str):
                publish_all(store, job.id)
            elif done.isdisjoint(rows):
                store.commit_batch(job.id, make_batch(rows))
                done.update(rows)
            else:
                with pytest.raises(StoreError):
                    store.commit_batch(job.id, make_batch(rows))
        assert store.done_keys(job.id)[:, 0].tolist() == sorted(done)
        within = [row for row in sorted(done) if begin <= row < begin + length]
        assert store.done_keys(job.id, begin, begin + length)[:, 0].tolist() == within
        assert store.job(job.id).num_ok == len(done)


@given(st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**30))))
def test_packed_keys_come_back(keys: list[tuple[int, int]]) -> None:
    array = np.array(sorted(keys), np.int64).reshape(-1, 2)
    assert unpack_keys(pack_keys(array)).tolist() == array.tolist()


def test_packed_keys_of_consecutive_rows_are_small() -> None:
    keys = np.stack([np.arange(100_000), np.zeros(100_000, np.int64)], axis=1)
    assert len(pack_keys(keys)) < 10_000


# ---- the runner --------------------------------------------------------------------------


def set_runner(store: JobStore, pid: int = 77) -> None:
    store.set_runner(
        pid=pid, pid_start_time=5.0, boot_id="b", host="h", environment={"RAY_ADDRESS": "x"}
    )


def test_runner_says_who_it_is_and_that_it_lives(path: Path) -> None:
    times = iter([10.0, 20.0, 30.0])
    with JobStore(path, clock=lambda: next(times)) as store:
        assert store.runner() is None
        set_runner(store)
        store.set_heartbeat(77)
        store.set_heartbeat(78)
        info = store.runner()
        assert info is not None
        assert (info.pid, info.state, info.environment) == (77, "running", {"RAY_ADDRESS": "x"})
        assert (info.started_at, info.heartbeat_at) == (10.0, 20.0)
        store.clear_runner(78)
        assert store.runner() == info
        store.clear_runner(77)
        assert store.runner() is None


@pytest.mark.parametrize("state", ["queued", "running", "interrupted"])
def test_runner_does_not_stop_while_a_job_waits_or_runs(store: JobStore, state: str) -> None:
    set_runner(store)
    make_job(store)
    if state != "queued":
        store.claim_job()
    if state == "interrupted":
        store.mark_interrupted()
    assert not store.stop_if_idle()
    info = store.runner()
    assert info is not None and info.state == "running"


def test_idle_runner_stops_and_the_next_one_runs(store: JobStore) -> None:
    set_runner(store)
    job = make_job(store)
    store.claim_job()
    store.set_state(job.id, "completed")
    assert store.stop_if_idle()
    info = store.runner()
    assert info is not None and info.state == "stopping"
    set_runner(store, pid=78)
    info = store.runner()
    assert info is not None and (info.pid, info.state) == (78, "running")


def test_runner_stopped_by_hand_is_stopping(store: JobStore) -> None:
    set_runner(store)
    make_job(store)
    store.set_stopping()
    info = store.runner()
    assert info is not None and info.state == "stopping"


# ---- many at once ------------------------------------------------------------------------


def test_each_job_is_claimed_once_by_many(path: Path) -> None:
    """Case 92: eight submitters and four claimers on one database."""

    def submit(_: int) -> list[str]:
        with JobStore(path) as store:
            return [make_job(store).id for _ in range(5)]

    def claim(_: int) -> list[str]:
        with JobStore(path) as store:
            jobs = [store.claim_job() for _ in range(40)]
        return [job.id for job in jobs if job is not None]

    with ThreadPoolExecutor(12) as pool:
        submitted = [job_id for ids in pool.map(submit, range(8)) for job_id in ids]
        claimed = [job_id for ids in pool.map(claim, range(4)) for job_id in ids]
    assert len(submitted) == 40
    assert Counter(claimed) == Counter(submitted)


def test_reader_sees_each_row_once_while_parts_are_committed(path: Path) -> None:
    with JobStore(path) as store:
        job = make_job(store, num_rows=200)
        publish_all(store, job.id)
    over = threading.Event()

    def write() -> None:
        with JobStore(path) as store:
            for row in range(200):
                store.commit_batch(job.id, make_batch([row]))
                if row % 5 == 4:
                    publish_all(store, job.id)
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    with JobStore(path) as store:
        while not over.is_set():
            seen = store.finished(job.id)
            in_parts = sum(part.num_rows for part in seen.parts)
            assert in_parts + len(seen.blobs) == seen.job.num_ok
    writer.join()


KEEP_COMMITTING = """
import sys
from jobs.store import JobStore
from tests.job_factories import make_batch
with JobStore(sys.argv[1]) as store:
    for row in range(100_000):
        store.commit_batch(sys.argv[2], make_batch([row]))
        print(row, flush=True)
        if row % 7 == 6:
            store.commit_part(sys.argv[2], store.begin_part(sys.argv[2])[0].number)
"""


def test_rows_whose_commit_returned_survive_kill_9(store: JobStore, path: Path) -> None:
    job = make_job(store, num_rows=100_000)
    child = subprocess.Popen(
        [sys.executable, "-c", KEEP_COMMITTING, str(path), job.id],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert child.stdout is not None
    reported = [int(child.stdout.readline()) for _ in range(40)]
    os.kill(child.pid, signal.SIGKILL)
    reported += [int(line) for line in child.stdout.read().splitlines()]
    child.wait()
    child.stdout.close()

    done = store.done_keys(job.id)[:, 0].tolist()
    assert done == list(range(len(done)))
    # The row whose commit was under way may be there or not.
    assert len(done) - len(reported) in (0, 1)
    assert store.job(job.id).num_ok == len(done)
    store.commit_batch(job.id, make_batch([len(done)]))


# ---- versions ----------------------------------------------------------------------------


def schema_of(db: sqlite3.Connection) -> set[str]:
    rows = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {" ".join(re.sub("--.*", "", row[0]).split()) for row in rows}


def test_steps_lead_to_the_schema() -> None:
    fresh, old = (sqlite3.connect(":memory:", isolation_level=None) for _ in range(2))
    migrate(fresh)
    for number, step in enumerate(STEPS, 1):
        old.executescript(step)
        old.execute(f"PRAGMA user_version = {number}")
    assert schema_of(old) == schema_of(fresh)
    assert len(schema_of(fresh)) > 8
    assert fresh.execute("PRAGMA user_version").fetchone() == (len(STEPS),)
    fresh.close()
    old.close()


def test_older_database_takes_only_the_steps_it_lacks() -> None:
    db = sqlite3.connect(":memory:", isolation_level=None)
    steps = ("CREATE TABLE a (x);", "ALTER TABLE a ADD COLUMN y;\nCREATE TABLE b (z);")
    migrate(db, steps[0], steps[:1])
    db.execute("INSERT INTO a VALUES (1)")
    migrate(db, "CREATE TABLE a (x, y);\nCREATE TABLE b (z);", steps)
    assert db.execute("SELECT * FROM a").fetchall() == [(1, None)]
    assert db.execute("PRAGMA user_version").fetchone() == (2,)
    db.close()


def test_step_that_fails_changes_nothing() -> None:
    db = sqlite3.connect(":memory:", isolation_level=None)
    with pytest.raises(sqlite3.OperationalError):
        migrate(db, "CREATE TABLE a (x);\nCREATE TABLE a (x);", ("",))
    assert schema_of(db) == set()
    assert db.execute("PRAGMA user_version").fetchone() == (0,)
    db.close()


def test_database_of_a_later_version_is_refused(store: JobStore, path: Path) -> None:
    store.close()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {len(STEPS) + 1}")
    db.close()
    with pytest.raises(StoreError, match="use the newer ntx-batch that wrote it"):
        JobStore(path)


def test_file_that_is_no_database_is_refused_by_name(path: Path) -> None:
    path.write_bytes(b"not a database at all, but long enough to have a header" * 20)
    with pytest.raises(StoreError, match=f"{path} cannot be opened: file is not a database"):
        JobStore(path)


def test_every_table_is_strict() -> None:
    db = sqlite3.connect(":memory:", isolation_level=None)
    migrate(db)
    tables = db.execute(
        "SELECT name, strict FROM pragma_table_list "
        "WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    )
    strict = dict(tables.fetchall())
    assert len(strict) >= 7 and set(strict.values()) == {1}
    db.close()


def test_queries_are_parsed_by_name() -> None:
    text = "-- first --\n-- What it does.\nSELECT 1;\n\n-- second --\nSELECT 2;\n"
    assert parse_queries(text) == {
        "first": "-- What it does.\nSELECT 1;",
        "second": "SELECT 2;",
    }


def test_writer_waits_for_another_and_gives_up_by_name(path: Path) -> None:
    with JobStore(path, busy_timeout_s=0.05) as store:
        job, other = make_job(store), Database(path)
        with other.atomic(), pytest.raises(StoreError, match=r"locked \(SQLITE_BUSY\)"):
            store.set_total(job.id, 3)
        store.set_total(job.id, 3)
        other.close()
