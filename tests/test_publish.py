"""Parts: whole or absent, each row once, whatever dies and whenever."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from jobs.job_run import JobRun
from jobs.publish import (
    check_part,
    claim_folder,
    publish_file,
    publish_from_sibling,
    publish_part,
    publish_unnamed,
)
from jobs.records import Job, Part, ResultsError
from jobs.results import job_schema, read_results
from jobs.specs import spec_from_json
from jobs.store import JobStore
from tests.job_factories import finish_rows, ok_row, submit_input, write_input

NUM_ROWS = 40
ROOT = Path(__file__).parents[1]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with JobStore(tmp_path / "state.sqlite") as store:
        yield store


@pytest.fixture
def job(store: JobStore, tmp_path: Path) -> Job:
    """A running job with three finished rows and an empty results folder."""
    columns = {"prompt": [f"p{row}" for row in range(NUM_ROWS)], "id": list(range(NUM_ROWS))}
    submitted = submit_input(store, write_input(tmp_path / "in.parquet", columns))
    store.claim_job()
    store.commit_batch(submitted.id, finish_rows(submitted, [ok_row(row) for row in (7, 2, 5)]))
    claim_folder(submitted.results_dir, submitted.id)
    return submitted


def begin(store: JobStore, job: Job) -> tuple[Part, list[bytes]]:
    """The first part with rows."""
    store.begin_part(job.id)
    return store.begin_part(job.id)


def files_in(job: Job) -> list[str]:
    return sorted(os.listdir(job.results_dir))


# ---- one part ----------------------------------------------------------------------------


def test_empty_first_part_is_a_valid_dataset(store: JobStore, job: Job) -> None:
    part, blobs = store.begin_part(job.id)
    publish_part(job, part, blobs)
    assert files_in(job) == [f"part-00000-{job.id}.parquet"]
    dataset = ds.dataset(job.results_dir)
    assert dataset.schema.remove_metadata() == job_schema(job)
    assert dataset.count_rows() == 0


def test_part_has_its_rows_and_says_whose_it_is(store: JobStore, job: Job) -> None:
    part, blobs = begin(store, job)
    publish_part(job, part, blobs)
    path = Path(job.results_dir) / part.name
    table = pq.read_table(path)
    assert table.column("row_index").to_pylist() == [2, 5, 7]
    assert table.column("id").to_pylist() == [2, 5, 7]
    facts = pq.read_metadata(path).metadata
    assert (facts[b"ntx_batch.job"].decode(), facts[b"ntx_batch.part"]) == (job.id, b"1")
    assert spec_from_json(facts[b"ntx_batch.spec"].decode()) == job.spec
    assert oct(path.stat().st_mode & 0o777) == oct(0o666 & ~current_umask())


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_part_published_again_is_accepted_and_left_as_it_is(store: JobStore, job: Job) -> None:
    part, blobs = begin(store, job)
    publish_part(job, part, blobs)
    path = Path(job.results_dir) / part.name
    before = path.stat()
    publish_part(job, part, blobs)
    assert path.stat() == before


def test_many_small_batches_become_few_row_groups(store: JobStore, job: Job) -> None:
    for row in range(10, 30):
        store.commit_batch(job.id, finish_rows(job, [ok_row(row)]))
    part, blobs = begin(store, job)
    publish_part(job, part, blobs)
    metadata = pq.read_metadata(Path(job.results_dir) / part.name)
    assert (metadata.num_rows, metadata.num_row_groups) == (23, 1)


def test_a_part_is_sorted_runs_of_small_row_groups(
    store: JobStore, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a stretch of the input needs few groups, whatever order its rows finished in."""
    rows = list(range(10, 30))
    random.Random(3).shuffle(rows)
    for row in rows:
        store.commit_batch(job.id, finish_rows(job, [ok_row(row, "x" * 1000)]))
    monkeypatch.setattr("jobs.publish.RUN_NBYTES", 12_000)
    monkeypatch.setattr("jobs.publish.ROW_GROUP_NBYTES", 4_000)
    part, blobs = begin(store, job)
    publish_part(job, part, blobs)
    groups = []
    with pq.ParquetFile(Path(job.results_dir) / part.name) as parquet:
        for idx in range(parquet.num_row_groups):
            groups.append(parquet.read_row_group(idx)["row_index"].to_pylist())
    assert sorted(row for group in groups for row in group) == [2, 5, 7, *range(10, 30)]
    assert all(group == sorted(group) and len(group) <= 6 for group in groups)
    descents = sum(left[-1] > right[0] for left, right in itertools.pairwise(groups))
    assert descents <= 2 < len(groups) - 2, "three runs"


