"""A job through submit, Ray and Parquet against the same rows through the engine alone."""

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

JOB_NEW_TOKENS = 64


def random_prompts(tokenizer: Tokenizer, rows: int, num_tokens: int) -> list[str]:
    """Texts of about `num_tokens` tokens, made of words of the vocabulary."""
    rng = np.random.default_rng(3)
    words = [tokenizer.token_bytes(i).decode(errors="ignore") for i in range(1000, 9000)]
    words = [word for word in words if word.startswith(" ") and word[1:].isalpha()]
    return ["".join(rng.choice(words, num_tokens)) for _ in range(rows)]


def engine_alone_s(engine: Engine, tokenizer: Tokenizer, prompts: list[str]) -> float:
    """Seconds from the first admission to the last finished row."""
    params = SamplingParams(max_tokens=JOB_NEW_TOKENS, ignore_eos=True)
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


def job_s(
    model: Path, config: argparse.Namespace, folder: Path, data: Path
) -> tuple[float, dict[str, Any]]:
    """Seconds from the job's first admission to its last commit, and the job's record."""
    job = ntx_batch.submit(
        data,
        model=model,
        home=folder,
        max_tokens=JOB_NEW_TOKENS,
        ignore_eos=True,
        kv_type=config.kv_type,
        threads=config.threads,
    )
    code = job.wait()
    assert code == 0, job.logs()
    record = dict(job.snapshot().record)
    return record["last_commit_at"] - record["first_admission_at"], record


def bench_job(options: argparse.Namespace) -> Report:
    rows = options.job_rows
    report = Report(f"job of {rows} rows, {options.context} in, {JOB_NEW_TOKENS} out")
    tokenizer = Tokenizer.from_gguf(GgufFile.open(options.model))
    prompts = random_prompts(tokenizer, rows, options.context)
    config = EngineConfig(kv_type=options.kv_type, num_threads=options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "prompts.parquet"
        pq.write_table(pa.table({"prompt": prompts}), data)
        for _ in range(options.repeats):
            with Engine(options.model, config) as engine:
                engine_alone_s(engine, tokenizer, prompts[:4])
                alone = engine_alone_s(engine, tokenizer, prompts)
            home = folder / "home"
            seconds, record = job_s(options.model, options, home, data)
            client.stop_runner(home=home)
            for key in ("ray_s", "load_s", "compile_s"):
                report.add(f"start-up, {key}", record[key])
            report.add("job tokens/s", rows * JOB_NEW_TOKENS / seconds)
            report.add("engine alone tokens/s", rows * JOB_NEW_TOKENS / alone)
            report.add("ratio to the engine alone", alone / seconds)
    return report
