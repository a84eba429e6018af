"""A job on several engines against the same job on one, through submit, Ray and Parquet.

    python -m scripts.bench_engines --model MODEL                        two cores, one for each
    python -m scripts.bench_engines --model MODEL --device gpu --engines 2

Seconds are from the first admission to the last commit, of jobs whose engines are loaded: a small
job goes before. On a CPU the bare matrix products of a sweep, on one core and on as many as there
are engines, say how much faster these cores are together; on GPUs that is their number. `--json
FILE` keeps every sample. The exit code is 1 where the bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import ntx_batch
from engine import EngineConfig
from engine.engine import Engine
from engine.gguf_file import GgufFile
from engine.tokenizer import Tokenizer
from jobs.control import stop_runner
from jobs.home import Home
from ntx_batch.spec import parse_size
from scripts.bench_engine import BareProducts
from scripts.bench_job import random_prompts
from scripts.bench_report import Report, machine_facts

WARM_UP_ROWS = 16
BARE_TOKENS = 128  # of a sweep
CPU_BAR, GPU_BAR = 0.93, 0.925  # shares of what is possible; of two GPUs 1.85 times one


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--engines", type=int, default=2, help="that are compared with one")
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--context", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens generated for each row")
    parser.add_argument("--kv-memory", help="of one engine: bounds its rows on board, like 6GiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all samples here")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse_arguments(sys.argv[1:])
    report = bench_engines(options)
    print(report.table())
    if options.json is not None:
        facts = {"machine": machine_facts(), "bench": "engines", **report.to_dict()}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    bar = CPU_BAR if options.device == "cpu" else GPU_BAR
    return 0 if report.median("share of what is possible") >= bar else 1


def bench_engines(options: argparse.Namespace) -> Report:
    count = options.engines
    report = Report(
        f"{count} engines against one: {options.rows} rows, {options.context} in, "
        f"{options.new_tokens} out, {options.device}"
    )
    tokenizer = Tokenizer.from_gguf(GgufFile.open(options.model))
    prompts = random_prompts(tokenizer, options.rows, options.context)
    with tempfile.TemporaryDirectory(prefix="ntx-bench-") as folder:
        data = Path(folder) / "prompts.parquet"
        pq.write_table(pa.table({"prompt": prompts}), data)
        home = Path(folder) / "home"
        try:
            for _ in range(options.repeats):
                possible = _possible(options, report)
                one_s, one = _job_s(options, home, data, 1)
                several_s, several = _job_s(options, home, data, count)
                assert one.equals(several), "texts differ"
                report.add("rows/s on one engine", options.rows / one_s)
                report.add(f"rows/s on {count}", options.rows / several_s)
                report.add("times as fast", one_s / several_s)
                report.add("times as fast as is possible", possible)
                report.add("share of what is possible", one_s / several_s / possible)
        finally:
            stop_runner(Home.open(home))
    return report


def _possible(options: argparse.Namespace, report: Report) -> float:
    """How much faster the engines together can be than one."""
    if options.device == "gpu":
        return float(options.engines)
    one_s, several_s = (_bare_s(options.model, threads) for threads in (1, options.engines))
    report.add("bare products ms, one core", 1e3 * one_s)
    report.add(f"bare products ms, {options.engines} cores", 1e3 * several_s)
    return one_s / several_s


def _bare_s(model: Path, num_threads: int) -> float:
    """Seconds of the products of one sweep by our kernels, the median of some."""
    config = EngineConfig(device="cpu", num_threads=num_threads, kv_memory_nbytes=256 << 20)
    with Engine(model, config) as engine, BareProducts(engine, BARE_TOKENS, BARE_TOKENS) as bare:
        return sorted(bare.ours_s() for _ in range(7))[3]


def _job_s(
    options: argparse.Namespace, home: Path, data: Path, num_engines: int
) -> tuple[float, Any]:
    """Seconds of the job on so many engines, and its texts in the order of the input."""
    values: dict[str, Any] = {
        "model": options.model,
        "home": home,
        "device": options.device,
        "engines": num_engines,
        "ignore_eos": True,
        "max_tokens": options.new_tokens,
    }
    if options.device == "cpu":
        values["threads"] = num_engines
    if options.kv_memory is not None:
        values["kv_memory"] = _kv_memory(options, num_engines)
    for limit in (WARM_UP_ROWS, options.rows):
        job = ntx_batch.submit(data, limit=limit, **values)
        code = job.wait()
        assert code == 0, job.logs()
    record = job.snapshot().record
    assert len(record["engines"]) == num_engines, record["engines"]
    seconds = record["last_commit_at"] - record["first_admission_at"]
    return seconds, job.results()["generated_text"]


def _kv_memory(options: argparse.Namespace, num_engines: int) -> str | int:
    """On CPUs engines divide it; each is to have as much as the one."""
    if options.device == "gpu":
        return str(options.kv_memory)
    return parse_size(options.kv_memory) * num_engines


if __name__ == "__main__":
    sys.exit(main())
