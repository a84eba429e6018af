"""Inputs, parts and results in an object store: what is found, read, published and refused."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import files, remote
from jobs.dataset import RowReader, build_manifest, count_rows
from jobs.export import export_results
from jobs.formats import parquet_file, parquet_footer
from jobs.job_run import JobRun
from jobs.messages import BatchDone, Progress
from jobs.output_folder import find_own_files, refuse_input_place, remove_own_files
from jobs.publish import claim_folder, part_owner, publish_part
from jobs.records import (
    ChangedError,
    DatasetError,
    Job,
    NoInputError,
    OutputError,
    ResultsError,
    SpecError,
    StorageError,
    UnreachableError,
)
from jobs.results import read_results
from jobs.results_dataset import open_dataset
from jobs.resume_check import check_unchanged_job, new_input_files
from jobs.store import JobStore
from jobs.uris import absolute, child, is_within, mask, parse_uri, resolved
from ntx_batch.results_sql import query_dataset
from ntx_batch.spec import build_spec
from tests.cli_helpers import MODEL
from tests.job_factories import bad_row, finish_rows, make_spec, ok_row, write_input
from tests.object_store import CREDENTIALS, ObjectStore, running_store

PROMPTS = [f"prompt {row}" for row in range(700)]


@pytest.fixture(scope="module")
def objects() -> Iterator[ObjectStore]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        with running_store() as store:
            store.make_bucket("bkt")
            yield store


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRY_S", 0.5)
    monkeypatch.setattr(remote, "TIMEOUT_S", 1.0)


@pytest.fixture
def place(objects: ObjectStore, request: pytest.FixtureRequest) -> str:
    """A folder of the test's own."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return f"bkt/{name}"


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[JobStore]:
    with JobStore(tmp_path / "state.sqlite") as store:
        yield store


# ---- names -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("s3://bkt/in/", "s3://bkt/in"),
        ("S3://bkt//in/a b.parquet", "s3://bkt/in/a%20b.parquet"),
        ("s3://bkt/in/a%20b.parquet", "s3://bkt/in/a%20b.parquet"),
        ("s3://bkt/lang=de%2520AT/ü.csv", "s3://bkt/lang=de%2520AT/%C3%BC.csv"),
        ("s3://bkt/{date}/**/[ab]*.jsonl", "s3://bkt/{date}/**/[ab]*.jsonl"),
        ("s3://bkt/in?scheme=http&region=x", "s3://bkt/in?region=x&scheme=http"),
        ("gs://anonymous@bkt/in", "gs://anonymous@bkt/in"),
        ("abfs://box@acc.dfs.core.windows.net/a", "abfs://box@acc.dfs.core.windows.net/a"),
        ("file:///data/a%20b.csv", "/data/a b.csv"),
        ("/data/in", "/data/in"),
    ],
)
def test_a_place_has_one_spelling(given: str, kept: str) -> None:
    assert absolute(given) == kept
    assert absolute(kept) == kept
    assert resolved(given) == kept


def test_a_child_of_a_uri_keeps_the_options_of_its_store() -> None:
    assert child("s3://bkt/out?scheme=http", "a b") == "s3://bkt/out/a%20b?scheme=http"
    assert child("s3://bkt", "x") == "s3://bkt/x"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://AKID:tiger@bkt/in", "s3://***@bkt/in"),
        ("abfs://box:tiger@acc.dfs/in", "abfs://***@acc.dfs/in"),
        (
            "s3://bkt/in?sse_customer_key=tiger&region=x",
            "s3://bkt/in?sse_customer_key=***&region=x",
        ),
        ("abfss://box@acc.dfs/in?client_secret=tiger", "abfss://box@acc.dfs/in?client_secret=***"),
    ],
)
def test_a_uri_with_secrets_is_refused_and_never_shown(uri: str, shown: str) -> None:
    assert mask(uri) == shown
    for name in ("input", "output"):
        options: dict[str, Any] = {"input": "/in.parquet", "model": MODEL} | {name: uri}
        with pytest.raises(SpecError, match="AWS_ACCESS_KEY_ID") as refused:
            build_spec(options.pop("input"), **options)
        assert "tiger" not in str(refused.value)
        assert shown in str(refused.value)


