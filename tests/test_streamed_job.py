"""Jobs whose model is larger than their memory: planned, streamed, and accounted for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine import EngineConfig
from jobs.control import ensure_runner, stop_runner
from jobs.engine_load import MEMORY_MARGIN_NBYTES
from jobs.home import Home
from jobs.memory import private_nbytes
from jobs.processes import find_instance, read_leader
from jobs.records import Job
from jobs.results import read_results
from jobs.store import JobStore
from ntx_batch.status import status_record
from scripts.synth_gguf import Shape, write_model
from tests.cli_helpers import run_here
from tests.runner_helpers import make_home, queue_job, wait_over

MIB = 1 << 20
SHAPE = Shape(num_layers=10, hidden=1024, ffn=2560, vocab_size=4000, context_length=256)
MEMORY_NBYTES = 190 * MIB
NUM_ROWS, MAX_TOKENS = 12, 6


@dataclass
class World:
    home: Home
    store: JobStore
    model: Path
    inputs: Path
    count: int = 0

    def run(self, **engine: Any) -> Job:
        self.count += 1
        path = self.inputs / f"{self.count}.parquet"
        prompts: list[str | None] = [f"{row * 7919} is {row} of some" for row in range(NUM_ROWS)]
        job = queue_job(
            self.store,
            path,
            prompts,
            max_tokens=MAX_TOKENS,
            model=str(self.model),
            engine=EngineConfig(kv_memory_nbytes=16 * MIB, **engine),
        )
        ensure_runner(self.home)
        return wait_over(self.store, job)

    def texts(self, job: Job) -> list[str]:
        found: list[str] = read_results(self.store.finished(job.id))["generated_text"].to_pylist()
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("streamed")
    model = folder / "model.gguf"
    write_model(model, SHAPE, type_name="F16")
    assert 200 * MIB < model.stat().st_size < 300 * MIB
    home = make_home(folder / "home")
    with JobStore(home.state_path) as store:
        yield World(home, store, model, folder)
        stop_runner(home)


@pytest.fixture(scope="module")
def streamed_with_memory(world: World) -> tuple[Job, int]:
    """A job that streams, and the private memory of its engine actor at its end."""
    job = world.run(memory_nbytes=MEMORY_NBYTES, sweep_tokens=64)
    leader = read_leader(world.home.driver_path)
    assert leader is not None
    found = find_instance(f"{world.home.key}-", [leader])
    return job, max(private_nbytes(process.pid) for process in found)


@pytest.fixture(scope="module")
def streamed(streamed_with_memory: tuple[Job, int]) -> Job:
    return streamed_with_memory[0]


def test_a_streamed_job_gives_the_text_of_a_resident_one(world: World, streamed: Job) -> None:
    resident = world.run(sweep_tokens=64)
    assert (streamed.state, resident.state) == ("completed", "completed")
    assert streamed.record["streamed_parcels"] > 0
    assert resident.record["streamed_parcels"] == 0
    assert world.texts(streamed) == world.texts(resident)
    assert len(set(world.texts(streamed))) > 1


def test_its_record_says_what_streamed_by_which_reader_and_how_fast(streamed: Job) -> None:
    record, achieved = streamed.record, streamed.record["achieved"]
    assert record["reader"] == "direct"
    assert record["read_path"] == "direct", "this test wants a disk that takes direct reads"
    assert record["resident_layers"] + record["streamed_parcels"] in (SHAPE.num_layers, 11)
    assert "resident" not in record
    sweeps = achieved["num_sweeps"]
    assert achieved["streamed_nbytes"] == sweeps * record["streamed_nbytes"] > 0
    # What is read ahead at the end is of a sweep that never comes, at the start of the first.
    ring = record["ring_nbytes"]
    assert abs(achieved["direct_nbytes"] - achieved["streamed_nbytes"]) <= ring
    assert achieved["buffered_nbytes"] == 0
    assert 0 <= achieved["wait_s"] <= achieved["sweep_s"] * sweeps
    assert achieved["disk_nbytes_per_s"] > 0 and achieved["probe_share"] > 0


def test_status_sets_what_was_achieved_beside_what_was_predicted(
    world: World,
    streamed: Job,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NTX_HOME", str(world.home.path))
    record = status_record(streamed, 0.0)["record"]
    for name in ("sweep_s", "tokens_per_s", "job_s"):
        assert record["predicted"][name] > 0 and record["achieved"][name] > 0
    shown = run_here(capsys, "status", streamed.id)
    lines = {line.split()[0]: line for line in shown.out.splitlines() if line.strip()}
    assert "predicted" in lines["sweep"] and "predicted" in lines["tokens/s"]
    assert "GB/s" in lines["streamed"]
    as_json = json.loads(run_here(capsys, "status", streamed.id, "--json").out)
    assert as_json["record"]["achieved"] == record["achieved"]


def test_threads_share_one_copy_of_the_weights_within_the_budget(
    world: World, streamed_with_memory: tuple[Job, int]
) -> None:
    """Case 77: all workers share one engine's weights; a budget that cannot work is refused."""
    job, actor_nbytes = streamed_with_memory
    record = job.record
    without_model = record["memory_limit_nbytes"] - MEMORY_MARGIN_NBYTES - MEMORY_NBYTES
    assert actor_nbytes - without_model < MEMORY_NBYTES + 64 * MIB
    parts = ("weights_nbytes", "ring_nbytes", "activations_nbytes", "kv_nbytes")
    assert sum(record[part] for part in parts) <= MEMORY_NBYTES
    refused = world.run(memory_nbytes=20 * MIB, sweep_tokens=64)
    assert refused.state == "failed"
    assert refused.reason is not None and "the smallest that works here is" in refused.reason
