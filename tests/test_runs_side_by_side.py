"""Two runs at once in two state folders, from a folder with large files, with devices hidden."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from jobs.control import stop_runner
from jobs.home import Home
from jobs.records import Job
from jobs.store import JobStore
from tests.cli_helpers import MODEL, run_process, started_process, write_prompts
from tests.runner_helpers import make_home

NUM_ROWS = 50


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[list[Home]]:
    homes = [make_home(tmp_path / name) for name in ("one", "two")]
    yield homes
    for home in homes:
        stop_runner(home)


def only_job(home: Home) -> Job:
    with JobStore(home.state_path) as store:
        (job,) = store.list_jobs()
        return job


def temp_nbytes(home: Home) -> int:
    files = [path for path in Path("/tmp").glob(f"ntx-{home.key}-*/**/*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


@pytest.mark.slow
def test_two_runs_at_once_do_not_disturb_each_other(
    homes: list[Home], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases 65, 67 (GPUs are hidden, or named twice), 74 and 76.

    Both finish; stdout holds the id and nothing of Ray's; the record says which device computed;
    the folder that the commands run in is not packed and sent anywhere.
    """
    folder = tmp_path / "cwd"
    (folder / ".git").mkdir(parents=True)
    for name in ("model.gguf", ".git/pack"):
        with (folder / name).open("wb") as file:
            file.truncate(4 << 30)
    prompts = write_prompts(folder / "in.parquet", [f"p{row}" for row in range(NUM_ROWS)])
    arguments = ("run", prompts, "--model", MODEL, "--max-tokens", "8")
    with ExitStack() as stack:
        running = []
        for home, visible in zip(homes, ("", "0,0"), strict=True):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            running.append(stack.enter_context(started_process(home.path, *arguments, cwd=folder)))
        ended = [process.communicate(timeout=120) for process in running]
    for home, process, (out, err) in zip(homes, running, ended, strict=True):
        job = only_job(home)
        assert process.returncode == 0, err
        assert (job.num_ok, job.record["device"]) == (NUM_ROWS, "cpu")
        assert job.record["device_reason"].startswith("no GPU can be used: ")
        assert out == f"{job.id}\n"
        assert "EngineActor" not in err
        assert temp_nbytes(home) < 20 << 20
        shown = run_process(home.path, "status", "--json")
        assert json.loads(shown.out)["job"] == job.id
        assert shown.err == ""
        said = run_process(home.path, "status").out
        assert f"cpu ({job.record['device_reason']})" in said
    hidden, twice = (only_job(home).record for home in homes)
    assert "CUDA_VISIBLE_DEVICES='' hides every GPU" in hidden["device_reason"]
    assert (hidden["cuda_visible_devices"], twice["cuda_visible_devices"]) == ("", "0")
    texts = [run_process(h.path, "results", only_job(h).id, "--head", "50").out for h in homes]
    assert texts[0] == texts[1]


def test_a_gpu_that_is_asked_for_and_not_there_is_no_cpu(
    homes: list[Home], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 67: no quiet fall-back; it is refused before anything is queued."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    prompts = write_prompts(tmp_path / "in.parquet", ["a"])
    ran = run_process(homes[0].path, "submit", prompts, "--model", MODEL, "--device", "gpu")
    assert (ran.code, ran.out) == (2, "")
    assert "--device gpu: CUDA_VISIBLE_DEVICES='' hides every GPU" in ran.err
    with JobStore(homes[0].state_path) as store:
        assert store.list_jobs() == []


def test_a_memory_limit_that_cannot_work_is_refused_with_what_would(
    homes: list[Home], tmp_path: Path
) -> None:
    """Case 77: said before anything is queued."""
    prompts = write_prompts(tmp_path / "in.parquet", ["a"])
    ran = run_process(homes[0].path, "submit", prompts, "--model", MODEL, "--memory", "1MiB")
    assert (ran.code, ran.out) == (2, "")
    assert "the smallest that works here is" in ran.err
    assert "raise --memory" in ran.err
    assert "Traceback" not in ran.err
