"""Benchmarks, each a ratio to a limit or a peer measured in the same run.

    python -m scripts.bench decode  --model MODEL      128 rows, one token each per sweep
    python -m scripts.bench prefill --model MODEL      4 prompts of 128 tokens per sweep
    python -m scripts.bench peer    --model MODEL --llama-batched-bench PATH
    python -m scripts.bench job     --model MODEL      a job through Ray and Parquet
    python -m scripts.bench plan    --model MODEL      what a job was predicted to take
    python -m scripts.bench neighbours --model MODEL --memory SIZE   a plan, and others beside it
    python -m scripts.bench stream  --model MODEL      a model that streams, by rows on board
    python -m scripts.bench placement --model MODEL    interleaved against contiguous layers
    python -m scripts.bench reuse   --model MODEL      prompts that begin alike, computed once
    python -m scripts.bench memory  --model MODEL --memory SIZE   what a job's actor takes
    python -m scripts.bench tail    --model MODEL      output lengths unknown, against an oracle
    python -m scripts.bench attention                  64 rows on pages that they share, or not

Figures are medians of interleaved repeats. `--json FILE` keeps every sample.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from scripts.bench_attention import bench_attention
from scripts.bench_engine import bench_decode, bench_prefill
from scripts.bench_job import bench_job
from scripts.bench_memory import bench_memory
from scripts.bench_neighbours import bench_neighbours
from scripts.bench_peer import bench_peer
from scripts.bench_plan import bench_plan
from scripts.bench_report import Report, machine_facts
from scripts.bench_reuse import bench_reuse
from scripts.bench_stream import bench_placement, bench_stream
from scripts.bench_tail import bench_tail

BENCHES: dict[str, Callable[[argparse.Namespace], Report]] = {
    "decode": bench_decode,
    "prefill": bench_prefill,
    "peer": bench_peer,
    "job": bench_job,
    "plan": bench_plan,
    "neighbours": bench_neighbours,
    "stream": bench_stream,
    "placement": bench_placement,
    "reuse": bench_reuse,
    "memory": bench_memory,
    "tail": bench_tail,
    "attention": bench_attention,
}


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--model", type=Path, help="GGUF file (all but attention)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=128, help="rows on board (decode, peer)")
    parser.add_argument("--context", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens decoded per row")
    parser.add_argument("--job-rows", type=int, default=600, help="rows of the job")
    parser.add_argument("--job-tokens", type=int, default=64, help="tokens out per row (job)")
    parser.add_argument("--reuse-rows", type=int, default=200, help="rows (reuse)")
    parser.add_argument("--reuse-templates", type=int, default=40, help="templates (reuse)")
    parser.add_argument("--tail-rows", type=int, default=2000, help="rows (tail)")
    parser.add_argument("--memory", help="such as 1.5GiB (plan, memory, stream)")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--kv-type", choices=["f32", "f16", "int8"], default="f32")
    parser.add_argument("--reader", choices=["auto", "direct", "mmap"], default="auto")
    parser.add_argument("--threads", type=int, help="worker threads; default: every core")
    parser.add_argument("--llama-batched-bench", type=Path, help="peer's program (peer)")
    parser.add_argument("--json", type=Path, help="write all samples here")
    options = parser.parse_args(arguments)
    if options.model is None and options.bench != "attention":
        parser.error(f"{options.bench} needs --model")
    return options


def main() -> None:
    options = parse_arguments(sys.argv[1:])
    report = BENCHES[options.bench](options)
    print(report.table())
    if options.json is not None:
        facts = {"machine": machine_facts(), "bench": options.bench, **report.to_dict()}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
