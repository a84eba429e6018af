"""Tell of a job's end, once: run a command, or POST to a URL, and note how it went.

`python -m ntx_batch.hook_delivery --home DIR --hook N`, started by the runner as the leader of a
process group. The JSON is that of `ntx-batch status JOB --json`. Over its time it kills its group,
itself with it.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any, NoReturn
from urllib.parse import unquote, urlsplit, urlunsplit

from jobs.home import Home
from jobs.hook_store import Attempt, HookStore, Outcome
from jobs.hooks import shown_target, shown_text, timeout_s
from jobs.job_log import LOG_FORMAT
from jobs.records import Job, JobError
from jobs.store import JobStore
from ntx_batch import __version__
from ntx_batch.status import status_record

JOB_VARIABLE, EVENT_VARIABLE = "NTX_JOB", "NTX_EVENT"
MAX_OUTPUT_NBYTES = 64 << 10
MAX_ERROR_CHARS = 500
PUMP_TIMEOUT_S = 1.0

log = logging.getLogger("ntx_batch.hooks")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would arrive as a GET, or elsewhere: it is an answer like others."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def post(url: str, body: bytes, headers: dict[str, str], limit_s: float) -> Outcome:
    """POST JSON to a URL; any 2xx is a delivery.

    limit_s: seconds without a byte from the other side
    """
    parts = urlsplit(url)
    headers = {"Content-Type": "application/json", **headers}
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(user.encode()).decode()
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))
    request = urllib.request.Request(bare, data=body, headers=headers, method="POST")
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=limit_s) as answer:
            return Outcome(exit_status=answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return Outcome(
                exit_status=error.code,
                error=f"answered {error.code} {error.reason}",
                may_retry=True,
            )
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return Outcome(error=shown_text(f"{reason}") or type(error).__name__, may_retry=True)


class _Output:
    """What a command says: its beginning goes to a file, its end is kept."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._source, self._sink = source, sink
        self._num_left = MAX_OUTPUT_NBYTES
        self._tail = b""
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()

    def _pump(self) -> None:
        with self._source:
            while chunk := self._source.read1(1 << 16):  # type: ignore[attr-defined]
                self._tail = (self._tail + chunk)[-4 * MAX_ERROR_CHARS :]
                self._sink.write(chunk[: self._num_left])
                self._num_left -= min(self._num_left, len(chunk))

    def last_words(self) -> str:
        # What the command left in the background may hold its output open.
        self._thread.join(PUMP_TIMEOUT_S)
        return self._tail.decode("utf-8", "replace").strip()[-MAX_ERROR_CHARS:]


def run_command(attempt: Attempt, body: bytes, sink: IO[bytes], limit_s: float) -> Outcome:
    """Run a hook's command with the JSON on its standard input; exit status 0 is a delivery.

    sink: gets what it says

    Raises subprocess.TimeoutExpired: it runs on after `limit_s` seconds.
    """
    target = attempt.target
    try:
        command = subprocess.Popen(
            target.argv,
            cwd=target.cwd,
            env=os.environ | {JOB_VARIABLE: attempt.job_id, EVENT_VARIABLE: attempt.event},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        return Outcome(error=f"cannot be run: {error}")
    assert command.stdin is not None and command.stdout is not None
    output = _Output(command.stdout, sink)
    feed = threading.Thread(target=_feed, args=(command.stdin, body), daemon=True)
    feed.start()
    status = command.wait(limit_s)
    words = shown_text(output.last_words())
    if status == 0:
        return Outcome(exit_status=0)
    ended = f"exit status {status}" if status > 0 else f"ended by signal {-status}"
    return Outcome(exit_status=status, error=f"{ended}: {words}" if words else ended)


def _feed(sink: IO[bytes], body: bytes) -> None:
    # It need not read it.
    with contextlib.suppress(BrokenPipeError), sink:
        sink.write(body)


class Delivery:
    """One attempt, from the job's JSON to the note of how it went."""

    def __init__(self, home: Home, store: HookStore, attempt: Attempt) -> None:
        self._home = home
        self._store = store
        self._attempt = attempt

    def make(self) -> None:
        attempt = self._attempt
        job = self._store.jobs.job(attempt.job_id)
        body = json.dumps(status_record(job, time.time()), ensure_ascii=False).encode()
        limit_s = timeout_s(attempt.target)
        if attempt.target.url is not None:
            outcome = post(attempt.target.url, body, _headers(attempt), limit_s)
        else:
            outcome = self._run(job, body + b"\n", limit_s)
        self._store.end(attempt, outcome)
        self._say(outcome)

    def _run(self, job: Job, body: bytes, limit_s: float) -> Outcome:
        path = self._home.job_log_path(job.id)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as sink:
            try:
                return run_command(self._attempt, body, sink, limit_s)
            except subprocess.TimeoutExpired:
                self._end_group(Outcome(error=f"killed: it ran for more than {limit_s:.0f} s"))

    def _end_group(self, outcome: Outcome) -> NoReturn:
        self._store.end(self._attempt, outcome)
        self._say(outcome)
        os.killpg(os.getpgrp(), signal.SIGKILL)
        raise AssertionError("unreachable: this process is of the group")

    def _say(self, outcome: Outcome) -> None:
        attempt = self._attempt
        log.log(
            logging.INFO if outcome.error is None else logging.WARNING,
            "job %s: told %s (attempt %d): %s",
            attempt.job_id,
            shown_target(attempt.target),
            attempt.number,
            outcome.error or "delivered",
        )


def _headers(attempt: Attempt) -> dict[str, str]:
    """The key is the same for each attempt of one end, so that a receiver may count it once."""
    return {
        "User-Agent": f"ntx-batch/{__version__}",
        "Idempotency-Key": f"{attempt.job_id}-{attempt.event}-{attempt.num_ends}",
    }


def main() -> int:
    """Make the attempt that the runner has noted; the exit status is 1 where that cannot be."""
    parser = argparse.ArgumentParser(prog="python -m ntx_batch.hook_delivery")
    parser.add_argument("--home", type=Path)
    parser.add_argument("--hook", type=int, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    home = Home.open(options.home)
    try:
        with JobStore(home.state_path) as jobs:
            store = HookStore(jobs)
            attempt = store.attempt(options.hook)
            if attempt is None:
                return 0  # the job has ended anew, or was removed
            # The last bound, of an answer that comes byte by byte.
            signal.setitimer(signal.ITIMER_REAL, 2 * timeout_s(attempt.target))
            Delivery(home, store, attempt).make()
    except JobError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
