"""The most memory that an engine actor takes within its budget, and what the page cache keeps."""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import ntx_batch
from engine.gguf_file import GgufFile
from engine.tokenizer import Tokenizer
from jobs.memory import private_nbytes
from ntx_batch import client
from ntx_batch.spec import parse_size
from scripts.bench_job import random_prompts
from scripts.bench_report import Report
from scripts.synth_gguf import Shape, write_model

SAMPLE_S = 0.02
ROWS = 150
_TINY = Shape(num_layers=1, hidden=64, ffn=64, num_heads=1, num_kv_heads=1, vocab_size=1024)


def bench_memory(options: argparse.Namespace) -> Report:
    """A job within `--memory`, its actor beside that of a job on a model of one small layer."""
    report = Report(f"memory of the engine actor, --memory {options.memory}")
    with tempfile.TemporaryDirectory() as name:
        tiny = Path(name) / "tiny.gguf"
        write_model(tiny, _TINY, type_name="F16")
        for _ in range(options.repeats):
            drop_from_cache(options.model)
            base = peak_nbytes(Path(name), tiny, {**_options(options), "kv_memory": "1MiB"})
            peak = peak_nbytes(Path(name), options.model, _options(options))
            budget = parse_size(options.memory)
            report.add("actor, MiB", peak / 2**20)
            report.add("actor of a model of no size, MiB", base / 2**20)
            report.add("difference less budget, MiB", (peak - base - budget) / 2**20)
            report.add("model in the page cache, MiB", cached_nbytes(options.model) / 2**20)
    return report


def _options(options: argparse.Namespace) -> dict[str, Any]:
    return {"memory": options.memory, "kv_type": options.kv_type, "threads": options.threads}


def peak_nbytes(folder: Path, model: Path, job_options: dict[str, Any]) -> int:
    """The most private memory of the engine actor of a job, kernels compiled before it."""
    tokenizer = Tokenizer.from_gguf(GgufFile.open(model))
    data, home = folder / "prompts.parquet", folder / "home"
    pq.write_table(pa.table({"prompt": random_prompts(tokenizer, ROWS, 24)}), data)
    peak, over = 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not over.wait(SAMPLE_S):
            peak = max([peak, *(private_nbytes(pid) for pid in actor_pids())])

    watch = threading.Thread(target=sample)
    watch.start()
    try:
        job = ntx_batch.submit(
            data, model=model, home=home, device="cpu", max_tokens=8, ignore_eos=True, **job_options
        )
        code = job.wait()
        assert code == 0, job.logs()
    finally:
        over.set()
        watch.join()
        client.stop_runner(home=home)
    return peak


def actor_pids() -> Iterator[int]:
    for process in psutil.process_iter(["cmdline"]):
        if any("ray::EngineActor" in word for word in process.info["cmdline"] or ()):
            yield process.pid


def drop_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_nbytes(path: Path) -> int:
    """Bytes of a file that are in the page cache (mincore(2))."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        num_pages = -(-len(view) // mmap.PAGESIZE)
        pages = (ctypes.c_ubyte * num_pages)()
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(view.ctypes.data)
        if libc.mincore(address, ctypes.c_size_t(len(view)), pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore failed")
        found = sum(page & 1 for page in bytes(pages)) * mmap.PAGESIZE
        del view
    return found
