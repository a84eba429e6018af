"""The documentation names what exists: commands, options, files."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kernels
import ntx_batch
from jobs.records import RESULT_COLUMNS
from jobs.store import JobStore
from ntx_batch.cli import command_tree
from ntx_batch.status import status_record
from scripts.docs import REFERENCE, commands, reference
from tests.job_factories import make_job

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = dict(commands(command_tree()))


def shown_commands(text: str) -> Iterator[list[str]]:
    """The words of each `ntx-batch ...` line in a code block."""
    for line in text.splitlines():
        if line.startswith("    ") and (found := re.search(r"ntx-batch [^)]*", line)):
            yield shlex.split(found[0].split(" && ")[0])


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    for length in (3, 2):
        command = COMMANDS.get(" ".join(words[:length]))
        if command is not None:
            return command, words[length:]
    raise AssertionError(f"no such command: {shlex.join(words)}")


def test_reference_is_the_help_of_the_commands() -> None:
    assert REFERENCE.read_text() == reference(command_tree()), "run python -m scripts.docs"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(name: str) -> None:
    command = COMMANDS[name]
    first, *_, example = command.help.split("\n\n")
    assert len(first) > 20
    assert example.startswith(f"Example: {name}")
    shown, _ = command_of(shlex.split(example.removeprefix("Example: ")))
    assert shown is command


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_explains_itself(name: str) -> None:
    for parameter in COMMANDS[name].params:
        assert parameter.help, parameter.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_pages_exist_with_their_options(page: Path) -> None:
    for words in shown_commands(page.read_text()):
        if words[1:] == ["COMMAND", "--help"]:
            continue
        command, rest = command_of(words)
        known = {
            flag
            for parameter in command.params
            for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in rest if re.match(r"--?[a-z]", word)} <= known, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_in_the_pages_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for name in re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", text):
        if name.split("/")[0] in {
            "ntx_batch",
            "jobs",
            "engine",
            "kernels",
            "nvme",
            "scripts",
            "tests",
        }:
            assert (ROOT / name).exists(), name


def test_how_to_lists_the_result_columns_in_order() -> None:
    text = (ROOT / "docs" / "how-to.md").read_text()
    table = text.split("| column | what it holds |\n")[1].split("\n\n")[0]
    names = [
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    assert tuple(names) == RESULT_COLUMNS


def test_how_to_lists_the_fields_of_a_status_in_order(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "how-to.md").read_text()
    table = text.split("| field | what it holds |\n")[1].split("\n\n")[0]
    names = [
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    with JobStore(tmp_path / "state.sqlite") as store:
        assert names == list(status_record(make_job(store), 0.0))


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs" / "decisions.md").read_text()
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        name = re.split(r"[>=<]", requirement)[0]
        assert f"`{name}`" in text, name


def test_the_version_is_said_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == ntx_batch.__version__ == kernels.__version__
