"""Who is told of a job's end, as people write it and as it is shown; when to try again.

A hook is a command, given as one string and run without a shell, or an http(s) URL that gets a
POST. URLs hold secrets: only the host of one is ever shown.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from jobs.records import HookTarget, SpecError

COMMAND_TIMEOUT_S = 300.0
WEBHOOK_TIMEOUT_S = 30.0
# Between the attempts of a webhook, and of what was killed before it could say how it went.
RETRY_DELAYS_S = (5.0, 30.0, 120.0, 600.0)
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def parse_hook(name: str, text: str, *, cwd: str | Path | None = None) -> HookTarget:
    """What a hook's text says: a URL, or a command whose program is there.

    name: of the option, for messages
    cwd: the folder that the command runs in and that it may name its program from; None is this
        process's

    Raises SpecError: no URL that can be posted to, no such program, or quotes that do not close.
    """
    if not isinstance(text, str) or not text.strip():
        raise SpecError(f"{name} is a command, or an http(s) URL, not {text!r}")
    if _URL.match(text.strip()):
        return HookTarget(url=_checked_url(name, text.strip()))
    folder = os.path.abspath(cwd or os.getcwd())
    try:
        program, *arguments = shlex.split(text)
    except ValueError as error:
        raise SpecError(f"{name}: {error} in {shown_text(text)!r}") from None
    return HookTarget(argv=(_find_program(name, program, folder), *arguments), cwd=folder)


def _checked_url(name: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        is_good = parts.scheme.lower() in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or re.search(r"\s", url):
        raise SpecError(f"{name}: {shown_text(url)} is no http:// or https:// URL with a host")
    return url


def _find_program(name: str, program: str, folder: str) -> str:
    path = os.path.join(folder, program) if os.sep in program else program
    found = shutil.which(path)
    if found is None:
        where = f"in {folder}" if os.sep in program else "in $PATH"
        raise SpecError(
            f"{name}: there is no program {program!r} {where} that can be run; a shell's words "
            "need one: sh -c '...'"
        )
    return os.path.abspath(found)


def shown_target(target: HookTarget) -> str:
    """For people and logs: the command, or the host of a URL. URLs in arguments are cut too."""
    return shown_text(target.url or shlex.join(target.argv))


def shown_text(text: str) -> str:
    """The text with every URL in it cut after its host; the user's name goes too."""
    return re.sub(r"([a-zA-Z][a-zA-Z0-9+.-]*://)([^\s'\"/?#]*)[^\s'\"]*", _cut, text)


def _cut(match: re.Match[str]) -> str:
    scheme, authority = match.groups()
    rest = "/…" if match.end() > match.end(2) else ""
    return scheme + authority.rpartition("@")[2] + rest


def timeout_s(target: HookTarget) -> float:
    """How long an attempt may take."""
    return WEBHOOK_TIMEOUT_S if target.url else COMMAND_TIMEOUT_S


def retry_delay_s(num_attempts: int) -> float | None:
    """Seconds until the next attempt, after this many; None: there is none."""
    return RETRY_DELAYS_S[num_attempts - 1] if num_attempts <= len(RETRY_DELAYS_S) else None
