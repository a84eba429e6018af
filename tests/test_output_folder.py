"""Where results may go: never over the input, nor over what this tool did not write."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.dataset import build_manifest
from jobs.home import Home
from jobs.job_run import JobRun
from jobs.output_folder import find_own_files, refuse_input_place, remove_own_files
from jobs.publish import publish_part
from jobs.records import Job, JobError, ResultsError
from jobs.results import read_results
from jobs.store import JobStore
from ntx_batch.preflight import check_job
from ntx_batch.spec import build_spec
from ntx_batch.submission import queue_job, read_submission
from tests.cli_helpers import MODEL, write_prompts


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of two inputs, one of them deeper."""
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    write_prompts(folder / "a.parquet", ["one"])
    write_prompts(folder / "deep" / "b.parquet", ["two"])
    return folder


def check(input_path: Path | str, output: Path) -> None:
    refuse_input_place(str(output), build_manifest(input_path), str(input_path))


@pytest.mark.parametrize(
    ("input_name", "output_name", "message"),
    [
        ("in/a.parquet", "in/a.parquet", "is the input file"),
        ("in/a.parquet", "in", "holds the input file"),
        ("in", "in", "holds the input file"),
        ("in", ".", "holds the input file"),
        ("in", "in/answers", "is inside the input"),
        ("in", "in/deep/answers/x", "is inside the input"),
        ("in/**/*.parquet", "in/answers", "is inside the input"),
        ("in/*/*.parquet", "in/answers", "is inside the input"),
        ("in/*", "in/answers", "is inside the input"),
    ],
)
def test_results_never_go_over_the_input(
    source: Path, input_name: str, output_name: str, message: str
) -> None:
    """Case 37: the input itself, around it, or inside it, also through a symbolic link."""
    root = source.parent
    (root / "link").symlink_to(root)
    for output in (root / output_name, root / "link" / output_name):
        with pytest.raises(ResultsError, match=message):
            check(root / input_name, output)
    with pytest.raises(ResultsError, match=message):
        check(root / "link" / input_name, root / output_name)


@pytest.mark.parametrize(
    ("input_name", "output_name"),
    [("in/a.parquet", "in/answers"), ("in/*.parquet", "in/answers"), ("in", "answers")],
)
def test_results_may_go_beside_the_input(source: Path, input_name: str, output_name: str) -> None:
    check(source.parent / input_name, source.parent / output_name)


def test_a_file_is_no_results_folder_and_stays(source: Path) -> None:
    """Case 37: `--output prompts.parquet`, plainly, through a link, and with --overwrite."""
    prompts = source / "a.parquet"
    before = prompts.read_bytes()
    (source.parent / "link.parquet").symlink_to(prompts)
    for output in (prompts, source.parent / "link.parquet"):
        for overwrite in (False, True):
            with pytest.raises(JobError, match="is the input file"):
                check_job(build_spec(prompts, model=MODEL, output=output), overwrite=overwrite)
    assert prompts.read_bytes() == before


def test_inputs_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    """Case 37: nothing is named after the input's file name."""
    for folder in ("x", "y"):
        (tmp_path / "in" / folder).mkdir(parents=True)
        write_prompts(tmp_path / "in" / folder / "p.parquet", [folder])
    manifest = check_job(build_spec(tmp_path / "in", model=MODEL)).manifest
    assert [Path(file.path).parent.name for file in manifest.files] == ["x", "y"]
    assert manifest.num_rows == 2


# ---- --overwrite -------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(Home.open(tmp_path / "home").state_path)


def submit(store: JobStore, source: Path, output: Path, *, overwrite: bool = False) -> Job:
    given = {"model": MODEL, "output": output, "overwrite": overwrite}
    return queue_job(store, read_submission(source / "a.parquet", given), lambda _: None)


def open_job(store: JobStore) -> Job:
    """Start the waiting job as a runner does, which publishes its part 0."""
    job = store.claim_job()
    assert job is not None
    JobRun(store, job, publish_part).open()
    return job


def test_overwrite_removes_parts_of_a_job_that_is_over(store: JobStore, source: Path) -> None:
    """Case 37: `--overwrite` removes only files this tool made."""
    with store:
        output = source.parent / "answers"
        first = submit(store, source, output)
        open_job(store)
        with pytest.raises(ResultsError, match="not empty"):
            submit(store, source, output)
        with pytest.raises(ResultsError, match=f"job {first.id}, which is running: cancel it"):
            submit(store, source, output, overwrite=True)
        assert len(os.listdir(output)) == 1
        store.set_state(first.id, "cancelled")
        second = submit(store, source, output, overwrite=True)
        assert os.listdir(output) == []
        assert second.results_dir == str(output)
        released = store.job(first.id)
        assert released.results_dir == str(store.job_dir(first.id) / "results")
        assert released.reason == f"job {second.id} took over its results folder (--overwrite)"
        with pytest.raises(ResultsError, match=f"job {second.id} took over"):
            read_results(store.finished(first.id))
        open_job(store)
        assert os.listdir(output) == [f"part-00000-{second.id}.parquet"]


@pytest.mark.parametrize("name", ["notes.txt", "other.parquet", "part-00001-abc.parquet", "sub"])
def test_overwrite_leaves_a_folder_with_anything_else_alone(
    store: JobStore, source: Path, name: str
) -> None:
    """Case 37: also a Parquet file under a part's name whose footer names no job."""
    with store:
        output = source.parent / "answers"
        submit(store, source, output)
        open_job(store)
        store.set_state(store.list_jobs()[0].id, "cancelled")
        if name == "sub":
            (output / name).mkdir()
        elif name.endswith(".parquet"):
            pq.write_table(pa.table({"x": [1]}), output / name)
        else:
            (output / name).write_text("mine")
        before = sorted(os.listdir(output))
        with pytest.raises(ResultsError, match=f"{name}, which is no part of a job's results"):
            submit(store, source, output, overwrite=True)
        assert sorted(os.listdir(output)) == before


def test_parts_of_a_job_that_another_state_folder_knows_are_ours_too(
    store: JobStore, source: Path, tmp_path: Path
) -> None:
    output = source.parent / "answers"
    with store:
        submit(store, source, output)
        open_job(store)
    with JobStore(Home.open(tmp_path / "other").state_path) as other:
        files = find_own_files(str(output))
        assert len(files) == 1
        assert remove_own_files(other, files) == 1
    assert os.listdir(output) == []


def test_overwrite_wants_a_folder(store: JobStore, source: Path) -> None:
    with store, pytest.raises(JobError, match="name one with output"):
        given = {"model": MODEL, "overwrite": True}
        queue_job(store, read_submission(source / "a.parquet", given), lambda _: None)
