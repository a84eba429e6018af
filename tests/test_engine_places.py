"""Where engines run, what each may use, and what they achieved together. Pure rules."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import EngineConfig
from engine.requests import MemoryBudgetError
from jobs.achieved import of_all_engines, together
from jobs.budget import check_engines
from jobs.engine_places import Node, place_engines, share_of
from jobs.node_facts import NodeFacts, Wanted, look_at_node
from jobs.records import InputFile, JobError, Manifest, SpecError
from ntx_batch.preflight import check_job
from ntx_batch.spec import build_spec
from tests.job_factories import write_input
from tests.runner_helpers import MODEL

GIB = 1 << 30
CPU = EngineConfig(device="cpu")
GPU = EngineConfig(device="gpu")


def node(name: str, cores: int = 4, gpus: int = 0, *, problem: str = "", machine: str = "") -> Node:
    facts = NodeFacts(
        machine=machine or name,
        num_cores=cores,
        free_nbytes=10 * GIB,
        host_nbytes=8 * GIB,
        problem=problem,
    )
    return Node(
        id=name, name=name, num_cpus=cores, num_gpus=gpus, store_nbytes=2 * GIB, facts=facts
    )


def names(nodes: list[Node], config: EngineConfig, num_engines: int | None) -> list[str]:
    return [place.node.name for place in place_engines(nodes, config, num_engines)]


def test_without_a_number_each_gpu_or_each_node_has_one() -> None:
    nodes = [node("a", gpus=2), node("b"), node("c", gpus=1)]
    assert names(nodes, GPU, None) == ["a", "a", "c"]
    assert names(nodes, CPU, None) == ["a", "b", "c"]
    assert names([node("a", cores=0), node("b")], CPU, None) == ["b"]


def test_a_number_fills_the_first_gpus_and_spreads_over_cores() -> None:
    assert names([node("a", gpus=2), node("b", gpus=2)], GPU, 3) == ["a", "a", "b"]
    assert names([node("a", cores=2), node("b", cores=4)], CPU, 3) == ["a", "b", "b"]


def test_one_engine_has_what_the_job_was_given() -> None:
    (place,) = place_engines([node("a")], CPU, None)
    assert place.config == replace(CPU, num_threads=4)
    (place,) = place_engines([node("a", gpus=1)], GPU, None)
    assert (place.num_gpus, place.config.num_threads) == (1, 4)
    assert place.config.host_memory_nbytes == 6 * GIB, "less Ray's object store"


def test_engines_on_one_node_divide_its_cores_and_memory() -> None:
    """Case 77: together they take what one would have."""
    config = replace(CPU, memory_nbytes=6 * GIB, kv_memory_nbytes=2 * GIB)
    places = place_engines([node("a")], config, 2)
    shares = [place.config for place in places]
    assert shares == 2 * [
        replace(config, num_threads=2, memory_nbytes=3 * GIB, kv_memory_nbytes=GIB)
    ]
    free = [place.config.memory_nbytes for place in place_engines([node("a")], CPU, 2)]
    assert free == [5 * GIB, 5 * GIB]
    assert [place.counts_machine for place in places] == [True, False]


def test_engines_on_gpus_divide_host_memory_and_not_their_own() -> None:
    config = replace(GPU, memory_nbytes=20 * GIB, kv_memory_nbytes=4 * GIB)
    for place in place_engines([node("a", gpus=2)], config, None):
        assert place.config == replace(config, num_threads=2, host_memory_nbytes=3 * GIB)


def test_energy_is_counted_once_for_each_machine() -> None:
    nodes = [node("a", machine="m"), node("b", machine="m"), node("c", machine="n")]
    assert [p.counts_machine for p in place_engines(nodes, CPU, None)] == [True, False, True]


def test_what_is_not_there_is_refused_with_what_is() -> None:
    nodes = [node("a", gpus=1), node("b")]
    with pytest.raises(JobError, match=r"--engines 2 asks for as many GPUs, .* 1 \(1 on a, 0 on b"):
        place_engines(nodes, GPU, 2)
    with pytest.raises(JobError, match=r"--engines 9 asks for as many cores, .* 8 \(4 on a, 4 on"):
        place_engines(nodes, CPU, 9)
    with pytest.raises(JobError, match=r"8 cores of a, and Ray lets them use 4; lower --threads"):
        place_engines(nodes, replace(CPU, num_threads=8), None)
    with pytest.raises(JobError, match=r"3 engines on a are to share 2 cores"):
        place_engines([node("a")], replace(CPU, num_threads=2), 3)


def test_a_machine_without_the_model_is_named() -> None:
    nodes = [node("a"), node("b", problem="/m.gguf: No such file or directory")]
    with pytest.raises(JobError, match=r"b: /m\.gguf: No such file"):
        place_engines(nodes, CPU, None)
    assert names(nodes, CPU, 1) == ["a"], "where it is not to run it may be missing"


def test_a_look_at_a_machine_tells_what_it_lacks(tmp_path: Path) -> None:
    model, prompts = tmp_path / "m.gguf", tmp_path / "in.parquet"
    model.write_bytes(b"model")
    prompts.write_bytes(b"rows")
    values: dict[str, Any] = {"mtime_ns": 1, "num_rows": 1, "first_row": 0}
    here = InputFile(path=str(prompts), nbytes=4, **values)
    store = InputFile(path="s3://bucket/in.parquet", nbytes=4, **values)
    wanted = Wanted(model=str(model), model_nbytes=5, manifest=Manifest(files=(here, store)))
    facts = look_at_node(wanted)
    assert facts.problem == ""
    assert facts.num_cores >= 1 and facts.free_nbytes > 0
    assert facts.machine == look_at_node(wanted).machine
    other = look_at_node(replace(wanted, model_nbytes=6))
    assert "has 5 bytes, and 6 where the job was submitted" in other.problem
    prompts.unlink()
    assert f"{prompts}: No such file or directory" in look_at_node(wanted).problem
    revised = look_at_node(replace(wanted, numerics_revision=-1))
    assert "install the same version" in revised.problem


@given(
    threads=st.integers(1, 64),
    num_engines=st.integers(1, 8),
    memory=st.none() | st.integers(1 << 20, 1 << 40),
    device=st.sampled_from(["cpu", "gpu"]),
)
def test_shares_add_up_to_no_more_than_there_was(
    threads: int, num_engines: int, memory: int | None, device: Any
) -> None:
    config = EngineConfig(
        device=device, num_threads=threads, memory_nbytes=memory, host_memory_nbytes=memory
    )
    share = share_of(config, num_engines, free_nbytes=9 * GIB, host_nbytes=7 * GIB)
    assert share.num_threads is not None
    assert num_engines * share.num_threads <= threads
    if device == "gpu":
        assert share.memory_nbytes == memory
        assert share.host_memory_nbytes is not None
        assert num_engines * share.host_memory_nbytes <= min(memory or 7 * GIB, 7 * GIB)
    elif num_engines > 1:
        assert share.memory_nbytes is not None
        assert num_engines * share.memory_nbytes <= (memory or 9 * GIB)
    else:
        assert share == config


# ---- the option --------------------------------------------------------------------------


def test_engines_are_a_number_or_auto() -> None:
    def engines(value: Any) -> int | None:
        return build_spec("in.parquet", model="m.gguf", engines=value).engines

    assert [engines(2), engines("2"), engines("auto"), engines(None)] == [2, 2, None, None]
    for wrong in ("many", 0, "0", 1.5):
        with pytest.raises(SpecError, match="engines"):
            engines(wrong)


def test_more_engines_than_threads_are_refused_at_submit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_engines(replace(CPU, num_threads=2), "cpu", 2)
    with pytest.raises(SpecError, match="engines is 3, and there are 2 cores for them"):
        check_engines(replace(CPU, num_threads=2), "cpu", 3)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_engines(replace(CPU, num_threads=2), "cpu", 3)


def test_memory_that_is_enough_for_one_and_not_for_two_is_refused_at_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 77: said before anything is queued, with what would do."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    prompts = write_input(tmp_path / "in.parquet", {"prompt": ["a"]})

    def check(memory_nbytes: int, engines: int) -> None:
        options = {"device": "cpu", "threads": engines, "engines": engines}
        check_job(build_spec(prompts, model=MODEL, memory=memory_nbytes, **options))

    with pytest.raises(MemoryBudgetError) as refused:
        check(1 << 20, 1)
    smallest = int(
        re.findall(r"smallest that works here is ([\d,]+)", str(refused.value))[0].replace(",", "")
    )
    check(smallest, 1)
    with pytest.raises(
        MemoryBudgetError, match=r"the engines divide the memory, .* lower --engines"
    ):
        check(smallest * 3 // 2, 2)
    check(smallest * 2, 2)


# ---- figures -----------------------------------------------------------------------------


def part(num_sweeps: int, sweep_s: float, tokens_per_s: float, **more: Any) -> dict[str, Any]:
    return {
        "num_sweeps": num_sweeps,
        "sweeps_s": num_sweeps * sweep_s,
        "sweep_s": sweep_s,
        "sweep_tokens": 10.0,
        "sweep_rows": 8.0,
        "tokens_per_s": tokens_per_s,
        "job_s": 100.0,
        "costs": None,
        **more,
    }


def test_rates_of_engines_add_up_and_means_are_over_all_sweeps() -> None:
    one, other = part(30, 1.0, 50.0), part(10, 2.0, 25.0, job_s=120.0, streamed_nbytes=7)
    assert together([one]) == one
    both = together([one, other])
    assert (both["num_sweeps"], both["sweeps_s"], both["tokens_per_s"]) == (40, 50.0, 75.0)
    assert (both["sweep_s"], both["job_s"], both["streamed_nbytes"]) == (1.25, 120.0, 7)
    nothing = part(0, 0.0, 0.0) | dict.fromkeys(("sweep_s", "sweep_tokens", "sweep_rows"))
    assert together([one, nothing])["sweep_s"] == 1.0


def test_a_prediction_for_one_of_two_engines_is_one_for_both() -> None:
    predicted = {"tokens_per_s": 10.0, "num_sweeps": 4.0, "sweep_s": 2.0, "job_s": 8.0}
    both = of_all_engines(predicted, 2)
    assert both == predicted | {"tokens_per_s": 20.0, "num_sweeps": 8.0}
