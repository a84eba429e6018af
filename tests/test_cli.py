"""The command line: what goes where, what is refused how, and exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.control import runner_status, stop_runner
from jobs.home import Home
from jobs.records import Job, JobRequest
from jobs.store import JobStore
from ntx_batch.preflight import check_job
from ntx_batch.spec import build_spec
from tests.cli_helpers import (
    MODEL,
    ROOT,
    Ran,
    queue_job,
    run_here,
    run_process,
    started_process,
    write_prompts,
)
from tests.gguf_factory import write_tiny_model
from tests.golden import GOLDEN
from tests.job_factories import bad_row, finish_rows, ok_row
from tests.runner_helpers import make_home, wait_until

STATUS_KEYS = {
    "job",
    "state",
    "total",
    "ok",
    "error",
    "cancelled",
    "remaining",
    "tokens_per_s",
    "prompt_tokens_per_s",
    "eta_s",
    "exit_code",
    "created_at",
    "started_at",
    "finished_at",
    "reason",
    "key",
    "retry_of",
    "schedule",
    "run",
}

Command = Callable[..., Ran]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NTX_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def ntx(home: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return lambda *arguments: run_here(capsys, *arguments)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.parquet", ["one", "two", "three"], id=[7, 8, 9])


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a state folder `home`, whose runner is stopped in the end."""
    folder = tmp_path_factory.mktemp("cli")
    home = make_home(folder / "home")
    yield folder
    stop_runner(home)


# ---- without a runner ----------------------------------------------------------------------


def test_help_starts_without_ray_or_numba() -> None:
    code = "import sys, ntx_batch.cli, ntx_batch.preflight; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"ray", "numba", "cupy"} & {name.split(".")[0] for name in done.stdout.split()}


def test_version(ntx: Command) -> None:
    assert ntx("--version").out.startswith("ntx-batch 0.")


def test_an_unknown_job_is_usage_and_says_what_to_do(ntx: Command) -> None:
    for arguments in (("status", "zz"), ("wait", "zz"), ("results", "zz"), ("logs", "zz")):
        ran = ntx(*arguments)
        assert (ran.code, ran.out) == (2, "")
        assert "there is no job 'zz'; `ntx-batch list` shows all" in ran.err


def test_status_without_jobs_says_so(ntx: Command) -> None:
    ran = ntx("status")
    assert ran.code == 2
    assert "there are no jobs yet" in ran.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "1MiB"], "the smallest that works here is"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--chat"], "has no chat template"),
        (["--prompt-column", "promt"], "no column promt; did you mean prompt?"),
        (["--prompt-template", "{% if %}"], "line 1"),
        (["--prompt-template", "a\nb {{ id"], "line 2"),
        (["--prompt-template", "{{ nowhere }}"], "nowhere"),
        (["--template-kwargs", "{}x"], "template_kwargs is not JSON"),
        (["--param-columns", "temperature"], "temperature"),
        (["--keep", "idd"], "did you mean id?"),
        (["--stop-token-ids", "99999"], "stop_token_ids"),
    ],
)
def test_submit_refuses_before_it_queues(
    ntx: Command, prompts: Path, options: list[str], message: str
) -> None:
    ran = ntx("submit", prompts, "--model", MODEL, *options)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert "Traceback" not in ran.err
    assert json.loads(ntx("list", "--json").out) == []


def test_submit_refuses_an_input_that_is_none(ntx: Command, tmp_path: Path) -> None:
    ran = ntx("submit", tmp_path / "nowhere.parquet", "--model", MODEL)
    assert ran.code == 2
    assert "nowhere.parquet" in ran.err


def test_an_unknown_pre_tokenizer_is_refused_unless_forced(
    ntx: Command, tmp_path: Path, prompts: Path
) -> None:
    """Case 49: the name is checked at submit; `inspect` shows the ids that a forced one gives."""
    names = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "foo"}
    model = write_tiny_model(tmp_path / "foo.gguf", metadata=names).path
    ran = ntx("submit", prompts, "--model", model)
    assert ran.code == 2
    assert "pre-tokenizer 'foo'" in ran.err
    ran = ntx("submit", prompts, "--model", model, "--pre-tokenizer", "fooo")
    assert "pre-tokenizer 'fooo'" in ran.err


