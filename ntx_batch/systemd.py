"""A systemd user unit that keeps a runner there, for `ntx-batch runner install`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from jobs import control
from jobs.home import Home
from jobs.records import RunnerError

UNIT_NAME = "ntx-batch.service"
ENABLE_COMMANDS = (
    "systemctl --user daemon-reload",
    f"systemctl --user enable --now {UNIT_NAME}",
    "loginctl enable-linger  # so that it runs while you are not logged in",
)
# Mixed: the runner alone is told to stop; it ends its engine, which may be in a sweep.
_UNIT = """\
[Unit]
Description=ntx-batch: runs the jobs and schedules of {description}

[Service]
ExecStart={command}
{environment}Restart=on-failure
RestartSec=30
KillMode=mixed
TimeoutStopSec=60

[Install]
WantedBy=default.target
"""


def unit_text(environ: Mapping[str, str], home: str | Path | None = None) -> str:
    """The unit of a state folder, with the variables of `environ` that its jobs depend on."""
    variables = control.environment_of(environ)
    if path := control.child_environment().get("PYTHONPATH"):
        variables["PYTHONPATH"] = path
    lines = [f"Environment={_quoted(f'{key}={value}')}\n" for key, value in variables.items()]
    place = str(Home.open(home).path)
    words = [_quoted(word).replace("$", "$$") for word in (sys.executable, place)]
    return _UNIT.format(
        description=place.replace("%", "%%"),
        command=f"{words[0]} -P -m jobs.runner --home {words[1]}",
        environment="".join(lines),
    )


def unit_path(environ: Mapping[str, str]) -> Path:
    """Where systemd looks for a user's units."""
    config = environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "systemd" / "user" / UNIT_NAME


def install(environ: Mapping[str, str], home: str | Path | None = None) -> Path:
    """Write the unit and return its path; the same one again is no harm.

    Raises RunnerError: a unit of another state folder is there.
    """
    path, text = unit_path(environ), unit_text(environ, home)
    if path.exists():
        present = path.read_text(encoding="utf-8")
        place = _description(text)
        if _description(present) != place:
            raise RunnerError(
                f"{path} is there already and is another's ({_description(present)!r}, not "
                f"{place!r}): remove it first, or copy what `ntx-batch runner install --print` "
                "prints to a unit of another name"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _description(unit: str) -> str:
    lines = [line for line in unit.splitlines() if line.startswith("Description=")]
    return lines[0].removeprefix("Description=") if lines else ""


def _quoted(text: str) -> str:
    """A word as systemd reads it, with % as itself."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
