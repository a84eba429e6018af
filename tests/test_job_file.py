"""`submit JOB.toml`: the words of the flags in a file, with paths that are relative to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.records import SpecError
from ntx_batch.job_file import read_job_file
from ntx_batch.submission import read_submission
from tests.cli_helpers import MODEL

TEXT = """
input = "data/prompts.parquet"
model = "model.gguf"
output = "../answers"
prompt_template = "@templates/prompt.jinja"
chat = true
system = "Be brief."
chat_template = "templates/chat.jinja"
template_kwargs = { enable_thinking = false }
param_columns = ["temperature", "seed"]
stop = ["###", "END"]
temperature = 0.5
max_tokens = 64
kv_memory = "8GiB"
max_errors = "5%"
row_timeout = 30
key = "nightly"
overwrite = true
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "templates").mkdir(parents=True)
    (folder / "templates" / "prompt.jinja").write_text("Say {{ word }}")
    (folder / "templates" / "chat.jinja").write_text("{{ messages }}")
    (folder / "job.toml").write_text(TEXT)
    return folder / "job.toml"


def test_every_word_of_a_file_reaches_the_spec(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    submission = read_submission(job_file, {})
    spec, folder = submission.spec, job_file.parent
    assert (spec.input, spec.model) == (f"{folder}/data/prompts.parquet", f"{folder}/model.gguf")
    assert spec.output == str(folder.parent / "answers")
    assert (spec.prompt_template, spec.chat_template) == ("Say {{ word }}", "{{ messages }}")
    assert (spec.chat, spec.system) == (True, "Be brief.")
    assert spec.template_kwargs == {"enable_thinking": False}
    assert spec.param_columns == ("temperature", "seed")
    assert spec.params.stop == ("###", "END")
    assert (spec.params.temperature, spec.params.max_tokens) == (0.5, 64)
    assert spec.engine.kv_memory_nbytes == 8 << 30
    assert (spec.max_errors, spec.row_timeout_s) == ("5%", 30.0)
    assert (submission.key, submission.overwrite) == ("nightly", True)


def test_flags_come_before_the_file(job_file: Path, tmp_path: Path) -> None:
    given = {"model": str(MODEL), "max_tokens": 3, "key": "once", "output": None}
    submission = read_submission(job_file, given)
    assert (submission.spec.model, submission.spec.params.max_tokens) == (str(MODEL), 3)
    assert submission.key == "once"
    assert submission.spec.output == str(tmp_path / "answers"), "None leaves it to the file"


def test_a_relative_pattern_is_below_the_file(job_file: Path) -> None:
    job_file.write_text('input = "data/**/*.jsonl"\nmodel = "m.gguf"')
    assert read_submission(job_file, {}).spec.input == f"{job_file.parent}/data/**/*.jsonl"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_token = 3", "there is no option max_token; did you mean max_tokens?"),
        ("max-tokens = 3", "there is no option max-tokens; did you mean max_tokens?"),
        ("wait = true", "there is no option wait"),
        ("[params]\ntop_k = 1", "there is no option params"),
        ("max_tokens = \n", "is not TOML: .*line 1"),
        ('model = "m.gguf"', "no input is named: write `input"),
        ('input = "p.parquet"', "no model is named: .*--model"),
        ('input = 3\nmodel = "m.gguf"', "input is a path, not 3"),
        ('input = "p.csv"\nmodel = "m.gguf"\nmax_errors = "some"', "max_errors is a number"),
        ('input = "p.csv"\nmodel = "m.gguf"\nmax_errors = "101%"', "max_errors is a number"),
        ('input = "p.csv"\nmodel = "m.gguf"\nrow_timeout = 0', "row_timeout is more than 0"),
        ('input = "p.csv"\nmodel = "m.gguf"\nchat = "yes"', "chat is true or false"),
        ('input = "p.csv"\nmodel = "m.gguf"\noverwrite = 1', "overwrite is true or false"),
        ('input = "p.csv"\nmodel = "m.gguf"\nkey = ""', "key is a text that is not empty"),
        ('input = "p.csv"\nmodel = "m.gguf"\nkv_memory = "much"', "'much' is not a size"),
    ],
)
def test_what_a_file_gets_wrong_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        read_submission(path, {})


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.toml cannot be read"):
        read_job_file(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'system = "\xe9"')
    with pytest.raises(SpecError, match=r"latin\.toml cannot be read"):
        read_job_file(tmp_path / "latin.toml")