def test_a_broken_chat_template_fails_only_jobs_that_use_it(
    ntx: Command, tmp_path: Path, prompts: Path
) -> None:
    """Case 47: refused at submit with the line, where the job needs it."""
    broken = {"tokenizer.chat_template": "{% for m in messages %}\n{{ m.content\n{% endfor %}"}
    model = write_tiny_model(tmp_path / "broken.gguf", metadata=broken).path
    ran = ntx("submit", prompts, "--model", model, "--chat")
    assert ran.code == 2
    assert "line 3" in ran.err
    assert check_job(build_spec(prompts, model=model)).manifest.num_rows == 3


def test_what_was_bound_is_said(tmp_path: Path, prompts: Path) -> None:
    template = {"tokenizer.chat_template": "{{ messages[0].content }}"}
    model = write_tiny_model(tmp_path / "chat.gguf", metadata=template).path
    write_prompts(prompts, ["a", "b"], temperature=[0.5, None])
    spec = build_spec(prompts, model=model, param_columns="temperature", limit=1)
    first, second, third = check_job(spec).notes
    assert first == "1 rows of 1 file; prompts from column prompt"
    assert second == "set for each row: temperature"
    assert "--chat wraps each prompt in it" in third
    assert len(check_job(build_spec(prompts, model=model, chat=True)).notes) == 1


# ---- jobs whose rows are there, without an engine ------------------------------------------


@pytest.fixture
def job(home: Path, prompts: Path) -> Job:
    """A running job with rows 0 and 2 finished, the latter with an error."""
    queued = queue_job(home, prompts)
    with JobStore(Home.open(home).state_path) as store:
        store.claim_job()
        store.set_total(queued.id, 3)
        rows = [bad_row(2, "empty_prompt", "the prompt is empty"), ok_row(0, "un")]
        store.commit_batch(queued.id, finish_rows(queued, rows))
        return store.job(queued.id)


def test_status_json_is_pure_and_adds_up(ntx: Command, job: Job) -> None:
    """Case 74: nothing but JSON on stdout."""
    ran = ntx("status", job.id[:6], "--json")
    status = json.loads(ran.out)
    assert (ran.code, ran.err) == (0, "")
    assert set(status) >= STATUS_KEYS
    assert (status["job"], status["state"], status["exit_code"]) == (job.id, "running", None)
    assert status["ok"] + status["error"] + status["cancelled"] + status["remaining"] == 3
    assert json.loads(ntx("status", "--json").out)["job"] == job.id
    assert [found["job"] for found in json.loads(ntx("list", "--json").out)] == [job.id]


def test_status_and_list_show_people_the_counts(ntx: Command, job: Job) -> None:
    assert "1 ok, 1 failed of 3" in ntx("status").out
    assert job.id in ntx("list").out


def test_results_are_in_input_order_while_the_job_runs(ntx: Command, job: Job) -> None:
    ran = ntx("results", job.id)
    assert (ran.code, ran.err) == (0, "")
    rows = [line for line in ran.out.splitlines() if "│" in line]
    assert "un" in rows[0] and "7" in rows[0]
    assert "empty_prompt" in rows[1] and "9" in rows[1]


def test_failed_rows_alone(ntx: Command, job: Job) -> None:
    out = ntx("results", job.id, "--errors").out
    assert "empty_prompt" in out and "the prompt is empty" in out
    assert "un" not in out.split()


@pytest.mark.parametrize("name", ["answers.parquet", "answers.jsonl", "answers.csv"])
def test_results_to_a_file(ntx: Command, job: Job, tmp_path: Path, name: str) -> None:
    ran = ntx("results", job.id, "-o", tmp_path / name)
    assert (ran.code, ran.out) == (0, "")
    assert f"wrote 2 rows to {tmp_path / name}" in ran.err
    assert (tmp_path / name).stat().st_size > 0


def test_results_head_counts_rows(ntx: Command, job: Job, tmp_path: Path) -> None:
    ntx("results", job.id, "-o", tmp_path / "one.parquet", "--head", "1")
    assert pq.read_table(tmp_path / "one.parquet").column("row_index").to_pylist() == [0]


