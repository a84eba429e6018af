"""A job in a TOML file: the words of `ntx-batch submit`, dashes as underscores."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from jobs.hooks import parse_hook
from jobs.records import HookEvent, SpecError
from jobs.uris import is_uri
from ntx_batch.spec import KNOWN_OPTIONS, nearest

JOB_FILE_SUFFIX = ".toml"
HOOK_OPTIONS: dict[str, HookEvent] = {"on_finish": "finish", "on_failure": "failure"}
KNOWN_KEYS = ("input", "model", "key", "overwrite", "priority", *HOOK_OPTIONS, *KNOWN_OPTIONS)
_PATHS = ("input", "model", "output")


def read_job_file(path: str | Path) -> dict[str, Any]:
    """The options in a job file, ready for `submit`. Paths in it are relative to the file.

    Commands of hooks are too, and run in its folder.

    Raises SpecError: it cannot be read, is not TOML, or has a key that is no option.
    """
    file = Path(path).absolute()
    try:
        options = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"job file {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"job file {path} is not TOML: {error}") from error
    for name in options:
        if name not in KNOWN_KEYS:
            raise SpecError(f"{path}: there is no option {name}{nearest(name, KNOWN_KEYS)}")
    return {name: _resolve(file, name, value) for name, value in options.items()}


def _resolve(file: Path, name: str, value: Any) -> Any:
    if not isinstance(value, str):
        if name in _PATHS:
            raise SpecError(f"{file}: {name} is a path, not {value!r}")
        return value
    if name in HOOK_OPTIONS:
        return parse_hook(name, value, cwd=file.parent)
    if name in _PATHS:
        return value if is_uri(value) else str(file.parent / value)
    if name == "chat_template":
        return file.parent / value
    if name == "prompt_template" and value.startswith("@"):
        return "@" + str(file.parent / value[1:])
    return value
