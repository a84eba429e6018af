"""Whole jobs whose input and results are in an object store, by commands, runner and engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from engine.machine import usable_cores
from jobs import remote
from jobs.control import stop_runner
from jobs.dataset import build_manifest
from jobs.home import Home
from jobs.records import Job
from jobs.results import read_results
from jobs.store import JobStore
from jobs.uris import absolute
from ntx_batch.client import JobHandle
from ntx_batch.spec import build_spec
from tests.cli_helpers import MODEL, Ran, run_here, run_process
from tests.object_store import CREDENTIALS, ObjectStore, running_store
from tests.runner_helpers import make_home, wait_over, wait_until
from tests.test_crash_recovery import Crash, rows_by_index
from tests.test_schedule_runs import House

PROMPTS = [f"prompt number {row}" for row in range(300)]
SMALL = ("--kv-memory", "64MiB", "--sweep-tokens", "64", "--ignore-eos")


@pytest.fixture(scope="module")
def objects() -> Iterator[ObjectStore]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        with running_store() as store:
            store.make_bucket("bkt")
            for number in range(3):
                some = PROMPTS[number * 100 : number * 100 + 100]
                store.put_table(f"bkt/in/{number}.parquet", {"prompt": some}, row_group_size=30)
            yield store


@pytest.fixture(scope="module")
def home(objects: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = make_home(tmp_path_factory.mktemp("home"))
    yield home
    stop_runner(home)


@pytest.fixture
def crash(objects: ObjectStore, home: Home, tmp_path: Path) -> Iterator[Crash]:
    with JobStore(home.state_path) as store:
        crash = Crash(tmp_path, home, store)
        yield crash
        crash.close()


def submit(crash: Crash, objects: ObjectStore, output: str, max_tokens: int, **options: Any) -> Job:
    """A job over all of the bucket's prompts, in small shards and parts; no runner is started."""
    uri = objects.uri("bkt/in/*.parquet")
    spec = build_spec(
        uri, model=MODEL, output=objects.uri(output), max_tokens=max_tokens, ignore_eos=True,
        kv_memory="64MiB", sweep_tokens=64, **options,
    )  # fmt: skip
    spec = replace(spec, shard_rows=50, part_nbytes=20_000)
    return crash.store.create_job(spec, build_manifest(uri), {})


@pytest.mark.slow
def test_a_killed_runner_loses_and_doubles_no_row(crash: Crash, objects: ObjectStore) -> None:
    """Kill -9 in mid-job, and between the publishing of a part and its commit. Cases 2 and 17."""
    job = submit(crash, objects, "bkt/killed", max_tokens=120)
    crash.kill_at(job, 60)
    kept = rows_by_index(read_results(crash.store.finished(job.id)))
    crash.start_runner("die").wait()
    assert crash.store.parts(job.id)[-1].state == "publishing"
    crash.start_runner()
    done = wait_over(crash.store, job)
    assert (done.state, done.num_ok) == ("completed", len(PROMPTS))
    final = rows_by_index(read_results(crash.store.finished(job.id)))
    assert sorted(final) == list(range(len(PROMPTS)))
    assert kept.items() <= final.items()
    # All that is in the bucket is these parts, as anybody reads them.
    names = objects.names("bkt/killed")
    assert names == [part.name for part in crash.store.parts(job.id)]
    rows = [
        row
        for name in names
        for row in pq.read_table(f"bkt/killed/{name}", filesystem=objects.files)["row_index"]
    ]
    assert sorted(row.as_py() for row in rows) == list(range(len(PROMPTS)))


@pytest.mark.slow
def test_a_job_goes_on_by_itself_when_its_store_answers_again(
    crash: Crash, objects: ObjectStore
) -> None:
    """Rows are finished and kept while the store is silent; then they are published."""
    job = submit(crash, objects, "bkt/silent", max_tokens=80)
    crash.start_runner()
    wait_until(lambda: crash.store.job(job.id).num_ok >= 30)
    objects.suspend()
    try:
        wait_until(lambda: crash.store.job(job.id).state == "interrupted", 180)
        waiting = crash.store.job(job.id)
        assert waiting.reason is not None
        assert "does not answer" in waiting.reason
        assert "goes on by itself" in waiting.reason
        assert waiting.num_ok == len(PROMPTS), "they were read before, and none was in vain"
    finally:
        objects.go_on()
    done = wait_over(crash.store, job)
    assert (done.state, done.num_ok) == ("completed", len(PROMPTS))
    final = rows_by_index(read_results(crash.store.finished(job.id)))
    assert sorted(final) == list(range(len(PROMPTS)))
    assert objects.names("bkt/silent") == [part.name for part in crash.store.parts(job.id)]


