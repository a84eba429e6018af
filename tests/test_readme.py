"""What the README shows works: its commands and its Python, on a tiny model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.control import stop_runner
from scripts.demo import write_prompts as write_demo_prompts
from tests.cli_helpers import ROOT, run_process, write_prompts
from tests.gguf_factory import write_tiny_model
from tests.runner_helpers import make_home
from tests.smollm2 import smollm2_path

README = (ROOT / "README.md").read_text()
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where README's names exist: model.gguf with a chat template, and prompts.parquet."""
    folder = tmp_path_factory.mktemp("readme")
    write_tiny_model(folder / "model.gguf", metadata={"tokenizer.chat_template": TEMPLATE})
    write_prompts(folder / "prompts.parquet", ["one", "two", "three"])
    home = make_home(folder / "home")
    yield folder
    stop_runner(home)


def test_the_commands_of_the_readme_run(folder: Path) -> None:
    submit, results = re.findall(r"^    ntx-batch (.*)$", README.split("## Use it")[1], re.M)
    ran = run_process(folder / "home", *shlex.split(submit), cwd=folder)
    assert ran.code == 0, ran.err
    words = shlex.split(results)
    words[1] = ran.out.strip()
    assert run_process(folder / "home", *words, cwd=folder).code == 0
    answers = pq.read_table(folder / words[-1])
    assert answers.column("status").to_pylist() == ["ok"] * 3


def test_the_python_of_the_readme_runs(folder: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    subprocess.run(
        [sys.executable, "-c", f"{code}\nassert table.num_rows == 3"],
        env=os.environ | {"NTX_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)},
        cwd=folder,
        check=True,
        timeout=120,
    )


def shown_answers() -> list[str]:
    """The texts of the README's table, their wrapped lines joined again."""
    answers: list[str] = []
    for row, text in re.findall(r"^    │ *(\d*) *│[^│]*│[^│]*│ (.*?) *│", README, re.M):
        if row:
            answers.append(text)
        else:
            answers[-1] += f" {text}"
    return answers


def test_the_answers_of_the_readme_are_those_of_the_model(tmp_path: Path, folder: Path) -> None:
    write_demo_prompts(tmp_path / "prompts.parquet")
    answers = shown_answers()
    arguments = ("--chat", "--max-tokens", "64", "--limit", str(len(answers)))
    home = folder / "home"
    ran = run_process(
        home, "run", tmp_path / "prompts.parquet", "--model", smollm2_path(), *arguments
    )
    assert ran.code == 0, ran.err
    run_process(home, "results", ran.out.strip(), "-o", tmp_path / "answers.parquet")
    table = pq.read_table(tmp_path / "answers.parquet")
    assert table.column("generated_text").to_pylist() == answers
    assert len(answers) == 5


def test_the_map_has_every_folder() -> None:
    named = set(re.findall(r"^\| `(\w+)/` \|", README.split("## The map")[1], re.M))
    folders = {path.parent.name for path in ROOT.glob("*/*.py")}
    assert named == folders
