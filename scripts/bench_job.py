"""A job through submit, Ray and Parquet against the same rows through the engine alone.

In pairs, whose halves change places: each is first as often as the other, or once more.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import ntx_batch
from engine import EngineConfig, Request, SamplingParams
from engine.engine import Engine
from engine.gguf_file import GgufFile
from engine.tokenizer import Tokenizer
from ntx_batch import client
from scripts.bench_report import Report

WARM_UP_ROWS = 4


def random_prompts(tokenizer: Tokenizer, rows: int, num_tokens: int) -> list[str]:
    """Texts of about `num_tokens` tokens, made of words of the vocabulary."""
    rng = np.random.default_rng(3)
    ids = range(min(9000, tokenizer.num_tokens))
    words = [tokenizer.token_bytes(i).decode(errors="ignore") for i in ids]
    words = [word for word in words if word.startswith(" ") and word[1:].isalpha()]
    return ["".join(rng.choice(words, num_tokens)) for _ in range(rows)]


def alone_s(options: argparse.Namespace, tokenizer: Tokenizer, prompts: list[str]) -> float:
    """As `engine_alone_s`, in an engine of its own, with everything compiled."""
    config = EngineConfig(
        kv_type=options.kv_type, num_threads=options.threads, device=options.device
    )
    with Engine(options.model, config) as engine:
        engine_alone_s(engine, tokenizer, prompts[:WARM_UP_ROWS], options.job_tokens)
        return engine_alone_s(engine, tokenizer, prompts, options.job_tokens)


def engine_alone_s(
    engine: Engine, tokenizer: Tokenizer, prompts: list[str], new_tokens: int
) -> float:
    """Seconds from the first admission to the last finished row."""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    requests = [
        Request(row_index=i, token_ids=np.asarray(tokenizer.encode(p), np.int32), params=params)
        for i, p in enumerate(prompts)
    ]
    started = time.perf_counter()
    for request in requests:
        engine.add(request)
    finished = 0
    while engine.has_work:
        finished += len(engine.sweep())
    assert finished == len(prompts)
    return time.perf_counter() - started


def job_s(options: argparse.Namespace, folder: Path, data: Path) -> tuple[float, dict[str, Any]]:
    """Seconds from the job's first admission to its last commit, and the job's record."""
    home = folder / "home"
    job = ntx_batch.submit(
        data,
        model=options.model,
        home=home,
        device=options.device,
        max_tokens=options.job_tokens,
        ignore_eos=True,
        kv_type=options.kv_type,
        threads=options.threads,
    )
    code = job.wait()
    assert code == 0, job.logs()
    record = dict(job.snapshot().record)
    client.stop_runner(home=home)
    return record["last_commit_at"] - record["first_admission_at"], record


def bench_job(options: argparse.Namespace) -> Report:
    rows, new_tokens = options.job_rows, options.job_tokens
    report = Report(f"job of {rows} rows, {options.context} in, {new_tokens} out")
    tokenizer = Tokenizer.from_gguf(GgufFile.open(options.model))
    prompts = random_prompts(tokenizer, rows, options.context)
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "prompts.parquet"
        pq.write_table(pa.table({"prompt": prompts}), data)
        for pair in range(options.repeats):
            alone = alone_s(options, tokenizer, prompts) if pair % 2 == 0 else None
            seconds, record = job_s(options, Path(name), data)
            if alone is None:
                alone = alone_s(options, tokenizer, prompts)
            for key in ("ray_s", "load_s", "compile_s"):
                report.add(f"start-up, {key}", record[key])
            report.add("job tokens/s", rows * new_tokens / seconds)
            report.add("engine alone tokens/s", rows * new_tokens / alone)
            report.add("job rows/s", rows / seconds)
            report.add("engine alone rows/s", rows / alone)
            report.add("ratio to the engine alone", alone / seconds)
    return report