def foreign_file(path: Path, part: Part, store: JobStore, job: Job) -> None:
    write_input(path, {"prompt": ["mine"]})


def text_file(path: Path, part: Part, store: JobStore, job: Job) -> None:
    path.write_text("notes")


def other_part(path: Path, part: Part, store: JobStore, job: Job) -> None:
    publish_part(job, Part(number=9, name=part.name, state="publishing", num_rows=0), [])


def part_of_other_job(path: Path, part: Part, store: JobStore, job: Job) -> None:
    other = submit_input(store, Path(job.spec.input), output=job.results_dir + "2")
    claim_folder(other.results_dir, other.id)
    first, _ = store.begin_part(other.id)
    publish_part(other, first, [])
    (Path(other.results_dir) / first.name).rename(path)


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (foreign_file, "its job is none"),
        (text_file, "is in the way of part 1"),
        (other_part, "its part is 9, wanted is 1"),
        (part_of_other_job, "its job is "),
    ],
)
def test_file_that_is_not_this_part_is_refused_and_kept(
    store: JobStore, job: Job, put: Callable[..., None], message: str
) -> None:
    """Case 17: nothing in the folder is overwritten or removed."""
    part, blobs = begin(store, job)
    path = Path(job.results_dir) / part.name
    put(path, part, store, job)
    before = path.read_bytes()
    with pytest.raises(ResultsError, match=message):
        publish_part(job, part, blobs)
    assert path.read_bytes() == before


def test_part_with_other_rows_is_refused(store: JobStore, job: Job) -> None:
    part, blobs = begin(store, job)
    publish_part(job, part, blobs)
    more = Part(number=1, name=part.name, state="publishing", num_rows=4)
    with pytest.raises(ResultsError, match="number of rows is 3, wanted is 4"):
        check_part(Path(job.results_dir) / part.name, job, more)


# ---- files -------------------------------------------------------------------------------

WAYS = [publish_file, publish_unnamed, publish_from_sibling]


