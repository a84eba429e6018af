"""A server that gets POSTs, and jobs whose end is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jobs.records import Hook, HookEvent, HookTarget, Job
from jobs.store import JobStore
from tests.job_factories import make_manifest, make_spec


@dataclass
class Receiver:
    """A server on this machine. answers: a status for each request, the last one for all others"""

    answers: list[int]
    port: int = 0
    posts: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)

    def url(self, path: str = "/hook?token=secret", user: str = "") -> str:
        return f"http://{user}127.0.0.1:{self.port}{path}"

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        self.posts.append((path, headers, json.loads(body)))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def receiving(answers: Sequence[int] = (204,)) -> Iterator[Receiver]:
    receiver = Receiver(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = receiver.take(self.path, dict(self.headers), body)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def job_with_hooks(store: JobStore, **hooks: HookTarget) -> Job:
    """A queued job without an input. hooks: `finish`, `failure`"""
    named: dict[HookEvent, HookTarget] = {
        event: target for event, target in hooks.items() if event in ("finish", "failure")
    }
    return store.create_job(make_spec(), make_manifest(), {}, hooks=named)


def end_job(store: JobStore, job: Job, state: Any = "completed") -> None:
    claimed = store.claim_job()
    assert claimed is not None and claimed.id == job.id
    store.set_state(job.id, state)


def hook_of(store: JobStore, job: Job) -> Hook:
    (hook,) = store.job(job.id).hooks
    return hook
