"""Submitting a job that reads another's results: what is checked, said, refused, and undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ntx_batch
from jobs import control
from jobs.home import Home
from jobs.records import JobNotFoundError, OutputError, SpecError
from jobs.retry import create_retry
from jobs.store import JobStore
from ntx_batch import client
from tests.cli_helpers import MODEL, Ran, run_here, write_prompts
from tests.job_factories import bad_row, finish_rows, ok_row
from tests.runner_helpers import make_home

Command = Callable[..., Ran]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    home = make_home(tmp_path / "home")
    monkeypatch.setenv("NTX_HOME", str(home.path))
    # No runner: jobs stay where the commands leave them.
    monkeypatch.setattr(control, "ensure_runner", lambda *_, **__: None)
    return home


@pytest.fixture
def ntx(home: Home, capsys: pytest.CaptureFixture[str]) -> Command:
    return lambda *arguments: run_here(capsys, *arguments)


@pytest.fixture
def first(home: Home, tmp_path: Path) -> client.JobHandle:
    prompts = write_prompts(tmp_path / "in.parquet", ["a", "b"], id=["x", "y"], tone=["dry", "wet"])
    return client.queue(prompts, model=MODEL)


def chain(after: Any, template: str = "{{ id }}: {{ generated_text }}", **options: Any) -> Any:
    return client.queue(after=after, model=MODEL, prompt_template=template, **options)


def test_after_names_a_job_by_handle_by_id_or_by_the_beginning_of_one(
    first: client.JobHandle,
) -> None:
    said: list[str] = []
    for after in (first, first.id, first.id[:11].upper()):
        job = chain(after, say=said.append).snapshot()
        assert (job.spec.after, job.after, job.state) == (first.id, first.id, "queued")
        assert job.spec.input == first.snapshot().results_dir
    assert f"results of job {first.id}; prompts from the template, over id, generated_text" in said
    assert f"waits for job {first.id}" in said


def test_the_job_may_be_named_as_the_input_too(first: client.JobHandle, ntx: Command) -> None:
    ran = ntx(
        *("submit", first.id[:6], "--after", first.id, "--model", MODEL),
        *("--prompt-template", "{{ generated_text }}"),
    )
    assert ran.code == 0, ran.err
    with pytest.raises(SpecError, match=r"drop the input other\.parquet"):
        client.queue("other.parquet", after=first.id, model=MODEL)


def test_a_column_that_there_will_not_be_is_refused_with_those_that_there_will_be(
    first: client.JobHandle, ntx: Command
) -> None:
    options = ("submit", "--after", first.id, "--model", MODEL, "--prompt-template")
    ran = ntx(*options, "{{ generatd_text }}")
    assert ran.code == 2
    assert "no column generatd_text; did you mean generated_text?" in ran.err
    assert "it has id, tone, row_index, sample_index, status, generated_text" in ran.err
    # The prompt is not carried unless that is asked for.
    assert "no column prompt" in ntx(*options, "{{ prompt }}").err


def test_a_chain_of_three_is_checked_before_any_of_it_has_run(first: client.JobHandle) -> None:
    second = chain(first, output_prefix="draft_")
    third = chain(second, "{{ draft_generated_text }} after {{ generated_text }}, {{ tone }}")
    assert third.snapshot().reason == f"waits for job {second.id}"
    with pytest.raises(SpecError, match="no column draft_txt"):
        chain(second, "{{ draft_txt }}")


def test_a_column_that_comes_late_in_a_text_file_is_found(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    filler = '{"prompt": "' + "x" * 1000 + '"}\n'
    path.write_text(filler * 5000 + '{"prompt": "p", "late": 1}\n')
    first = client.queue(path, model=MODEL)
    assert first.snapshot().manifest.num_rows is None
    chain(first, "{{ late }}")
    with pytest.raises(SpecError, match="no column later; did you mean late"):
        chain(first, "{{ later }}")


def test_words_of_other_inputs_are_refused(first: client.JobHandle) -> None:
    with pytest.raises(SpecError, match="encoding and delimiter are for CSV files"):
        chain(first, encoding="cp1252")
    with pytest.raises(SpecError, match="after_errors is one of skip, fail, pass, not 'drop'"):
        chain(first, after_errors="drop")
    with pytest.raises(SpecError, match="add after"):
        client.queue("in.parquet", model=MODEL, after_errors="fail")
    with pytest.raises(SpecError, match="cannot be planned"):
        client.plan(after=first.id, model=MODEL)
    with pytest.raises(JobNotFoundError, match="there is no job 'zzz'"):
        chain("zzz")


def test_results_do_not_go_into_the_folder_that_is_read(
    first: client.JobHandle, tmp_path: Path
) -> None:
    folder = Path(first.snapshot().results_dir)
    for output in (folder, folder / "below"):
        with pytest.raises(OutputError, match=f"is in that of job {first.id}"):
            chain(first, output=output)


def test_a_job_file_can_come_after_another_job(first: client.JobHandle, tmp_path: Path) -> None:
    file = tmp_path / "second.toml"
    file.write_text(
        f'after = "{first.id}"\nafter_errors = "fail"\nmodel = "{MODEL}"\npriority = 2\n'
        'prompt_template = "{{ generated_text }}"\n'
    )
    job = client.queue(file).snapshot()
    assert (job.spec.after, job.spec.after_errors, job.priority) == (first.id, "fail", 2)
    file.write_text(file.read_text() + 'input = "in.parquet"\n')
    with pytest.raises(SpecError, match="drop the input"):
        client.queue(file)


def test_a_job_cannot_come_after_one_that_has_no_results(first: client.JobHandle) -> None:
    first.cancel()
    with pytest.raises(SpecError, match=f"job {first.id} is cancelled, so no job can read"):
        chain(first)


def test_a_key_names_the_chained_job_that_is_there(first: client.JobHandle) -> None:
    said: list[str] = []
    one = chain(first, key="k")
    assert chain(first, key="k", say=said.append).id == one.id
    assert said == [f"job {one.id} has the key k and is queued; no other was queued"]


def test_a_job_that_others_wait_for_is_not_removed(
    first: client.JobHandle, ntx: Command, home: Home
) -> None:
    second = chain(first)
    ran = ntx("rm", first.id)
    assert ran.code == 1
    assert f"job {second.id} has yet to read what job {first.id} has" in ran.err
    with JobStore(home.state_path) as store:
        assert len(store.list_jobs()) == 2


def test_resume_of_a_later_job_names_the_earlier_one(first: client.JobHandle) -> None:
    second, third = chain(first), None
    third = chain(second)
    first.cancel()
    assert third.snapshot().state == "failed"
    assert f"has failed with job {second.id}" in third.resume()
    assert f"job {first.id} was cancelled" in second.resume()
    assert third.snapshot().state == "failed"
    first.resume()
    assert [job.snapshot().state for job in (first, second, third)] == ["queued"] * 3


def test_a_later_job_whose_earlier_one_was_removed_is_not_resumed(
    first: client.JobHandle,
) -> None:
    second = chain(first)
    second.cancel()
    first.remove()
    with pytest.raises(ntx_batch.JobError, match="which was removed: submit a new job"):
        second.resume()


def test_status_shows_the_chain_and_the_hooks_without_secrets(
    first: client.JobHandle, ntx: Command
) -> None:
    job = chain(first, on_finish="https://u:p@example.com/T0/secret?token=x", on_failure="true x")
    ran = ntx("status", job.id)
    assert f"after       job {first.id}\n" in ran.out
    assert "on finish   https://example.com/…: waits for that\n" in ran.out
    listed = ntx("list").out
    assert f"after {first.id}" in listed
    for text in (ran.out, listed, ntx("status", job.id, "--json").out):
        assert not any(word in text for word in ("secret", "token=", "u:p"))
    assert [hook["event"] for hook in job.status()["hooks"]] == ["finish", "failure"]


def test_a_retry_has_the_priority_and_the_hooks_of_its_job(
    first: client.JobHandle, home: Home
) -> None:
    job = client.queue(
        first.snapshot().spec.input, model=MODEL, priority=9, on_finish="https://example.com/x"
    )
    with JobStore(home.state_path) as store:
        claimed = store.claim_job()
        assert claimed is not None and claimed.id == job.id
        store.commit_batch(job.id, finish_rows(claimed, [ok_row(0), bad_row(1, "internal_error")]))
        store.set_state(job.id, "completed")
        again = create_retry(store, job.id, {})
        assert (again.priority, again.hooks[0].target) == (9, claimed.hooks[0].target)