@pytest.mark.parametrize("publish", WAYS)
def test_file_appears_whole_under_its_name_alone(
    tmp_path: Path, publish: Callable[[Path, Callable[[BinaryIO], None]], None]
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()

    def write(sink: BinaryIO) -> None:
        sink.write(b"half")
        sink.flush()
        assert os.listdir(folder) == []
        sink.write(b" and half")

    publish(folder / "a", write)
    assert (folder / "a").read_bytes() == b"half and half"
    assert os.listdir(tmp_path) == ["results"]


@pytest.mark.parametrize("publish", WAYS)
def test_writer_that_raises_leaves_nothing(
    tmp_path: Path, publish: Callable[[Path, Callable[[BinaryIO], None]], None]
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()

    def write(sink: BinaryIO) -> None:
        sink.write(b"half")
        raise RuntimeError("the process that feeds us died")

    with pytest.raises(RuntimeError):
        publish(folder / "a", write)
    assert os.listdir(folder) == []
    assert os.listdir(tmp_path) == ["results"]


@pytest.mark.parametrize("publish", WAYS)
def test_file_that_is_there_stays(
    tmp_path: Path, publish: Callable[[Path, Callable[[BinaryIO], None]], None]
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "a").write_text("first")
    publish(folder / "a", lambda sink: sink.write(b"second") and None)
    assert (folder / "a").read_text() == "first"
    assert os.listdir(tmp_path) == ["results"]


def test_batch_that_cannot_be_read_leaves_no_short_part(store: JobStore, job: Job) -> None:
    """Case 16 (in part): an exception between two batches must not close a valid file."""
    part, blobs = begin(store, job)
    with pytest.raises(ResultsError, match="in the state database is damaged"):
        publish_part(job, part, [*blobs, b""])
    assert files_in(job) == []
    publish_part(job, part, blobs)
    assert files_in(job) == [part.name]


FULL_DISK = """
import resource, sys
from jobs.publish import publish_part
from jobs.store import JobStore
store = JobStore(sys.argv[1])
job = store.find_job(sys.argv[2])
part, blobs = store.begin_part(job.id)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
try:
    publish_part(job, part, blobs)
except OSError as error:
    print(error.filename, error.strerror)
"""


def run_child(code: str, store: JobStore, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(store.path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_file_system_that_takes_no_more_is_an_error_with_the_path(
    store: JobStore, job: Job
) -> None:
    store.begin_part(job.id)
    child = run_child(FULL_DISK, store, job.id)
    (part,) = store.parts(job.id)[1:]
    assert child.stdout.strip() == f"{job.results_dir}/{part.name} File too large", child.stderr
    assert files_in(job) == []


# ---- the folder --------------------------------------------------------------------------


def test_folder_is_made_and_claimed(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "results"
    claim_folder(folder)
    assert not folder.exists()
    claim_folder(folder, "job1")
    assert folder.is_dir()
    (folder / "part-00000-job1.parquet").touch()
    claim_folder(folder, "job1")
    with pytest.raises(ResultsError, match=r"it has part-00000-job1\.parquet; .*--overwrite"):
        claim_folder(folder)


@pytest.mark.parametrize("name", ["notes.txt", "part-00000-job2.parquet", ".hidden"])
def test_folder_with_other_files_is_refused(tmp_path: Path, name: str) -> None:
    """Case 37 (in part): a non-empty folder is not ours to write to."""
    (tmp_path / name).touch()
    for job_id in (None, "job1"):
        with pytest.raises(ResultsError, match=f"is not empty: it has {name}"):
            claim_folder(tmp_path, job_id)


def test_results_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(ResultsError, match="is a file; name a folder"):
        claim_folder(tmp_path / "out", "job1")


# ---- exactly once ------------------------------------------------------------------------

DIE = """
import os, sys
from pathlib import Path
from jobs.publish import publish_part, publish_unnamed
from jobs.store import JobStore
store, step = JobStore(sys.argv[1]), sys.argv[3]
job = store.find_job(sys.argv[2])
part, blobs = store.begin_part(job.id)
if step == "begun":
    os._exit(9)
if step == "writing":
    def write(sink):
        sink.write(b"PAR1 and half of a file")
        sink.flush()
        os._exit(9)
    publish_unnamed(Path(job.results_dir) / part.name, write)
publish_part(job, part, blobs)
if step == "published":
    os._exit(9)
if step == "committing":
    run = store._db.run
    def die_before_deleting(query, **values):
        if query == "delete_part_batches":
            os._exit(9)
        return run(query, **values)
    store._db.run = die_before_deleting
store.commit_part(job.id, part.number)
os._exit(9)
"""


def rows_of(store: JobStore, job: Job) -> list[int]:
    rows: list[int] = read_results(store.finished(job.id)).column("row_index").to_pylist()
    return rows


@pytest.mark.parametrize("step", ["begun", "writing", "published", "committing", "committed"])
@pytest.mark.parametrize("part_number", [0, 1])
def test_each_row_is_there_once_whenever_the_publisher_dies(
    store: JobStore, job: Job, step: str, part_number: int
) -> None:
    """Case 17: killed before, in and after publishing, and in the commit of the part."""
    if part_number:
        JobRun(store, store.job(job.id), publish_part).open()
    assert run_child(DIE, store, job.id, step).returncode == 9
    assert rows_of(store, job) == [2, 5, 7]
    assert ds.dataset(job.results_dir).count_rows() in (0, 3 * part_number)

    JobRun(store, store.job(job.id), publish_part).open()
    assert rows_of(store, job) == [2, 5, 7]
    assert store.done_keys(job.id)[:, 0].tolist() == [2, 5, 7]
    assert store.unfinished_parts(job.id) == []

    rest = [ok_row(row) for row in range(NUM_ROWS) if row not in (2, 5, 7)]
    run = JobRun(store, store.job(job.id), publish_part)
    store.commit_batch(job.id, finish_rows(job, rest))
    run.stop("cancelled")
    assert sorted(
        ds.dataset(job.results_dir).to_table(columns=["row_index"])["row_index"].to_pylist()
    ) == list(range(NUM_ROWS))
    assert rows_of(store, job) == list(range(NUM_ROWS))


def test_readers_see_a_valid_dataset_without_doubles_at_any_time(store: JobStore, job: Job) -> None:
    """Case 16: a reader of the folder meets complete files only, while parts appear."""
    JobRun(store, store.job(job.id), publish_part).open()
    over, counts = threading.Event(), []

    def read() -> None:
        while not over.is_set():
            table = ds.dataset(job.results_dir).to_table(columns=["row_index", "id"])
            rows = table["row_index"].to_pylist()
            assert len(set(rows)) == len(rows)
            counts.append(len(rows))

    reader = threading.Thread(target=read)
    reader.start()
    rows = [row for row in range(NUM_ROWS) if row not in (2, 5, 7)]
    random.Random(1).shuffle(rows)
    for row in rows:
        store.commit_batch(job.id, finish_rows(job, [ok_row(row)]))
        part, blobs = store.begin_part(job.id)
        publish_part(job, part, blobs)
        store.commit_part(job.id, part.number)
    over.set()
    reader.join()
    assert counts == sorted(counts)
    assert len(counts) > 3
    assert ds.dataset(job.results_dir).count_rows() == NUM_ROWS
