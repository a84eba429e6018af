"""What submit refuses of memory budgets, without Numba and whatever is free."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine import EngineConfig, MemoryBudgetError
from engine.gguf_file import GgufFile
from engine.hparams import Hparams, read_hparams
from jobs.budget import check_cpu_budget
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
