"""A job goes on only with the input, the model and the program that it was submitted with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.gguf_file import GgufFile
from engine.revision import NUMERICS_REVISION
from jobs.fingerprint import fingerprint_differences, read_fingerprint, read_full_fingerprint
from jobs.home import Home
from jobs.records import ChangedError, Job
from jobs.resume_check import check_unchanged_job, new_input_files
from jobs.store import JobStore
from ntx_batch.submission import queue_job, read_submission
from tests.cli_helpers import MODEL, write_prompts
from tests.gguf_factory import write_tiny_model
from tests.golden import GOLDEN


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copy(MODEL, tmp_path / "model.gguf"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        write_prompts(tmp_path / "in" / f"{name}.parquet", ["one", "two"])
    return tmp_path / "in"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with JobStore(Home.open(tmp_path / "home").state_path) as store:
        yield store


def submit(store: JobStore, source: Path, model: Path, **options: object) -> Job:
    """A job that has started once: its fingerprint is complete."""
    submission = read_submission(source, {"model": model, **options})
    job = queue_job(store, submission, lambda _: None)
    store.set_fingerprint(job.id, check_unchanged_job(job))
    return store.job(job.id)


def differences(job: Job) -> list[str]:
    with pytest.raises(ChangedError) as caught:
        check_unchanged_job(job)
    first, *lines, last = str(caught.value).splitlines()
    assert first.startswith(f"job {job.id} cannot go on, ")
    assert last == "put back what it was, or submit a new job"
    return [line.strip() for line in lines]


def flip(path: Path, offset: int) -> None:
    """Change one byte; size and times stay."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_an_unchanged_job_may_go_on(store: JobStore, source: Path, model: Path) -> None:
    job = submit(store, source, model)
    assert job.fingerprint is not None
    assert check_unchanged_job(job) == job.fingerprint
    assert job.fingerprint.samples_sha256 is not None
    assert job.fingerprint.full_sha256 is None
    assert job.fingerprint.numerics_revision == NUMERICS_REVISION


def test_changed_and_missing_inputs_are_listed_with_both_values(
    store: JobStore, source: Path, model: Path
) -> None:
    """Case 38: one prompt edited, rows appended, a file gone."""
    job = submit(store, source, model)
    first, second = job.manifest.files
    write_prompts(source / "a.parquet", ["one", "two", "three"] * 100)
    (source / "b.parquet").unlink()
    changed, missing = differences(job)
    size = (source / "a.parquet").stat().st_size
    assert f"its size was {first.nbytes} bytes, is {size} bytes" in changed
    assert f"input file {second.path} cannot be read any more" in missing


def test_an_edit_that_keeps_the_size_is_seen_by_its_time(
    store: JobStore, source: Path, model: Path
) -> None:
    """Case 38: one prompt edited."""
    job = submit(store, source, model)
    write_prompts(source / "a.parquet", ["one", "twO"])
    os.utime(source / "a.parquet", ns=(1, 1))
    (line,) = differences(job)
    assert f"its modification time was {job.manifest.files[0].mtime_ns} ns, is 1 ns" in line


def test_new_files_are_reported_and_not_read(store: JobStore, source: Path, model: Path) -> None:
    """Case 38: rows that came in a file of their own."""
    job = submit(store, source, model)
    added = write_prompts(source / "c.parquet", ["three"])
    assert check_unchanged_job(job) == job.fingerprint
    assert new_input_files(job) == [str(added)]
    assert store.job(job.id).total == 4


def test_another_model_is_refused(store: JobStore, source: Path, model: Path) -> None:
    """Case 38: the GGUF swapped for one of another quantisation."""
    job = submit(store, source, model)
    before = model.stat().st_size
    shutil.copy(GOLDEN / "llama-q8_0.gguf", model)
    sizes, header, samples = differences(job)
    assert sizes == (
        f"model {model}: model sizes in bytes: was {before}, is {model.stat().st_size}"
    )
    assert "SHA-256 of the model's header: was " in header
    assert "SHA-256 of samples of the model's tensors: was " in samples


def test_a_model_of_the_same_header_and_other_weights_is_refused(
    store: JobStore, source: Path, model: Path
) -> None:
    """Case 38: a fine-tune has the sizes and names of its base."""
    job = submit(store, source, model)
    flip(model, GgufFile.open(model).tensors["blk.1.attn_q.weight"].offset + 100)
    (line,) = differences(job)
    assert "samples of the model's tensors" in line


