"""What the commands say to people and to pipes: usage, the job they take, tables, notes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.home import Home
from jobs.records import Job
from jobs.store import JobStore
from ntx_batch.cli import command_tree
from scripts.docs import commands
from tests.cli_helpers import MODEL, Ran, queue_job, run_here, write_prompts
from tests.job_factories import bad_row, finish_rows, ok_row

NUM_ROWS = 30
LOOKING = ("status", "watch", "wait", "results", "logs")
CHANGING = ("cancel", "pause", "resume", "retry", "rm")
LONG_NAME = "a name of a folder that does not fit into the eighty columns of a terminal at all"

Command = Callable[..., Ran]


@pytest.fixture
def ntx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    monkeypatch.setenv("NTX_HOME", str(tmp_path / "home"))
    return lambda *arguments: run_here(capsys, *arguments)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A completed job of 30 rows, of which the last 25 failed."""
    (tmp_path / LONG_NAME).mkdir()
    prompts = write_prompts(tmp_path / LONG_NAME / "prompts.parquet", ["x"] * NUM_ROWS)
    job = queue_job(tmp_path / "home", prompts)
    rows = [ok_row(row) if row < 5 else bad_row(row) for row in range(NUM_ROWS)]
    with JobStore(Home.open(tmp_path / "home").state_path) as store:
        store.claim_job()
        store.set_total(job.id, NUM_ROWS)
        store.commit_batch(job.id, finish_rows(job, rows))
        store.set_state(job.id, "completed")
        return store.job(job.id)


# ---- usage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", dict(commands(command_tree())))
def test_help_names_arguments_in_capitals_and_no_types_of_flags(ntx: Command, name: str) -> None:
    ran = ntx(*name.split()[1:], "--help")
    (usage,) = (line for line in ran.out.splitlines() if "Usage:" in line)
    assert "{" not in usage
    assert not any(word.strip("[]").islower() for word in usage.split(name)[1].split())
    assert "<bool>" not in ran.out


@pytest.mark.parametrize(("name", "argument"), [("inspect", "MODEL"), ("cancel", "JOB")])
def test_an_argument_that_is_missing_is_named_as_in_the_usage(
    ntx: Command, name: str, argument: str
) -> None:
    ran = ntx(name)
    assert ran.code == 2
    assert f"ntx-batch {name} [OPTIONS] {argument}" in ran.err
    assert f"Missing argument '{argument}'" in ran.err


def test_a_submit_of_nothing_says_what_can_be_submitted(ntx: Command) -> None:
    ran = ntx("submit", "--model", "m.gguf")
    assert ran.code == 2
    assert "no input is named" in ran.err and "--after JOB" in ran.err


# ---- which job -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOOKING)
def test_commands_that_look_take_the_newest_job(
    ntx: Command, job: Job, tmp_path: Path, name: str
) -> None:
    again = queue_job(tmp_path / "home", Path(job.spec.input))
    with JobStore(Home.open(tmp_path / "home").state_path) as store:
        store.set_state(again.id, "cancelled")
    log = Home.open(tmp_path / "home").job_log_path(again.id)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("what happened\n")
    assert ntx(name) == ntx(name, again.id) != ntx(name, job.id)


@pytest.mark.parametrize("name", CHANGING)
def test_commands_that_change_a_job_want_its_name(ntx: Command, job: Job, name: str) -> None:
    assert ntx(name).code == 2


@pytest.mark.parametrize("name", [*LOOKING, *CHANGING])
def test_an_empty_name_is_not_the_newest_job(ntx: Command, job: Job, name: str) -> None:
    ran = ntx(name, "")
    assert (ran.code, ran.out) == (2, "")
    assert "the job's id is empty" in ran.err


# ---- results ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ([], "20 of 30 rows; --head N or -o FILE gives more"),
        (["--errors"], "20 of 25 failed rows; --head N or -o FILE gives more"),
        (["--head", "20"], ""),
    ],
)
def test_a_table_that_is_cut_says_so(ntx: Command, job: Job, options: list[str], note: str) -> None:
    ran = ntx("results", job.id, *options)
    assert ran.err.strip() == note
    assert ran.out.count("├") == 19, "lines between 20 rows"


def test_a_whole_table_says_nothing_more(ntx: Command, job: Job, tmp_path: Path) -> None:
    with JobStore(Home.open(tmp_path / "home").state_path) as store:
        again = queue_job(tmp_path / "home", Path(job.spec.input), limit=20)
        store.claim_job()
        rows = [ok_row(row) for row in range(20)]
        store.commit_batch(again.id, finish_rows(again, rows))
    assert ntx("results", again.id).err == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("answers.txt", "does not say its format"),
        ("absent/answers.csv", "make the folder"),
        (f"{LONG_NAME}/prompts.parquet", "is an input file"),
    ],
)
def test_a_file_that_cannot_be_written_to_is_usage(
    ntx: Command, job: Job, tmp_path: Path, name: str, message: str
) -> None:
    ran = ntx("results", job.id, "-o", tmp_path / name)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


def test_state_that_cannot_be_read_is_not_usage(ntx: Command, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "state.sqlite").write_bytes(b"no database" * 500)
    assert ntx("list").code == 1


# ---- pipes -----------------------------------------------------------------------------------


def test_tables_in_a_pipe_are_neither_folded_nor_padded(
    ntx: Command, job: Job, tmp_path: Path
) -> None:
    queue_job(tmp_path / "home", write_prompts(tmp_path / f"{LONG_NAME}.parquet", ["x"]))
    outputs = [
        ntx(*words).out
        for words in (
            ("status", job.id),
            ("list",),
            ("plan", job.spec.input, "--model", MODEL),
            ("doctor", "--model", MODEL),
            ("inspect", MODEL),
        )
    ]
    for out in outputs:
        assert out and all(line == line.rstrip() for line in out.splitlines())
    status, listed, plan, *_ = (out.splitlines() for out in outputs)
    assert [line.split("  ", 1)[1].strip() for line in status if line.startswith("input")] == [
        job.spec.input
    ]
    assert listed[1].endswith(f"{LONG_NAME}.parquet")
    assert len(listed) == 3
    assert any(len(line) > 80 for line in plan)


# ---- flags over a job file -------------------------------------------------------------------


def test_a_flag_that_is_on_in_a_job_file_can_be_taken_back(ntx: Command, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.parquet", ["x"])
    job_file = tmp_path / "job.toml"
    job_file.write_text(f'input = "{prompts}"\nmodel = "{MODEL}"\nchat = true\n')
    refused = ntx("plan", job_file)
    assert refused.code == 2 and "has no chat template" in refused.err
    report = json.loads(ntx("plan", job_file, "--no-chat", "--json").out)
    assert report["rows"]["num_rows"] == 1