def test_places_that_no_store_has_are_refused() -> None:
    with pytest.raises(SpecError, match=r"no store s3a://.*s3://"):
        build_spec("s3a://bkt/in", model=MODEL)
    with pytest.raises(SpecError, match="names no bucket"):
        build_spec("s3:///in", model=MODEL)
    with pytest.raises(SpecError, match="file:///PATH"):
        build_spec("file://host/in", model=MODEL)
    with pytest.raises(SpecError, match=r"in a store.*copy the file"):
        build_spec("in.parquet", model="s3://bkt/model.gguf")


@pytest.mark.parametrize(
    ("place", "folder", "inside"),
    [
        ("s3://bkt/out/a", "s3://bkt/out?region=x", True),
        ("s3://bkt/out", "s3://bkt/out", True),
        ("s3://bkt/outer", "s3://bkt/out", False),
        ("s3://bkt/out", "s3://bkt", True),
        ("gs://bkt/out", "s3://bkt", False),
        ("/out", "s3://bkt", False),
        ("/out/../out/a", "/out", True),
    ],
)
def test_what_lies_within_what(place: str, folder: str, inside: bool) -> None:
    assert is_within(place, folder) == inside


# ---- inputs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    ["", "*.parquet", "[b-z].parquet", "**/*.parquet", "**", "x*", "*/y/*", "x/y/d e.parquet"],
)
def test_a_pattern_finds_what_it_finds_on_a_disk(
    objects: ObjectStore, tmp_path: Path, pattern: str
) -> None:
    names = [f"{name}.parquet" for name in ("b", "a", "x/c", "x/y/d e", "x/.hid", "_old/e", ".h/f")]
    for name in names:
        write_input(tmp_path / "globs" / name, {"prompt": [name]})
        if not objects.names(f"bkt/globs/{name}"):
            objects.put_table(f"bkt/globs/{name}", {"prompt": [name]})
    here = build_manifest(tmp_path / "globs" / pattern)
    there = build_manifest(objects.uri(f"bkt/globs/{pattern}"))
    paths = [parse_uri(file.path).path for file in there.files]
    assert paths == [Path(file.path).relative_to(tmp_path).as_posix() for file in here.files]
    assert there.skipped == here.skipped
    assert there.partitions == here.partitions
    assert all(file.etag for file in there.files)


def test_partitions_in_keys_become_columns(objects: ObjectStore, place: str) -> None:
    """Case 83."""
    objects.put_table(f"{place}/lang=de%20AT/a.parquet", {"prompt": ["a"]})
    objects.put_table(f"{place}/lang=__HIVE_DEFAULT_PARTITION__/a.parquet", {"prompt": ["b"]})
    manifest = build_manifest(objects.uri(place))
    with RowReader(manifest) as reader:
        rows = [row for _, batch in reader.read(0, 2) for row in batch.table.to_pylist()]
    assert {row["prompt"]: row["lang"] for row in rows} == {"a": "de AT", "b": None}


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_each_format_is_read_from_any_row_on(
    objects: ObjectStore, place: str, tmp_path: Path, form: str
) -> None:
    table = {"prompt": PROMPTS, "id": [f"{row}" for row in range(len(PROMPTS))]}
    match form:
        case "parquet":
            uri = objects.put_table(f"{place}/in.parquet", table, row_group_size=100)
        case "jsonl":
            lines = [f'{{"prompt":"{prompt}","id":"{row}"}}' for row, prompt in enumerate(PROMPTS)]
            uri = objects.put(f"{place}/in.jsonl", "\n".join(lines).encode())
        case _:
            lines = ["prompt;id", *(f"{prompt};{row}" for row, prompt in enumerate(PROMPTS))]
            uri = objects.put(f"{place}/in.csv", "\n".join(lines).encode())
    manifest = count_rows(build_manifest(uri), tmp_path)
    assert manifest.num_rows == len(PROMPTS)
    with RowReader(manifest, ["prompt"]) as reader:
        for begin, end in ((650, 700), (0, 3), (250, 460)):
            found = [row for _, batch in reader.read(begin, end) for row in batch.table.to_pylist()]
            assert [row["prompt"] for row in found] == PROMPTS[begin:end]


