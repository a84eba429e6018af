"""A job on a GPU, from the command to its results: what the CPU says, up to rounding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from jobs.control import stop_runner
from jobs.home import Home
from jobs.records import Job
from jobs.results import read_results
from jobs.store import JobStore
from tests.cli_helpers import MODEL, run_process, write_prompts
from tests.runner_helpers import make_home

pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.slow]

NUM_ROWS = 40
MAX_ERROR = 3e-2  # of a logit, with half operands and a float16 KV cache
SAMPLING = ("--max-tokens", "12", "--ignore-eos", "--logprobs", "2")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = make_home(tmp_path / "home")
    yield home
    stop_runner(home)


def run_job(home: Home, prompts: Path, *arguments: str) -> tuple[Job, list[list[dict[str, Any]]]]:
    """The job, and of each row its tokens with their log-probabilities."""
    ran = run_process(home.path, "run", prompts, "--model", MODEL, *SAMPLING, *arguments)
    assert ran.code == 0, ran.err
    stop_runner(home)
    with JobStore(home.state_path) as store:
        job = store.list_jobs()[-1]
        table = read_results(store.finished(job.id))
    assert table.num_rows == NUM_ROWS
    return job, table["logprobs"].to_pylist()


def margin(token: dict[str, Any]) -> float:
    values = {other["token_id"]: other["logprob"] for other in (token, *token["top"])}
    first, second = sorted(values.values(), reverse=True)[:2]
    return float(first - second)


def same_so_far(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> int:
    pairs = zip(mine, theirs, strict=True)
    return len(list(takewhile(lambda pair: pair[0]["token_id"] == pair[1]["token_id"], pairs)))


def test_a_job_says_on_a_gpu_what_it_says_on_a_cpu(home: Home, tmp_path: Path) -> None:
    """Tokens are equal up to the first that is a near tie on the CPU."""
    prompts = write_prompts(tmp_path / "in.parquet", [f"number {n} is" for n in range(NUM_ROWS)])
    on_cpu, expected = run_job(home, prompts, "--device", "cpu", "--kv-type", "f32")
    on_gpu, found = run_job(home, prompts, "--device", "gpu", "--memory", "2GiB")
    assert (on_cpu.record["device"], on_gpu.record["device"]) == ("cpu", "cuda")
    assert (on_gpu.record["kv_type"], on_gpu.record["device_budget_nbytes"]) == ("f16", 2 << 30)
    assert "memory_limit_nbytes" not in on_gpu.record
    assert on_gpu.record["driver_version"] and on_gpu.record["cuda_runtime"]
    num_same = 0
    for mine, theirs in zip(found, expected, strict=True):
        same = same_so_far(mine, theirs)
        num_same += same
        for one, other in zip(mine[:same], theirs, strict=False):
            assert abs(one["logprob"] - other["logprob"]) < 2 * MAX_ERROR
        assert same == len(theirs) or margin(theirs[same]) < 2 * MAX_ERROR
    assert num_same > NUM_ROWS * 12 // 2, "near ties must be few"
    said = run_process(home.path, "status").out
    assert on_gpu.record["device_name"] in said and "(asked for)" in said


def test_auto_takes_the_gpu_and_says_so(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 67: with one GPU that is named twice."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    prompts = write_prompts(tmp_path / "in.parquet", [f"a {row}" for row in range(NUM_ROWS)])
    ran = run_process(home.path, "run", prompts, "--model", MODEL, *SAMPLING)
    assert ran.code == 0, ran.err
    with JobStore(home.state_path) as store:
        (job,) = store.list_jobs()
    assert f"computes on the GPU {job.record['device_name']}" in ran.err
    assert (job.record["device"], job.record["cuda_visible_devices"]) == ("cuda", "0")
    assert job.record["device_reason"]


def test_doctor_tells_of_the_gpu_and_measures_its_link(home: Home) -> None:
    report = json.loads(run_process(home.path, "doctor", "--json").out)
    checks = {check["name"]: check for check in report["checks"]}
    assert "compute capability" in checks["GPU 0"]["detail"]
    assert checks["GPU backend"]["status"] == "ok"
    assert report["rates"]["link"]["host_to_device_nbytes_per_s"] > 1e9
