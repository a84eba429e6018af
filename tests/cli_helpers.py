"""Run `ntx-batch` as people and scripts do: in this process, or as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def started_process(
    home: Path, *arguments: str | Path, cwd: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """The command as a process of its own; it is gone in the end."""
    command = [sys.executable, "-m", "ntx_batch", *map(str, arguments)]
    environment = os.environ | {"NTX_HOME": str(home), "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, cwd=cwd, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run_process(home: Path, *arguments: str | Path, cwd: Path | None = None) -> Ran:
    """The command as a process of its own; it gets three minutes."""
    with started_process(home, *arguments, cwd=cwd) as process:
        out, err = process.communicate(timeout=180)
    return Ran(process.returncode, out, err)


def write_prompts(path: Path, prompts: Sequence[str | None], **columns: Sequence[Any]) -> Path:
    pq.write_table(pa.table({"prompt": pa.array(prompts, pa.string()), **columns}), path)
    return path


def queue_job(home: Path, prompts: Path, **options: Any) -> Job:
    """A job in the store that no runner knows of."""
    spec = build_spec(prompts, model=MODEL, **options)
    with JobStore(Home.open(home).state_path) as store:
        return store.create_job(spec, build_manifest(prompts), {})