def test_ranges_of_a_large_footer_are_read(
    objects: ObjectStore, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 82: of many row groups only a window is held, also from a store."""
    monkeypatch.setattr(parquet_footer, "LARGE_NBYTES", 1000)
    monkeypatch.setattr(parquet_footer, "WINDOW_NBYTES", 2000)
    monkeypatch.setattr(parquet_file, "READ_BUFFER_NBYTES", 1000)
    long = [f"{prompt} {'x' * 1000}" for prompt in PROMPTS]
    how = {"row_group_size": 10, "compression": None, "write_statistics": False}
    uri = objects.put_table(f"{place}/in.parquet", {"prompt": long}, **how)
    asked: list[int] = []
    read = remote.RemoteFile.read

    def noting(file: remote.RemoteFile, nbytes: int | None = -1) -> bytes:
        data = read(file, nbytes)
        asked.append(len(data))
        return data

    monkeypatch.setattr(remote.RemoteFile, "read", noting)
    manifest = build_manifest(uri)
    with RowReader(manifest, ["prompt"]) as reader:
        found = [row for _, batch in reader.read(333, 340) for row in batch.table.to_pylist()]
    assert [row["prompt"] for row in found] == long[333:340]
    # Arrow looks for a footer in a file's last 64 KiB.
    assert max(asked) <= 64 << 10


def test_of_columns_that_are_not_used_hardly_a_byte_is_fetched(
    objects: ObjectStore, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"prompt": PROMPTS, "other": [f"{row:09d}" * 200 for row in range(len(PROMPTS))]}
    uri = objects.put_table(f"{place}/in.parquet", columns, row_group_size=100, compression=None)
    manifest = build_manifest(uri)
    asked: list[int] = []
    read = remote.RemoteFile.read

    def noting(file: remote.RemoteFile, nbytes: int | None = -1) -> bytes:
        data = read(file, nbytes)
        asked.append(len(data))
        return data

    monkeypatch.setattr(remote.RemoteFile, "read", noting)
    with RowReader(manifest, [], values=["prompt"]) as reader:
        assert sum(batch.num_rows for _, batch in reader.read(0, len(PROMPTS))) == len(PROMPTS)
    assert sum(asked) < manifest.files[0].nbytes / 4
    assert len(asked) < 40


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("AWS Error NO_SUCH_BUCKET during ListObjectsV2 operation", StorageError, "no bucket bkt"),
        ("AWS Error ACCESS_DENIED during HeadObject operation", StorageError, "ACCESS_DENIED"),
        ("AWS Error UNKNOWN (HTTP status 403) during X", StorageError, "refuses access"),
        ("AWS Error UNKNOWN (HTTP status 301) during X", StorageError, "region=NAME"),
        ("AWS Error SLOW_DOWN during PutObject operation", UnreachableError, "does not answer"),
        ("AWS Error UNKNOWN (HTTP status 503) during X", UnreachableError, "does not answer"),
        ("google::cloud::Status(UNAVAILABLE: CURL error [7])", UnreachableError, "not answer"),
        ("google::cloud::Status(PERMISSION_DENIED: no)", StorageError, "AWS_PROFILE"),
        ("something new", StorageError, "s3://bkt/in: something new"),
    ],
)
def test_what_a_store_says_becomes_what_to_do(text: str, kind: type[Exception], words: str) -> None:
    fault = remote.explain(parse_uri("s3://bkt/in"), OSError(text))
    assert type(fault) is kind
    assert words in str(fault)


def test_what_may_pass_is_tried_again_and_the_rest_is_not(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    uri = parse_uri("s3://bkt/in")
    said = ["SLOW_DOWN", "HTTP status 503"]

    def busy() -> str:
        if said:
            raise OSError(said.pop())
        return "done"

    assert remote._attempt(uri, busy) == "done"
    calls = []

    def refused() -> None:
        calls.append(1)
        raise OSError("AWS Error ACCESS_DENIED during HeadObject operation")

    with pytest.raises(StorageError):
        remote._attempt(uri, refused)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("bkt/nothing/*.parquet", NoInputError, "matches no files that end in"),
        ("bkt/nothing.parquet", NoInputError, "there is no input s3://bkt/nothing.parquet"),
        ("absent/in.parquet", StorageError, "there is no bucket absent; make it"),
        ("absent/*.parquet", StorageError, "there is no bucket absent; make it"),
    ],
)
def test_what_is_not_there_is_said(
    objects: ObjectStore, name: str, kind: type[Exception], words: str
) -> None:
    """Case 85: a pattern that matches nothing; and a bucket that is none."""
    with pytest.raises(kind, match=words.replace("*", r"\*")):
        build_manifest(objects.uri(name))


def test_an_object_without_bytes_is_refused(objects: ObjectStore, place: str) -> None:
    """Case 85."""
    with pytest.raises(DatasetError, match="empty"):
        build_manifest(objects.put(f"{place}/in.parquet", b""))


def test_an_overwritten_object_is_noticed_by_its_etag(
    objects: ObjectStore, place: str, jobs: JobStore
) -> None:
    """Case 38: of the same length and in the same second, so only the ETag tells."""
    uri = objects.put_table(f"{place}/in.parquet", {"prompt": ["aaa"] * 600}, compression=None)
    job = queue(jobs, uri)
    with RowReader(job.manifest) as reader:
        begun = reader.read(0, 600)
        next(begun)
        objects.put_table(f"{place}/in.parquet", {"prompt": ["bbb"] * 600}, compression=None)
        with pytest.raises(DatasetError, match=r"its ETag was .*, is "):
            list(begun)
    with pytest.raises(ChangedError, match=r"in\.parquet\S* has changed .* ETag was"):
        check_unchanged_job(job)
    objects.files.delete_file(f"{place}/in.parquet")
    with pytest.raises(ChangedError, match="cannot be read any more"):
        check_unchanged_job(job)


def test_what_came_later_is_named_and_not_read(
    objects: ObjectStore, place: str, jobs: JobStore
) -> None:
    objects.put_table(f"{place}/a.parquet", {"prompt": ["a"]})
    job = queue(jobs, objects.uri(f"{place}/*.parquet"))
    later = objects.put_table(f"{place}/b.parquet", {"prompt": ["b"]})
    assert new_input_files(job) == [absolute(later)]


# ---- results -----------------------------------------------------------------------------


def queue(jobs: JobStore, uri: str, **spec: Any) -> Job:
    values = {"input": absolute(uri), "model": str(MODEL)} | spec
    return jobs.create_job(make_spec(**values), build_manifest(uri), {})


def batch_of(job: Job, rows: list[Any]) -> BatchDone:
    return BatchDone(1, finish_rows(job, rows), (), Progress(0, 0, 1, 2, 3, time.time()))


@pytest.fixture
def run(objects: ObjectStore, place: str, jobs: JobStore, tmp_path: Path) -> JobRun:
    """A claimed job of six rows, read from a disk, whose results go to the store."""
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"id": range(6), "prompt": list("abcdef")}), source)
    queue(jobs, str(source), output=absolute(objects.uri(f"{place}/out")), part_nbytes=1)
    job = jobs.claim_job()
    assert job is not None
    run = JobRun(jobs, job, publish_part)
    run.open()
    return run


def test_parts_appear_whole_and_alone(
    objects: ObjectStore, place: str, jobs: JobStore, run: JobRun
) -> None:
    """Case 16: only complete files, and nothing beside them."""
    assert objects.names(f"{place}/out") == [f"part-00000-{run.job.id}.parquet"]
    run.commit(batch_of(run.job, [ok_row(3), ok_row(1, "é")]))
    run.cut_part_if_due()
    run.commit(batch_of(run.job, [bad_row(0), ok_row(2), ok_row(4), ok_row(5)]))
    assert run.finish() == "completed"
    assert objects.names(f"{place}/out") == [
        f"part-{number:05d}-{run.job.id}.parquet" for number in range(3)
    ]
    for part in jobs.parts(run.job.id):
        assert part_owner(child(run.job.results_dir, part.name)) == run.job.id
    check_unchanged_job(jobs.job(run.job.id), jobs.parts(run.job.id))
    objects.files.delete_file(f"{place}/out/part-00001-{run.job.id}.parquet")
    with pytest.raises(ChangedError, match="with 2 finished rows was there, is gone"):
        check_unchanged_job(jobs.job(run.job.id), jobs.parts(run.job.id))


def test_results_are_read_from_the_store(
    objects: ObjectStore, place: str, jobs: JobStore, run: JobRun, tmp_path: Path
) -> None:
    """As a table, as a dataset, by SQL, and as files, which may lie in the store too."""
    run.commit(batch_of(run.job, [ok_row(3), bad_row(1)]))
    run.cut_part_if_due()
    run.commit(batch_of(run.job, [ok_row(0, "zero")]))
    finished = jobs.finished(run.job.id)
    table = read_results(finished)
    assert table["row_index"].to_pylist() == [0, 1, 3]
    assert table["id"].to_pylist() == [0, 1, 3]
    dataset = open_dataset(finished)
    assert sorted(dataset.to_table()["row_index"].to_pylist()) == [0, 1, 3]
    answer = query_dataset(
        dataset, "SELECT status, count(*) AS n FROM results GROUP BY 1 ORDER BY 1"
    )
    assert answer.to_pylist() == [{"status": "error", "n": 1}, {"status": "ok", "n": 2}]
    target = objects.uri(f"{place}/export/all.jsonl")
    assert export_results(finished, target) == 3
    assert export_results(finished, tmp_path / "all.jsonl") == 3
    with files.open_file(absolute(target)) as source:
        assert source.read() == (tmp_path / "all.jsonl").read_bytes()
    with pytest.raises(OutputError, match="results or input of job"):
        export_results(finished, objects.uri(f"{place}/out/all.jsonl"))
    objects.files.delete_file(f"{place}/out/part-00001-{run.job.id}.parquet")
    with pytest.raises(ResultsError, match="is gone"):
        read_results(finished)


def test_a_part_that_was_published_and_not_committed_is_accepted(
    objects: ObjectStore, jobs: JobStore, run: JobRun
) -> None:
    """Case 17: the runner died between the two."""
    run.commit(batch_of(run.job, [ok_row(3), ok_row(1)]))
    part, blobs = jobs.begin_part(run.job.id)
    publish_part(run.job, part, blobs)
    again = JobRun(jobs, run.job, publish_part)
    again.open()
    assert [part.state for part in jobs.parts(run.job.id)] == ["committed"] * 2
    assert read_results(jobs.finished(run.job.id))["row_index"].to_pylist() == [1, 3]


def test_a_folder_with_other_objects_is_refused(objects: ObjectStore, place: str) -> None:
    """Case 37."""
    claim_folder(objects.uri(f"{place}/new"))
    objects.put(f"{place}/old/notes.txt", b"mine")
    with pytest.raises(OutputError, match=r"is not empty: it has notes\.txt"):
        claim_folder(objects.uri(f"{place}/old"))
    with pytest.raises(OutputError, match="which is no part of a job's results"):
        find_own_files(objects.uri(f"{place}/old"))
    with pytest.raises(OutputError, match="is a file"):
        claim_folder(objects.uri(f"{place}/old/notes.txt"))
    with pytest.raises(StorageError, match="there is no bucket absent"):
        claim_folder(objects.uri("absent/out"))


def test_a_folder_belongs_to_one_job(
    objects: ObjectStore, place: str, jobs: JobStore, run: JobRun
) -> None:
    """Two jobs on one folder; and one of another state folder, which sees the first one's part."""
    with pytest.raises(OutputError, match=f"belongs to job {run.job.id}"):
        queue(jobs, run.job.spec.input, output=objects.uri(f"{place}/out/"))
    with pytest.raises(OutputError, match="is not empty"):
        claim_folder(objects.uri(f"{place}/out"), "another")


def test_overwrite_removes_parts_and_nothing_else(
    objects: ObjectStore, place: str, jobs: JobStore, run: JobRun
) -> None:
    folder = objects.uri(f"{place}/out")
    with pytest.raises(OutputError, match="which is running: cancel it"):
        remove_own_files(jobs, find_own_files(folder))
    run.stop("cancelled")
    assert remove_own_files(jobs, find_own_files(folder)) == 1
    assert objects.names(f"{place}/out") == []
    claim_folder(folder)


def test_results_are_never_written_over_or_into_the_input(objects: ObjectStore, place: str) -> None:
    """Case 37, whatever options the URIs have."""
    uri = objects.put_table(f"{place}/in/a.parquet", {"prompt": ["a"]})
    manifest = build_manifest(uri)
    for output, input_path in (
        ("in", "in/a.parquet"),
        ("in/a.parquet", "in/a.parquet"),
        ("", "in/a.parquet"),
        ("in/out", "in"),
        ("in/out", "in/*"),
        ("in/out", "in/**/*.parquet"),
    ):
        source = absolute(objects.uri(f"{place}/{input_path}"))
        with pytest.raises(OutputError):
            refuse_input_place(absolute(f"s3://{place}/{output}"), manifest, source)
    source = absolute(objects.uri(f"{place}/in/*.csv"))
    refuse_input_place(absolute(f"s3://{place}/out"), manifest, source)
    refuse_input_place(absolute("gs://bkt/in"), manifest, source)
    refuse_input_place("/tmp/out", manifest, source)


def test_where_a_store_can_only_rename_a_file_appears_whole(tmp_path: Path) -> None:
    """As HDFS does; another file system stands in for it, since the way is the same."""
    remote._write_and_rename(pa.fs.LocalFileSystem(), str(tmp_path / "a/out/part"), b"all of it")
    assert [path.name for path in (tmp_path / "a").rglob("*")] == ["out", "part"]
    assert (tmp_path / "a/out/part").read_bytes() == b"all of it"


# ---- a store that refuses or is silent ---------------------------------------------------


def test_a_store_that_refuses_access_is_named_with_what_to_do(
    objects: ObjectStore, tmp_path: Path
) -> None:
    with running_store(checks_access=True) as strict:
        for call in (
            lambda: build_manifest(strict.uri("bkt/in/*.parquet")),
            lambda: build_manifest(strict.uri("bkt/in.parquet")),
            lambda: remote.put(parse_uri(strict.uri("bkt/out/x")), b"x"),
        ):
            with pytest.raises(StorageError, match=r"s3://bkt/\S+: the store refuses access") as no:
                call()
            assert not isinstance(no.value, UnreachableError)
            assert "AWS_ACCESS_KEY_ID" in str(no.value)
            assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in str(no.value)


def test_a_reader_goes_on_when_its_store_answers_again(objects: ObjectStore, place: str) -> None:
    uri = objects.put_table(f"{place}/in.parquet", {"prompt": PROMPTS}, row_group_size=50)
    manifest = build_manifest(uri)
    with RowReader(manifest, ["prompt"]) as reader:
        list(reader.read(0, 10))
        objects.suspend()
        try:
            with pytest.raises(UnreachableError, match="does not answer"):
                list(reader.read(10, 600))
        finally:
            objects.go_on()
        found = [row for _, batch in reader.read(10, 600) for row in batch.table.to_pylist()]
    assert [row["prompt"] for row in found] == PROMPTS[10:600]


def test_rows_stay_in_the_spool_while_the_store_of_the_results_is_silent(
    objects: ObjectStore,
    place: str,
    jobs: JobStore,
    run: JobRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job computes on, up to some parts' worth; then its rows are published, each once."""
    monkeypatch.setattr("jobs.job_run.PUBLISH_RETRY_S", 0.0)
    objects.suspend()
    try:
        run.commit(batch_of(run.job, [ok_row(3), ok_row(1)]))
        monkeypatch.setattr("jobs.job_run.MAX_SPOOLED_PARTS", 1 << 20)
        run.cut_part_if_due()
        assert [part.state for part in jobs.parts(run.job.id)] == ["committed", "publishing"]
        run.commit(batch_of(run.job, [ok_row(0)]))
        monkeypatch.setattr("jobs.job_run.MAX_SPOOLED_PARTS", 1)
        with pytest.raises(UnreachableError):
            run.cut_part_if_due()
    finally:
        objects.go_on()
    run.cut_part_if_due()
    run.commit(batch_of(run.job, [ok_row(2), ok_row(4), ok_row(5)]))
    assert run.finish() == "completed"
    assert read_results(jobs.finished(run.job.id))["row_index"].to_pylist() == list(range(6))
    assert {part.state for part in jobs.parts(run.job.id)} == {"committed"}


def test_a_put_that_fails_leaves_no_object(
    objects: ObjectStore, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of one request nor of several, also when what was begun is thrown away."""
    small, large = (parse_uri(objects.uri(f"{place}/{name}")) for name in ("small", "large"))
    remote.put(small, b"1")
    for uri, data in ((small, b"2" * 1000), (large, bytes(24 << 20))):
        objects.suspend()
        try:
            with pytest.raises(UnreachableError):
                remote.put(uri, data)
            gc.collect()
        finally:
            objects.go_on()
    assert objects.names(place) == ["small"]
