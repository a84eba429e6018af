"""Write docs/reference.md from the command line's own help; `--check` fails where it is stale."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ntx_batch.cli import command_tree

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference.md"
HEAD = """# Reference

Every command and every option, out of the commands' own help: `python -m scripts.docs` writes this
page. Tasks are in [how-to.md](how-to.md).

A job may be named by a unique prefix of its id. Results go to stdout, everything else to stderr.
"""
HIDDEN = ("--help", "-h", "--install-completion", "--show-completion")


def commands(command: Any, path: tuple[str, ...] = ("ntx-batch",)) -> Iterator[tuple[str, Any]]:
    """(full name, command) of each command that does something, depth first."""
    children = getattr(command, "commands", None)
    if children is None:
        yield " ".join(path), command
        return
    for name, child in children.items():
        yield from commands(child, (*path, name))


def reference(root: Any) -> str:
    """The whole page."""
    sections = [HEAD, f"## Exit codes\n\n{root.epilog}\n"]
    shown: dict[str, str] = {}
    sections += [section(name, command, shown) for name, command in commands(root)]
    return "\n".join(sections)


def section(name: str, command: Any, shown: dict[str, str]) -> str:
    """One command. shown: tables that an earlier command had, with its name, to refer to."""
    paragraphs = [" ".join(text.split()) for text in command.help.split("\n\n")]
    texts = [
        f"    {text.removeprefix('Example: ')}" if text.startswith("Example: ") else text
        for text in paragraphs
    ]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([name, *(_argument(p) for p in arguments)])
    tables = list(_option_tables(command))
    new = [table for table in tables if table not in shown]
    again = {shown[table] for table in tables if table in shown}
    lines = [f"## {usage}", *texts, *_argument_lines(arguments), *new]
    lines += [f"And the options of `{other}` in the other tables there." for other in sorted(again)]
    shown.update({table: name for table in new if not table.startswith("| Option ")})
    return "\n\n".join(lines) + "\n"


def _argument(argument: Any) -> str:
    word = argument.name.upper()
    return word if argument.required else f"[{word}]"


def _argument_lines(arguments: list[Any]) -> Iterator[str]:
    if arguments:
        yield "\n".join(f"- `{_argument(argument)}`: {argument.help}" for argument in arguments)


def _option_tables(command: Any) -> Iterator[str]:
    panels: dict[str | None, list[Any]] = {}
    for option in command.params:
        if option.param_type_name == "option" and not set(option.opts) & set(HIDDEN):
            panels.setdefault(getattr(option, "rich_help_panel", None), []).append(option)
    for panel, options in panels.items():
        rows = [f"| {panel or 'Option'} | |", "|---|---|", *map(_row, options)]
        yield "\n".join(rows)


def _row(option: Any) -> str:
    opts = sorted(option.opts, key=len, reverse=True)
    flags = ", ".join(f"`{flag}`" for flag in (*opts, *option.secondary_opts))
    metavar = "" if option.is_flag else f" `{_escaped(option.metavar or 'TEXT')}`"
    return f"| {flags}{metavar} | {_escaped(option.help)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where stale")
    options = parser.parse_args()
    wanted = reference(command_tree())
    if not options.check:
        REFERENCE.write_text(wanted, encoding="utf-8")
        return 0
    present = REFERENCE.read_text(encoding="utf-8") if REFERENCE.exists() else ""
    if present == wanted:
        return 0
    lines = difflib.unified_diff(
        present.splitlines(), wanted.splitlines(), "docs/reference.md", "the help", lineterm=""
    )
    print(
        "\n".join(lines),
        "\ndocs/reference.md is stale: run `python -m scripts.docs`",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