@pytest.mark.slow
def test_a_store_that_says_no_in_mid_job_pauses_it(crash: Crash, objects: ObjectStore) -> None:
    """The bucket of the results is deleted; made again, the job is resumed, and no row is lost."""
    objects.make_bucket("doomed")
    job = submit(crash, objects, "doomed/out", max_tokens=60)
    objects.delete_bucket("doomed")
    crash.start_runner()
    paused = wait_over(crash.store, job)
    assert paused.state == "paused"
    assert paused.reason is not None
    assert "there is no bucket doomed" in paused.reason
    assert f"ntx-batch resume {job.id}" in paused.reason
    objects.make_bucket("doomed")
    crash.store.set_state(job.id, "queued")
    done = wait_over(crash.store, job)
    assert (done.state, done.num_ok) == ("completed", len(PROMPTS))


@pytest.mark.slow
@pytest.mark.skipif(usable_cores() < 2, reason="two engines on CPUs need two cores")
def test_several_engines_read_from_one_store(crash: Crash, objects: ObjectStore) -> None:
    job = submit(crash, objects, "bkt/engines", 40, engines=2, threads=2)
    crash.start_runner()
    done = wait_over(crash.store, job)
    assert (done.state, done.num_ok) == ("completed", len(PROMPTS))
    assert len(done.record["engines"]) == 2
    final = rows_by_index(read_results(crash.store.finished(job.id)))
    assert sorted(final) == list(range(len(PROMPTS)))


# ---- by commands -------------------------------------------------------------------------


def ran(home: Home, *arguments: str) -> Ran:
    return run_process(home.path, *arguments)


@pytest.mark.slow
def test_commands_take_and_show_uris(home: Home, objects: ObjectStore, tmp_path: Path) -> None:
    """Results in every form and in input order, a report, rm: as with paths. Cases 11 and 16."""
    here = tmp_path / "in.jsonl"
    lines = [json.dumps({"prompt": prompt, "id": n}) for n, prompt in enumerate(PROMPTS[:40])]
    here.write_text("\n".join(lines))
    there = objects.put("bkt/text/in.jsonl", here.read_bytes())
    options = ("--model", str(MODEL), "--max-tokens", "8", *SMALL, "--wait")
    on_disk = ran(home, "submit", str(here), *options)
    assert on_disk.code == 0, on_disk.err
    in_store = ran(home, "submit", there, "-o", objects.uri("bkt/text-out/"), *options)
    assert in_store.code == 0, in_store.err
    first, second = on_disk.out.split()[0], in_store.out.split()[0]
    tables = [JobHandle(job, home).results() for job in (first, second)]
    for column in ("row_index", "id", "generated_text", "prompt_tokens", "sampling_params"):
        assert tables[0][column] == tables[1][column]
    assert tables[1]["id"].to_pylist() == list(range(40))
    names = objects.names("bkt/text-out")
    assert all(name.endswith(f"-{second}.parquet") for name in names)
    counted = ran(home, "results", second, "--sql", "SELECT count(*) AS n FROM results", "--json")
    assert json.loads(counted.out) == [{"n": 40}]
    target = objects.uri("bkt/exports/all.csv")
    assert ran(home, "results", second, "-o", target).code == 0
    assert objects.names("bkt/exports") == ["all.csv"]
    page = tmp_path / "report.html"
    assert ran(home, "report", second, "-o", str(page)).code == 0
    assert "s3://bkt/text-out" in page.read_text()
    assert JobHandle(second, home).dataset().count_rows() == 40
    removed = ran(home, "rm", second)
    assert "its results stay in s3://bkt/text-out" in removed.err + removed.out
    assert objects.names("bkt/text-out") == names