def test_a_model_that_is_gone_is_refused(store: JobStore, source: Path, model: Path) -> None:
    job = submit(store, source, model)
    model.unlink()
    (line,) = differences(job)
    assert str(model) in line


def test_verify_sees_a_byte_that_samples_do_not(
    store: JobStore, source: Path, tmp_path: Path
) -> None:
    """`--verify` hashes all bytes of the model."""
    model = write_tiny_model(tmp_path / "big.gguf").path
    file = GgufFile.open(model)
    with model.open("ab") as end:
        end.write(b"\0" * 100)  # bytes that are no tensor's
    at = model.stat().st_size - 50
    by_samples = submit(store, source, model)
    by_all = submit(store, source, model, verify=True)
    assert by_all.fingerprint is not None and by_all.fingerprint.full_sha256
    assert max(t.offset + t.nbytes for t in file.tensors.values()) <= at
    flip(model, at)
    assert check_unchanged_job(by_samples) == by_samples.fingerprint
    (line,) = differences(by_all)
    assert "SHA-256 of the whole model" in line


def test_another_numerics_revision_is_refused(store: JobStore, source: Path, model: Path) -> None:
    """Case 38: a program whose texts may differ does not go on with the job of another."""
    job = submit(store, source, model)
    assert job.fingerprint is not None
    earlier = replace(job.fingerprint, numerics_revision=NUMERICS_REVISION - 1)
    (line,) = differences(replace(job, fingerprint=earlier))
    assert line.endswith(
        f"numerics revision of this program: was {NUMERICS_REVISION - 1}, is {NUMERICS_REVISION}"
    )


def test_parts_that_are_gone_are_listed(store: JobStore, source: Path, model: Path) -> None:
    job = submit(store, source, model)
    part, _ = store.begin_part(job.id)
    store.commit_part(job.id, part.number)
    with pytest.raises(ChangedError, match=f"{part.name} with 0 finished rows was there, is gone"):
        check_unchanged_job(job, store.parts(job.id))


def test_changed_templates_and_parameters_do_not_reach_a_job(
    store: JobStore, source: Path, model: Path, tmp_path: Path
) -> None:
    """Case 38: the spec is frozen at submit, template files and all."""
    template = tmp_path / "prompt.jinja"
    template.write_text("Say {{ prompt }}")
    job = submit(store, source, model, prompt_template=f"@{template}", temperature=0.5)
    template.write_text("Shout {{ prompt }}")
    assert check_unchanged_job(job) == job.fingerprint
    assert store.job(job.id).spec.prompt_template == "Say {{ prompt }}"
    assert store.job(job.id).spec.params.temperature == 0.5


def test_a_long_list_is_cut(store: JobStore, source: Path, model: Path) -> None:
    job = submit(store, source, model)
    files = tuple(
        replace(job.manifest.files[0], path=f"/gone/{number}.parquet") for number in range(30)
    )
    lines = differences(replace(job, manifest=replace(job.manifest, files=files)))
    assert len(lines) == 21
    assert lines[-1] == "… and 10 more"


# ---- fingerprints ------------------------------------------------------------------------


def test_submit_reads_no_tensor() -> None:
    found = read_fingerprint(GgufFile.open(MODEL))
    assert (found.samples_sha256, found.full_sha256) == (None, None)
    assert found.model_nbytes == (MODEL.stat().st_size,)
    full = read_full_fingerprint(MODEL, verify=True)
    assert fingerprint_differences(found, full) == []
    assert None not in (full.samples_sha256, full.full_sha256)


def test_every_file_of_a_split_model_counts(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "split", tmp_path / "split"))
    shards = sorted(folder.glob("*.gguf"))
    before = read_full_fingerprint(shards[0], verify=True)
    assert len(before.model_nbytes) == len(shards) > 1
    flip(shards[-1], shards[-1].stat().st_size - 1)
    after = read_full_fingerprint(shards[0], verify=True)
    assert before.header_sha256 == after.header_sha256
    assert before.full_sha256 != after.full_sha256


def test_reading_can_be_stopped() -> None:
    seen: list[int] = []

    def stop(num_read: int) -> None:
        seen.append(num_read)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_full_fingerprint(MODEL, verify=False, on_progress=stop)
    assert len(seen) == 1
    assert seen[0] <= 64 << 10
