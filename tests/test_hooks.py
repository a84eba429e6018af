"""Who is told of a job's end: what people write, what is shown of it, what the store keeps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.hook_store import Attempt, HookStore, Outcome
from jobs.hook_watch import HookWatch
from jobs.hooks import RETRY_DELAYS_S, parse_hook, retry_delay_s, shown_target, shown_text
from jobs.processes import ProcessId
from jobs.records import HookTarget, Manifest, SpecError
from jobs.store import JobStore
from ntx_batch.submission import read_submission
from tests.cli_helpers import MODEL
from tests.hook_helpers import end_job, hook_of, job_with_hooks
from tests.job_factories import make_spec
from tests.runner_helpers import make_home

PLACE = HookTarget(url="https://user:pw@hooks.example.com:8443/T0/secret?token=x#y")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with JobStore(tmp_path / "state.sqlite") as store:
        yield store


# ---- what people write -------------------------------------------------------------------


def test_a_command_is_split_as_a_shell_would_and_its_program_is_found(tmp_path: Path) -> None:
    program = tmp_path / "tell"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    target = parse_hook("on_finish", "./tell 'two words' $HOME ; x", cwd=tmp_path)
    assert target.argv == (str(program), "two words", "$HOME", ";", "x")
    assert target.cwd == str(tmp_path)
    assert os.path.isabs(parse_hook("on_finish", "true").argv[0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is a command, or an http"),
        ("   ", "is a command, or an http"),
        ("tell 'open", "No closing quotation"),
        ("no-such-program-anywhere x", r"no program 'no-such-program-anywhere' in \$PATH"),
        ("./absent", "no program './absent' in /"),
        ("ftp://host/x", "is no http:// or https:// URL"),
        ("https:///x", "is no http:// or https:// URL"),
        ("http://host:99999/x", "is no http:// or https:// URL"),
        ("http://host/a b", "is no http:// or https:// URL"),
    ],
)
def test_what_cannot_be_run_or_reached_is_refused_at_submit(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        read_submission("a.parquet", {"model": str(MODEL), "on_failure": text})


def test_a_refusal_shows_no_secret() -> None:
    with pytest.raises(SpecError) as refused:
        parse_hook("on_finish", "ftp://user:pw@host/secret?token=x")
    assert not any(word in str(refused.value) for word in ("user", "pw", "secret", "token"))


def test_hooks_of_a_job_file_are_relative_to_it(tmp_path: Path) -> None:
    program = tmp_path / "tell.sh"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    file = tmp_path / "job.toml"
    file.write_text(
        f'input = "a.parquet"\nmodel = "{MODEL}"\npriority = 3\n'
        'on_finish = "./tell.sh done"\non_failure = "https://host/x"\n'
    )
    submission = read_submission(file, {})
    command, place = submission.hooks["finish"], submission.hooks["failure"]
    assert (command.argv, command.cwd) == ((str(program), "done"), str(tmp_path))
    assert (place.url, submission.priority) == ("https://host/x", 3)


# ---- what is shown -----------------------------------------------------------------------


def test_of_a_url_only_the_host_is_shown() -> None:
    assert shown_target(PLACE) == "https://hooks.example.com:8443/…"
    assert shown_target(HookTarget(url="http://host")) == "http://host"
    argv = ("/bin/curl", "-d", "x y", "http://u:p@host/secret?t=1", "-o", "f")
    assert shown_target(HookTarget(argv=argv)) == "/bin/curl -d 'x y' 'http://host/…' -o f"


@given(st.text("abcdefgXYZ0189._~-", min_size=12, max_size=20), st.sampled_from("/?#@"))
def test_no_secret_of_a_url_is_ever_shown(secret: str, where: str) -> None:
    url = f"https://{secret}@host/x" if where == "@" else f"https://host/a{where}{secret}"
    assert secret not in shown_text(f"cannot reach {url}: refused")
    assert "host" in shown_text(url)


# ---- when it is due ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "due"),
    [("completed", {"finish"}), ("failed", {"finish", "failure"}), ("cancelled", {"finish"})],
)
def test_an_end_makes_its_hooks_due(store: JobStore, state: Any, due: set[str]) -> None:
    job = job_with_hooks(store, finish=PLACE, failure=PLACE)
    assert HookStore(store).due() == []
    end_job(store, job, state)
    hooks = store.job(job.id).hooks
    assert {hook.event for hook in hooks if hook.state == "due"} == due
    assert {hook.event for hook in hooks if hook.state == "idle"} == {"finish", "failure"} - due


def test_a_pause_is_no_end(store: JobStore) -> None:
    job = job_with_hooks(store, finish=PLACE)
    end_job(store, job, "paused")
    assert not HookStore(store).are_open()


def test_a_chain_that_stops_tells_of_each_of_its_jobs(store: JobStore) -> None:
    first = job_with_hooks(store)
    spec, hooks = make_spec(after=first.id), {"failure": PLACE}
    second = store.create_job(spec, Manifest(files=()), {}, hooks=hooks)  # type: ignore[arg-type]
    store.set_request(first.id, "cancel")
    assert store.job(second.id).state == "failed"
    assert hook_of(store, second).state == "due"


def test_a_job_that_goes_on_before_it_was_told_has_not_ended(store: JobStore) -> None:
    job = job_with_hooks(store, finish=PLACE)
    end_job(store, job, "failed")
    store.set_state(job.id, "queued")
    assert hook_of(store, job).state == "idle"
    end_job(store, job, "completed")
    assert hook_of(store, job).state == "due"


def begin(store: JobStore) -> Attempt:
    hooks = HookStore(store)
    (hook_id,) = hooks.due()
    attempt = hooks.begin(hook_id)
    assert attempt is not None
    return attempt


def test_what_came_of_an_attempt_is_kept(store: JobStore) -> None:
    job = job_with_hooks(store, finish=PLACE)
    end_job(store, job)
    attempt = begin(store)
    assert (attempt.target, attempt.number, attempt.num_ends) == (PLACE, 1, 1)
    assert hook_of(store, job).state == "running"
    HookStore(store).end(attempt, Outcome(exit_status=200))
    hook = hook_of(store, job)
    assert (hook.state, hook.num_attempts, hook.exit_status) == ("delivered", 1, 200)
    assert store.job(job.id).state == "completed"
    assert not HookStore(store).are_open()


def test_an_attempt_that_may_help_is_made_again_after_a_while_and_given_up_in_the_end(
    store: JobStore,
) -> None:
    job = job_with_hooks(store, finish=PLACE)
    end_job(store, job)
    now = 1000.0
    hooks = HookStore(store, lambda: now)
    for delay_s in RETRY_DELAYS_S:
        (hook_id,) = hooks.due()
        attempt = hooks.begin(hook_id)
        assert attempt is not None
        hooks.end(attempt, Outcome(exit_status=503, error="answered 503", may_retry=True))
        now += delay_s - 0.01
        assert hooks.due() == []
        now += 0.02
    (hook_id,) = hooks.due()
    attempt = hooks.begin(hook_id)
    assert attempt is not None
    hooks.end(attempt, Outcome(exit_status=503, error="answered 503", may_retry=True))
    hook = hook_of(store, job)
    assert (hook.state, hook.num_attempts, hook.error) == ("failed", 5, "answered 503")


def test_delays_grow_and_end() -> None:
    assert [retry_delay_s(number) for number in range(1, 7)] == [
        5.0,
        30.0,
        120.0,
        600.0,
        None,
        None,
    ]


def test_what_came_of_an_earlier_end_says_nothing_of_a_later_one(store: JobStore) -> None:
    job = job_with_hooks(store, finish=PLACE)
    end_job(store, job, "failed")
    attempt = begin(store)
    store.set_state(job.id, "queued")
    end_job(store, job, "completed")
    HookStore(store).end(attempt, Outcome(exit_status=200))
    assert hook_of(store, job).state == "due"
    assert begin(store).num_ends == 2


def test_an_attempt_that_failed_is_not_made_again_for_a_job_that_goes_on(store: JobStore) -> None:
    job = job_with_hooks(store, finish=PLACE)
    end_job(store, job, "failed")
    attempt = begin(store)
    store.set_state(job.id, "queued")
    HookStore(store).end(attempt, Outcome(error="no answer", may_retry=True))
    assert hook_of(store, job).state == "idle"


def test_only_one_of_two_begins_an_attempt(store: JobStore) -> None:
    end_job(store, job_with_hooks(store, finish=PLACE))
    (hook_id,) = HookStore(store).due()
    assert HookStore(store).begin(hook_id) is not None
    assert HookStore(store).begin(hook_id) is None


def test_a_runner_stays_while_there_is_somebody_to_tell(store: JobStore) -> None:
    job = job_with_hooks(store, finish=PLACE)
    store.set_runner(pid=1, pid_start_time=1.0, boot_id="b", host="h", environment={})
    end_job(store, job)
    assert not store.stop_if_idle()
    HookStore(store).end(begin(store), Outcome(error="exit status 1"))
    assert store.stop_if_idle()


# ---- the runner's eye on it --------------------------------------------------------------


class Sleeper:
    """A delivery that is at it until told otherwise. pid: of no group"""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.pid = 2**22 + 1
        self.status: int | None = None

    def poll(self) -> int | None:
        return self.status


def watch_of(store: JobStore, tmp_path: Path) -> tuple[HookWatch, list[Sleeper]]:
    started: list[Sleeper] = []

    def start(_: object, attempt: Attempt) -> Sleeper:
        started.append(Sleeper(attempt))
        return started[-1]

    home = make_home(tmp_path / "home")
    return HookWatch(home, store, start=start, look_interval_s=0.0), started


def test_a_few_hooks_are_told_at_once_and_the_others_after_them(
    store: JobStore, tmp_path: Path
) -> None:
    for _ in range(6):
        end_job(store, job_with_hooks(store, finish=PLACE))
    watch, started = watch_of(store, tmp_path)
    watch.serve()
    watch.serve()
    assert len(started) == 4
    HookStore(store).end(started[0].attempt, Outcome(exit_status=200))
    started[0].status = 0
    watch.serve()
    assert len(started) == 5


def test_a_process_that_ends_without_a_word_is_no_delivery(store: JobStore, tmp_path: Path) -> None:
    job = job_with_hooks(store, finish=PLACE)
    end_job(store, job)
    watch, started = watch_of(store, tmp_path)
    watch.serve()
    started[0].status = -9
    watch.serve()
    hook = hook_of(store, job)
    assert hook.state == "due"
    assert hook.error == "its process ended before it could say how it went"


def test_an_attempt_of_an_earlier_runner_that_lives_is_waited_for(
    store: JobStore, tmp_path: Path
) -> None:
    job = job_with_hooks(store, finish=PLACE)
    end_job(store, job)
    attempt = begin(store)
    HookStore(store).set_process(attempt, ProcessId.current())
    watch, started = watch_of(store, tmp_path)
    watch.serve()
    assert not started and hook_of(store, job).state == "running"


def test_an_attempt_that_no_process_makes_is_made_again(store: JobStore, tmp_path: Path) -> None:
    job = job_with_hooks(store, finish=PLACE)
    end_job(store, job)
    begin(store)
    watch, _ = watch_of(store, tmp_path)
    watch.serve()
    hook = hook_of(store, job)
    assert (hook.state, hook.num_attempts) == ("due", 1)
