"""Each engine actor on a GPU has one of its own; a job stays on the device that it began on."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import DeviceError, EngineConfig
from engine.devices import DeviceChoice
from jobs import driver
from jobs.dispatch import place_command
from jobs.driver import choose_device
from jobs.engine_places import Node
from jobs.job_run import JobRun
from jobs.messages import PlaceEngines
from jobs.node_facts import NodeFacts
from jobs.records import Job, JobError, JobSpec, Manifest
from jobs.store import JobStore
from tests.job_factories import make_batch, make_job

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_two_actors_have_a_gpu_each_and_a_third_waits_for_its_own() -> None:
    """Case 67: with GPUs 4 and 7 to be seen, in a Ray that is told of two."""
    temp_dir = Path("/tmp") / f"ntx-test-{secrets.token_hex(4)}"
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "tests.gpu_actors", str(temp_dir)],
            env=os.environ
            | {
                "CUDA_VISIBLE_DEVICES": "4,7",
                "PYTHONPATH": str(ROOT),
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        subprocess.run(["rm", "-rf", temp_dir], check=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["gpus_of_node"] == 2
    assert found["both"] == ["4 gpu", "7 gpu"]
    assert found["next"] in found["both"], "the GPU of an actor that ended is free again"
    assert "it asks for 1 CPUs and 1 GPUs of it" in found["third"]
    assert "0 GPUs; lower --threads or --engines, take --device cpu, or wait" in found["third"]
    device, reason = found["auto"]
    assert found["on_cpu"].split()[-1] == device
    assert (device, reason[:19]) == ("cpu", "no GPU can be used:") or device == "gpu"


def place(device: Any, reason: str = "") -> PlaceEngines:
    spec = JobSpec(input="in.parquet", model="model.gguf", engine=EngineConfig(device=device))
    return PlaceEngines(1, spec, Manifest(files=()), device_reason=reason)


def node(name: str, num_gpus: int = 0) -> Node:
    facts = NodeFacts(machine=name, num_cores=4, free_nbytes=1 << 30, host_nbytes=1 << 30)
    return Node(id=name, name=name, num_cpus=4, num_gpus=num_gpus, store_nbytes=0, facts=facts)


def test_a_gpu_that_ray_does_not_have_is_refused_or_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 67: in a cluster whose node was started without its GPU."""
    monkeypatch.setattr(driver, "choose_job_device", lambda _: DeviceChoice("gpu", "one is there"))
    with pytest.raises(JobError, match="--device gpu: Ray has no GPU"):
        choose_device(place("gpu"), [node("a")])
    settled = choose_device(place("auto"), [node("a")])
    assert settled.device == "cpu"
    assert settled.reason.startswith("Ray has no GPU")
    assert choose_device(place("auto"), [node("a", 1)]) == DeviceChoice("gpu", "one is there")


def test_gpus_of_other_machines_are_used_where_this_one_has_none() -> None:
    nodes = [node("a"), node("b", 2)]
    assert choose_device(place("auto"), nodes) == DeviceChoice("gpu", "one is there, on b")
    assert choose_device(place("cpu"), nodes) == DeviceChoice("cpu", "asked for")


# ---- a job that goes on ------------------------------------------------------------------


def stay_in_spool(*_: Any) -> None:
    raise AssertionError("no part is due")


def begun(tmp_path: Path, recorded: str, num_done: int, **engine: Any) -> PlaceEngines:
    """The next start of a job of which some rows are finished."""
    with JobStore(tmp_path / "state.sqlite") as store:
        job: Job = make_job(store, engine=EngineConfig(**engine))
        store.set_record(job.id, {"device": recorded})
        if num_done:
            store.commit_batch(job.id, make_batch(range(num_done)))
        return place_command(2, JobRun(store, store.job(job.id), stay_in_spool))


@pytest.mark.parametrize(("recorded", "device"), [("cpu", "cpu"), ("cuda", "gpu")])
def test_a_job_goes_on_where_its_first_rows_were_computed(
    recorded: str, device: str, tmp_path: Path
) -> None:
    command = begun(tmp_path, recorded, 3)
    assert command.spec.engine.device == device
    assert command.device_reason == f"the job's first rows were computed on a {device.upper()}"


def test_a_job_without_finished_rows_chooses_anew(tmp_path: Path) -> None:
    command = begun(tmp_path, "cuda", 0)
    assert (command.spec.engine.device, command.device_reason) == ("auto", "")


def test_a_device_that_was_asked_for_is_no_choice(tmp_path: Path) -> None:
    command = begun(tmp_path, "cpu", 3, device="cpu")
    assert (command.spec.engine.device, command.device_reason) == ("cpu", "")


def test_a_job_that_began_on_a_gpu_which_is_gone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: EngineConfig) -> DeviceChoice:
        raise DeviceError("--device gpu: there is no NVIDIA driver")

    monkeypatch.setattr(driver, "choose_job_device", refuse)
    with pytest.raises(JobError, match=r"no NVIDIA driver; the job's first rows .* on a GPU"):
        choose_device(place("gpu", "the job's first rows were computed on a GPU"), [node("a")])
    with pytest.raises(JobError, match=r"no NVIDIA driver$"):
        choose_device(place("gpu"), [node("a")])