def test_a_file_of_an_unknown_kind_is_refused(ntx: Command, job: Job, tmp_path: Path) -> None:
    ran = ntx("results", job.id, "-o", tmp_path / "answers.xls")
    assert ran.code == 2
    assert ".jsonl" in ran.err


@pytest.mark.parametrize(("request_", "code"), [("cancel", 4), ("pause", 5)])
def test_waiting_says_how_a_job_ended(
    ntx: Command, home: Path, prompts: Path, request_: JobRequest, code: int
) -> None:
    """Case 14: cancelled and paused have exit codes of their own."""
    job = queue_job(home, prompts)
    with JobStore(Home.open(home).state_path) as store:
        store.set_request(job.id, request_)
    assert ntx("wait", job.id).code == code
    assert ntx("status", job.id).code == 0


def test_wait_gives_up_after_its_timeout(ntx: Command, home: Path, prompts: Path) -> None:
    job = queue_job(home, prompts)
    ran = ntx("wait", job.id, "--timeout", "0.3")
    assert (ran.code, ran.out) == (124, "")
    assert f"job {job.id} is still queued after 0.3 s" in ran.err


def test_interrupting_a_wait_leaves_the_job(home: Path, prompts: Path) -> None:
    job = queue_job(home, prompts)
    with started_process(home, "watch", job.id) as process:
        assert process.stderr is not None
        assert "queued" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert f"job {job.id} goes on" in err
    with JobStore(Home.open(home).state_path) as store:
        assert store.job(job.id).state == "queued"


def test_runner_status_without_one(ntx: Command) -> None:
    status = json.loads(ntx("runner", "status", "--json").out)
    assert (status["pid"], status["state"]) == (None, "absent")
    assert "no runner to stop" in ntx("runner", "stop").err


# ---- model files ---------------------------------------------------------------------------


def test_inspect_shows_layers_types_and_metadata(ntx: Command) -> None:
    out = ntx("inspect", GOLDEN / "llama-q4_k_m.gguf").out
    assert "layer 0" in out and "Q4_K" in out and "Q6_K" in out
    assert "llama.rope.freq_base" in out
    assert "this version can run it" in out


def test_inspect_json(ntx: Command) -> None:
    found = json.loads(ntx("inspect", GOLDEN / "llama-q4_0.gguf", "--json").out)
    assert found["architecture"] == "llama"
    assert sum(found["types"].values()) == found["nbytes"]
    assert found["metadata"]["llama.block_count"] == 2
    assert sum(layer["tensors"] for layer in found["layers"]) == len(found["tensors"])


def test_inspect_shows_a_model_that_cannot_run(ntx: Command, tmp_path: Path) -> None:
    model = tmp_path / "foo.gguf"
    data = (GOLDEN / "llama-q4_0.gguf").read_bytes()
    model.write_bytes(data.replace(b"llama", b"foooo"))
    ran = ntx("inspect", model)
    assert ran.code == 0
    assert "foooo" in ran.out.split("problem")[1]


def test_inspect_tokenize_shows_bos_once(ntx: Command) -> None:
    """Case 4: the ids that a prompt gets, BOS by the model's rule."""
    model = GOLDEN / "llama-q4_0.gguf"
    found = json.loads(ntx("inspect", model, "--tokenize", "hi <s>", "--json").out)
    assert found["ids"].count(found["bos_id"]) == 1
    assert found["ids"][0] == found["bos_id"]
    lines = ntx("inspect", model, "--tokenize", "hi <s>").out.splitlines()
    assert [int(line.split("\t")[0]) for line in lines] == found["ids"]


@pytest.mark.parametrize("name", ["README.md", "nowhere.gguf"])
def test_a_model_that_is_none_is_usage_wherever_it_is_named(
    ntx: Command, prompts: Path, name: str
) -> None:
    said = "not a GGUF file" if (ROOT / name).exists() else "nowhere.gguf"
    for arguments in (("inspect", ROOT / name), ("submit", prompts, "--model", ROOT / name)):
        ran = ntx(*arguments)
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.err


# ---- the whole path ------------------------------------------------------------------------


