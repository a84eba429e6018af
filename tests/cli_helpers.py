"""Run `ntx-batch` as people and scripts do: in this process, or as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.dataset import build_manifest
from jobs.home import Home
from jobs.records import Job
from jobs.store import JobStore
from ntx_batch.cli import main
from ntx_batch.spec import build_spec
from tests.golden import GOLDEN

ROOT = Path(__file__).parents[1]
MODEL = GOLDEN / "llama-q4_0.gguf"


@dataclass(frozen=True)
class Ran:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


def run_here(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Ran:
    """The command inside this process; $NTX_HOME says where."""
    with pytest.raises(SystemExit) as exited:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return Ran(int(exited.value.code or 0), captured.out, captured.err)


def start_process(
    home: Path, *arguments: str | Path, cwd: Path | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ntx_batch", *map(str, arguments)],
        env=os.environ | {"NTX_HOME": str(home), "PYTHONPATH": str(ROOT)},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_process(home: Path, *arguments: str | Path, cwd: Path | None = None) -> Ran:
    """The command as a process of its own; it gets two minutes."""
    process = start_process(home, *arguments, cwd=cwd)
    out, err = process.communicate(timeout=120)
    return Ran(process.returncode, out, err)


def write_prompts(path: Path, prompts: Sequence[str | None], **columns: Sequence[Any]) -> Path:
    pq.write_table(pa.table({"prompt": pa.array(prompts, pa.string()), **columns}), path)
    return path


def queue_job(home: Path, prompts: Path, **options: Any) -> Job:
    """A job in the store that no runner knows of."""
    spec = build_spec(prompts, model=MODEL, **options)
    with JobStore(Home.open(home).state_path) as store:
        return store.create_job(spec, build_manifest(prompts), {})