def test_submit_refuses_what_could_not_run(
    home: Home, objects: ObjectStore, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """No bucket, no match, another job's folder, secrets in the URI: each said, none queued."""
    monkeypatch.setenv("NTX_HOME", str(home.path))
    taken = objects.uri("bkt/taken")
    objects.put("bkt/taken/part-00000-another.parquet", b"x")
    source = objects.uri("bkt/in/*.parquet")
    with JobStore(home.state_path) as store:
        before = len(store.list_jobs())
        for given, words in (
            ((objects.uri("absent/*.parquet"),), "there is no bucket absent"),
            ((source, "-o", objects.uri("absent/out")), "there is no bucket absent"),
            ((objects.uri("bkt/in/*.csv"),), "matches no files that end in"),
            ((source, "-o", taken), "is not empty"),
            ((source, "-o", objects.uri("bkt/in")), "holds the input file"),
            (("s3://AKID:tiger@bkt/in",), "s3://***@bkt/in holds a password"),
        ):
            refused = run_here(capsys, "submit", *given, "--model", MODEL)
            assert refused.code == 2
            assert words in " ".join(refused.err.split()), refused.err
            assert "tiger" not in refused.err
        assert len(store.list_jobs()) == before


def test_a_changed_input_is_refused_on_resume(
    home: Home, objects: ObjectStore, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Case 38."""
    monkeypatch.setenv("NTX_HOME", str(home.path))
    uri = objects.put_table("bkt/edited/in.parquet", {"prompt": ["a"] * 5}, compression=None)
    with JobStore(home.state_path) as store:
        spec = build_spec(uri, model=MODEL, max_tokens=2)
        job = store.create_job(spec, build_manifest(uri), {})
        store.set_state(job.id, "paused")
        objects.put_table("bkt/edited/in.parquet", {"prompt": ["b"] * 5}, compression=None)
        refused = run_here(capsys, "resume", job.id)
        assert refused.code != 0
        assert "its ETag was" in " ".join(refused.err.split())
        store.set_state(job.id, "cancelled")


def test_no_secret_is_written_down(home: Home, objects: ObjectStore) -> None:
    """Whatever the jobs above have left in the state folder: database, logs, notes."""
    secret = CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode()
    written = [path for path in home.path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert home.state_path in written
    assert home.log_path in written
    assert [path for path in written if secret in path.read_bytes()] == []


# ---- schedules ---------------------------------------------------------------------------


def test_a_schedule_runs_new_objects_only_into_folders_of_its_own(
    objects: ObjectStore, tmp_path: Path
) -> None:
    house = House(tmp_path, new_only=True)
    house.write_job(
        f'output = "{objects.uri("bkt/nightly/{date}-{run}")}"\n',
        input=objects.uri("bkt/incoming/*.parquet"),
    )
    with house.jobs:
        assert house.serve_at("2026-12-01T02:00") == ["nothing"]
        objects.put_table("bkt/incoming/a.parquet", {"prompt": ["a"]})
        house.serve_at("2026-12-02T02:00")
        first = house.finish()
        assert [file.path for file in first.manifest.files] == [
            absolute(objects.uri("bkt/incoming/a.parquet"))
        ]
        assert first.results_dir == absolute(objects.uri("bkt/nightly/2026-12-02-1"))
        objects.put_table("bkt/incoming/b.parquet", {"prompt": ["b"]})
        # Written anew, at once and of the same length: another object by its ETag.
        objects.put_table("bkt/incoming/a.parquet", {"prompt": ["c"]})
        house.serve_at("2026-12-03T02:00")
        second = house.finish()
        assert len(second.manifest.files) == 2
        assert second.results_dir == absolute(objects.uri("bkt/nightly/2026-12-03-2"))
        states = house.serve_at("2026-12-04T02:00")
        assert states == ["nothing", "completed", "completed", "nothing"]


def test_a_run_passes_over_a_number_whose_folder_has_objects(
    objects: ObjectStore, tmp_path: Path
) -> None:
    house = House(tmp_path)
    house.write_job(f'output = "{objects.uri("bkt/numbered/{run}")}"\n', objects.uri("bkt/in"))
    objects.put("bkt/numbered/1/part-00000-another.parquet", b"x")
    with house.jobs:
        house.serve_at("2026-12-01T02:00")
        (job,) = house.jobs.list_jobs()
        assert job.results_dir == absolute(objects.uri("bkt/numbered/2"))


def test_an_occurrence_waits_for_a_store_that_does_not_answer(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RETRY_S", 0.5)
    house = House(tmp_path)
    house.write_job(input=objects.uri("bkt/in/*"))
    with house.jobs:
        objects.suspend()
        try:
            assert house.serve_at("2026-12-01T02:00") == []
        finally:
            objects.go_on()
        assert house.serve_at("2026-12-01T02:01") == ["queued"]
