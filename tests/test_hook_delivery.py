"""Telling of a job's end for real: commands, an HTTP server, a runner that is killed."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from jobs.dataset import build_manifest
from jobs.home import Home
from jobs.hook_store import Attempt, HookStore, Outcome
from jobs.hook_watch import start_delivery
from jobs.records import Hook, HookTarget, Job, JobSpec
from jobs.store import JobStore
from ntx_batch import hook_delivery
from tests.cli_helpers import ROOT
from tests.hook_helpers import end_job, hook_of, job_with_hooks, receiving
from tests.job_factories import write_input
from tests.runner_helpers import MODEL, SMALL_ENGINE, wait_until


def tell(home: Home, store: JobStore, target: HookTarget, state: Any = "completed") -> Job:
    """End a job and make one attempt to tell of it, in a process as the runner starts it."""
    job = job_with_hooks(store, finish=target)
    end_job(store, job, state)
    (hook_id,) = HookStore(store).due()
    attempt = HookStore(store).begin(hook_id)
    assert attempt is not None
    delivery = start_delivery(home, attempt)
    wait_until(lambda: delivery.poll() is not None)
    return store.job(job.id)


def shell(script: str, tmp_path: Path, *arguments: str) -> HookTarget:
    return HookTarget(argv=("/bin/sh", "-c", script, "sh", *arguments), cwd=str(tmp_path))


# ---- commands ----------------------------------------------------------------------------


def test_a_command_gets_the_status_on_its_input_and_says_things_in_the_log(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    script = 'cat > "$1"; echo "told of $NTX_JOB $NTX_EVENT in $NTX_HOME"; pwd'
    job = tell(home, store, shell(script, tmp_path, "got it.json"))
    got = json.loads((tmp_path / "got it.json").read_text())
    assert (got["job"], got["state"], got["exit_code"]) == (job.id, "completed", 0)
    assert got["hooks"][0]["state"] == "running"
    log = home.job_log_path(job.id).read_text()
    assert log == f"told of {job.id} finish in {home.path}\n{tmp_path}\n"
    hook = hook_of(store, job)
    assert (hook.state, hook.exit_status, hook.error) == ("delivered", 0, None)


def test_a_command_that_fails_changes_nothing_of_the_job_and_is_not_run_again(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    script = "echo cannot reach http://user:pw@host/secret >&2; exit 3"
    job = tell(home, store, shell(script, tmp_path))
    hook = hook_of(store, job)
    assert (hook.state, hook.exit_status) == ("failed", 3)
    assert hook.error == "exit status 3: cannot reach http://host/…"
    assert job.state == "completed"


def test_a_command_need_not_read_its_input(tmp_path: Path) -> None:
    target = shell("exec <&-; sleep 0.1; exit 0", tmp_path)
    attempt = Attempt(hook_id=1, job_id="j", event="finish", target=target, num_ends=1, number=1)
    with (tmp_path / "log").open("ab") as sink:
        outcome = hook_delivery.run_command(attempt, b"x" * 10_000_000, sink, 30.0)
    assert outcome == Outcome(exit_status=0)


def test_a_command_that_is_gone_is_an_error(home: Home, store: JobStore, tmp_path: Path) -> None:
    target = HookTarget(argv=("/no/such/program",), cwd=str(tmp_path))
    hook = hook_of(store, tell(home, store, target))
    assert hook.state == "failed"
    assert hook.error is not None and "cannot be run" in hook.error


def test_much_output_is_cut(home: Home, store: JobStore, tmp_path: Path) -> None:
    job = tell(home, store, shell("head -c 3000000 /dev/zero | tr '\\0' x; exit 1", tmp_path))
    assert home.job_log_path(job.id).stat().st_size == hook_delivery.MAX_OUTPUT_NBYTES
    error = hook_of(store, job).error
    assert error is not None and len(error) < 600


def test_a_command_over_its_time_is_killed_with_all_that_it_started(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    """The bound is the process's own: it holds where the runner is dead."""
    script = 'sleep 600 & echo $! > "$1"; sleep 600'
    job = job_with_hooks(store, finish=shell(script, tmp_path, "pid"))
    end_job(store, job)
    (hook_id,) = HookStore(store).due()
    assert HookStore(store).begin(hook_id) is not None
    short = "import jobs.hooks; jobs.hooks.COMMAND_TIMEOUT_S = 1.0; "
    code = f"{short}import sys; from ntx_batch.hook_delivery import main; sys.exit(main())"
    arguments = ["--home", str(home.path), "--hook", str(hook_id)]
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
        timeout=60,
    )
    assert ran.returncode == -9
    hook = hook_of(store, job)
    assert (hook.state, hook.error) == ("failed", "killed: it ran for more than 1 s")
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid), 10)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---- webhooks ----------------------------------------------------------------------------