def submit(work: Path, name: str, prompts: list[str | None], *options: str | Path) -> Ran:
    path = write_prompts(work / f"{name}.parquet", prompts)
    return run_process(work / "home", "submit", path, "--model", MODEL, *options, "--wait")


def test_exit_codes_tell_outcomes_apart(work: Path) -> None:
    """Case 14: all rows ok, some failed, all failed, and a model that does not load."""
    fine = submit(work, "fine", ["one", "two"], "--max-tokens", "4")
    some = submit(work, "some", ["one", "", None], "--max-tokens", "4")
    none = submit(work, "none", ["", None])
    load = submit(work, "load", ["one"], "--kv-memory", "1B")
    assert [ran.code for ran in (fine, some, none, load)] == [0, 3, 1, 1]
    states = []
    for ran in (fine, some, none, load):
        job_id = ran.out.strip()
        assert ran.out == f"{job_id}\n"
        shown = run_process(work / "home", "status", job_id, "--json")
        states.append((json.loads(shown.out)["state"], json.loads(shown.out)["exit_code"]))
    assert states == [("completed", 0), ("completed", 3), ("failed", 1), ("failed", 1)]
    assert "KV cache" in load.err


def test_a_job_leaves_a_log(work: Path) -> None:
    job_id = submit(work, "logged", ["one"], "--max-tokens", "2").out.strip()
    assert job_id in run_process(work / "home", "logs", job_id).out


def test_submit_answers_at_once_and_the_second_queues(work: Path) -> None:
    prompts = write_prompts(work / "many.parquet", [f"{row} " + "word " * 20 for row in range(64)])
    arguments = ("submit", prompts, "--model", MODEL, "--max-tokens", "64", "--ignore-eos")
    jobs = [run_process(work / "home", *arguments).out.strip() for _ in range(2)]
    ran = run_process(work / "home", "wait", jobs[1])
    assert ran.code == 0
    first, second = (
        json.loads(run_process(work / "home", "status", job, "--json").out) for job in jobs
    )
    assert first["finished_at"] <= second["started_at"]


@contextmanager
def long_run(work: Path, name: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A `run` with some rows finished and many to go: its job's id, and the process."""
    prompts = write_prompts(work / f"{name}.parquet", [f"word {row}" for row in range(2000)])
    arguments = (prompts, "--model", MODEL, "--max-tokens", "200", "--ignore-eos")
    with started_process(work / "home", "run", *arguments) as process:
        assert process.stdout is not None
        job_id = process.stdout.readline().strip()
        wait_for_rows(work / "home", job_id)
        yield job_id, process


def test_interrupting_run_pauses_the_job_and_keeps_its_rows(work: Path) -> None:
    with long_run(work, "once") as (job_id, process):
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    with JobStore(Home.open(work / "home").state_path) as store:
        job = store.job(job_id)
        assert job.state == "paused"
        assert len(store.done_keys(job_id)) == job.num_ok > 0
    kept = f"job {job_id} paused; its {job.num_ok} finished rows are kept; go on with"
    assert f"{kept} `ntx-batch resume {job_id}`" in err


@pytest.mark.parametrize("apart_s", [0.0, 0.02])
def test_interrupting_run_twice_pauses_the_job_too(work: Path, apart_s: float) -> None:
    with long_run(work, f"twice {apart_s}") as (job_id, process):
        process.send_signal(signal.SIGINT)
        time.sleep(apart_s)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"go on with `ntx-batch resume {job_id}`" in err
    with JobStore(Home.open(work / "home").state_path) as store:
        wait_until(lambda: store.job(job_id).state != "running")
        assert store.job(job_id).state == "paused"


def wait_for_rows(home: Path, job_id: str) -> None:
    deadline = time.monotonic() + 120
    with JobStore(Home.open(home).state_path) as store:
        while not store.job(job_id).num_ok:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_the_runner_stops_and_starts(work: Path) -> None:
    home = work / "home"
    assert run_process(home, "runner", "start").code == 0
    pid = json.loads(run_process(home, "runner", "status", "--json").out)["pid"]
    assert pid == runner_status(Home.open(home)).pid
    assert run_process(home, "runner", "stop").code == 0
    assert runner_status(Home.open(home)).state == "absent"
