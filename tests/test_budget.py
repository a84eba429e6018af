"""What submit refuses of memory budgets, without Numba and whatever is free."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine import EngineConfig, MemoryBudgetError
from engine.budget import host_budget_nbytes, most_host_nbytes
from engine.gguf_file import GgufFile
from engine.hparams import Hparams, read_hparams
from engine.machine import all_memory_nbytes, free_memory_nbytes, usable_cores
from jobs.budget import (
    beside_object_store,
    check_cpu_budget,
    check_gpu_budget,
    check_host_memory,
    check_threads,
)
from jobs.ray_cluster import ADDRESS_VARIABLE, OBJECT_STORE_NBYTES
from jobs.records import SpecError
from kernels.cpu import pages, vector
from tests import golden

ROOT = Path(__file__).parents[1]
MODEL = golden.load("llama-q4_0").model


@pytest.fixture
def model() -> tuple[GgufFile, Hparams]:
    file = GgufFile.open(MODEL)
    return file, read_hparams(file)


def test_the_least_that_is_named_would_do(model: tuple[GgufFile, Hparams]) -> None:
    with pytest.raises(MemoryBudgetError) as refused:
        check_cpu_budget(EngineConfig(memory_nbytes=1 << 20), *model)
    found = re.search(r"the smallest that works here is ([\d,]+)", str(refused.value))
    assert found, refused.value
    least_nbytes = int(found[1].replace(",", ""))
    check_cpu_budget(EngineConfig(memory_nbytes=least_nbytes), *model)
    with pytest.raises(MemoryBudgetError):
        check_cpu_budget(EngineConfig(memory_nbytes=least_nbytes - 1), *model)


def test_more_than_the_machine_has_is_left_to_the_start(model: tuple[GgufFile, Hparams]) -> None:
    check_cpu_budget(EngineConfig(memory_nbytes=1 << 50), *model)
    check_cpu_budget(EngineConfig(), *model)


def test_pages_are_known_without_numba() -> None:
    program = (
        "import sys, ntx_batch.preflight, jobs.budget\n"
        "print(sorted({'numba', 'cupy', 'ray'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout == "[]\n", ran.stderr
    assert pages.VALUE_STEP == vector.PANEL


# ---- beside a GPU, without one ---------------------------------------------------------------


def test_a_gpu_budget_that_no_gpu_could_work_with_is_refused(
    model: tuple[GgufFile, Hparams],
) -> None:
    """Below the least that is named no GPU does; there kernels take a little more."""
    with pytest.raises(MemoryBudgetError, match=r"on a GPU .* comes on top") as refused:
        check_gpu_budget(EngineConfig(memory_nbytes=64 << 20), *model)
    found = re.search(r"the smallest that works here is ([\d,]+)", str(refused.value))
    assert found, refused.value
    least_nbytes = int(found[1].replace(",", ""))
    check_gpu_budget(EngineConfig(memory_nbytes=least_nbytes), *model)
    with pytest.raises(MemoryBudgetError):
        check_gpu_budget(EngineConfig(memory_nbytes=least_nbytes - 1), *model)


def test_host_memory_and_the_object_store_leave_a_share_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    share = all_memory_nbytes() * 85 // 100
    most = most_host_nbytes(OBJECT_STORE_NBYTES)
    assert most + OBJECT_STORE_NBYTES == share
    check_host_memory(EngineConfig(host_memory_nbytes=most))
    with pytest.raises(MemoryBudgetError, match=f"can pin {most:,}.*85 %"):
        check_host_memory(EngineConfig(host_memory_nbytes=most + 1))
    # Another machine may have more.
    monkeypatch.setenv(ADDRESS_VARIABLE, "10.0.0.1:6379")
    check_host_memory(EngineConfig(host_memory_nbytes=most + 1))


@pytest.mark.parametrize("store_nbytes", [OBJECT_STORE_NBYTES, 1 << 30, 1 << 60])
def test_an_object_store_counts_into_what_is_pinned(store_nbytes: int) -> None:
    share = all_memory_nbytes() * 85 // 100
    for asked in (None, 1 << 20, 1 << 60):
        config = EngineConfig(device="gpu", host_memory_nbytes=asked)
        nbytes = beside_object_store(config, store_nbytes).host_memory_nbytes
        assert nbytes is not None and nbytes <= max(0, share - store_nbytes)
        assert asked is None or nbytes <= asked
    assert beside_object_store(EngineConfig(device="cpu"), store_nbytes) == EngineConfig(
        device="cpu"
    )


def test_host_memory_is_never_more_than_is_free() -> None:
    """What is pinned cannot be swapped: a reserve is left even of what was asked for."""
    assert host_budget_nbytes(1 << 20) == 1 << 20
    for asked in (None, 1 << 60):
        assert host_budget_nbytes(asked) <= most_host_nbytes()
        assert host_budget_nbytes(asked) <= free_memory_nbytes() + (64 << 20)


def test_more_threads_than_cores_are_refused() -> None:
    cores = usable_cores()
    check_threads(EngineConfig())
    check_threads(EngineConfig(num_threads=cores))
    with pytest.raises(SpecError, match=f"threads is {cores + 1}.* {cores} cores"):
        check_threads(EngineConfig(num_threads=cores + 1))