def test_a_webhook_gets_the_status_as_json(home: Home, store: JobStore) -> None:
    with receiving() as receiver:
        job = tell(home, store, HookTarget(url=receiver.url(user="me:p%40ss@")), "failed")
    ((path, headers, body),) = receiver.posts
    assert path == "/hook?token=secret"
    assert (body["job"], body["state"]) == (job.id, "failed")
    assert headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == "Basic " + base64.b64encode(b"me:p@ss").decode()
    assert headers["Idempotency-Key"] == f"{job.id}-finish-1"
    assert headers["Host"] == f"127.0.0.1:{receiver.port}"
    hook = hook_of(store, job)
    assert (hook.state, hook.exit_status) == ("delivered", 204)
    assert "secret" not in json.dumps(body["hooks"])


@pytest.mark.parametrize("status", [302, 404, 500])
def test_any_other_answer_is_tried_again(home: Home, store: JobStore, status: int) -> None:
    with receiving([status]) as receiver:
        job = tell(home, store, HookTarget(url=receiver.url()))
        assert len(receiver.posts) == 1
    hook = hook_of(store, job)
    assert (hook.state, hook.exit_status) == ("due", status)
    assert hook.error is not None and hook.error.startswith(f"answered {status}")


def test_nobody_there_is_tried_again_and_says_no_secret(home: Home, store: JobStore) -> None:
    with receiving() as receiver:
        url = receiver.url()
    hook = hook_of(store, tell(home, store, HookTarget(url=url)))
    assert hook.state == "due"
    assert hook.error is not None and "refused" in hook.error and "secret" not in hook.error


# ---- through a runner --------------------------------------------------------------------


def queue(store: JobStore, folder: Path, target: HookTarget) -> Job:
    path = write_input(folder / "in.parquet", {"prompt": ["a", "b", "c"]})
    spec = JobSpec(input=str(path), model=str(MODEL), engine=SMALL_ENGINE)
    return store.create_job(spec, build_manifest(str(path)), {}, hooks={"finish": target})


def run_runner(home: Home, *dies: str) -> int:
    """Run a runner until it has nothing to do, or kills itself; its exit status."""
    return subprocess.run(
        [sys.executable, "-m", "tests.hook_runner", str(home.path), *dies],
        cwd=ROOT,
        env=os.environ | {"NTX_HOME": str(home.path)},
        timeout=120,
        capture_output=True,
    ).returncode


def test_a_runner_killed_before_it_tells_is_followed_by_one_that_does(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    with receiving() as receiver:
        job = queue(store, tmp_path, HookTarget(url=receiver.url()))
        assert run_runner(home, "before") == -9
        assert store.job(job.id).state == "completed"
        assert receiver.posts == [] and hook_of(store, job).state == "running"
        make_due(store, job)
        assert run_runner(home) == 0
    assert [body["job"] for _, _, body in receiver.posts] == [job.id]
    hook = hook_of(store, job)
    assert (hook.state, hook.num_attempts) == ("delivered", 2)
    assert store.job(job.id).state == "completed"


def make_due(store: JobStore, job: Job) -> None:
    """Give up the attempt that a dead runner noted, and let no time pass until the next."""
    later = HookStore(store, lambda: time.time() - 3600)
    (attempt,) = later.running()
    later.end(attempt, Outcome(error="lost", may_retry=True))


def test_a_runner_killed_while_it_tells_leaves_that_to_its_end(
    home: Home, store: JobStore, tmp_path: Path
) -> None:
    with receiving() as receiver:
        job = queue(store, tmp_path, HookTarget(url=receiver.url()))
        assert run_runner(home, "after") == -9
        wait_until(lambda: hook_of(store, job).state == "delivered")
        assert run_runner(home) == 0
    assert len(receiver.posts) == 1


def test_a_slow_hook_keeps_no_job_waiting(home: Home, store: JobStore, tmp_path: Path) -> None:
    first = queue(store, tmp_path / "1", shell("sleep 3", tmp_path))
    second = queue(store, tmp_path / "2", shell('touch "$1"', tmp_path, "second"))
    started = time.time()
    assert run_runner(home) == 0
    jobs = [store.job(job.id) for job in (first, second)]
    assert {job.state for job in jobs} == {"completed"}
    ended = jobs[1].finished_at
    assert ended is not None and ended < told(hook_of(store, first)) + 3
    assert all(hook_of(store, job).state == "delivered" for job in jobs)
    assert (tmp_path / "second").exists() and started < ended


def told(hook: Hook) -> float:
    assert hook.tried_at is not None
    return hook.tried_at
