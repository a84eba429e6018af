"""The engine against llama.cpp on the same model, rows and contexts, interleaved."""

from __future__ import annotations

import argparse
import json
import subprocess

from scripts.bench_engine import PREFILL_ROWS, decode_s, make_engine, prefill_s
from scripts.bench_report import Report


def peer_run(options: argparse.Namespace, threads: int, rows: int) -> dict[str, float]:
    """One run of llama-batched-bench with its default KV; returns its JSON line."""
    context = 1 << (rows * (options.context + options.new_tokens) - 1).bit_length()
    command = [
        str(options.llama_batched_bench), "-m", str(options.model), "-c", str(context),
        "-b", "2048", "-ub", "512", "-t", str(threads), "-tb", str(threads),
        "-npp", str(options.context), "-ntg", str(options.new_tokens), "-npl", str(rows),
        "--output-format", "jsonl",
    ]  # fmt: skip
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line for line in output.splitlines() if line.startswith("{")]
    result: dict[str, float] = json.loads(lines[-1])
    return result


def bench_peer(options: argparse.Namespace) -> Report:
    if options.llama_batched_bench is None:
        raise SystemExit("peer: --llama-batched-bench PATH names the peer's program")
    report = Report(f"against llama.cpp, {options.rows} rows, {options.kv_type} KV")
    prefill_tokens = PREFILL_ROWS * options.context
    with make_engine(options, 2048) as decoder, make_engine(options, prefill_tokens) as prefiller:
        threads = decoder.record()["num_threads"]
        report.facts["threads"] = threads
        for _ in range(options.repeats):
            seconds, _ = decode_s(decoder, options.rows, options.context, options.new_tokens)
            decode = options.rows * options.new_tokens / seconds
            peer_decode = peer_run(options, threads, options.rows)["speed_tg"]
            prefill = 6 * prefill_tokens / prefill_s(prefiller, PREFILL_ROWS, options.context, 6)
            peer_prefill = peer_run(options, threads, PREFILL_ROWS)["speed_pp"]
            report.add("decode tokens/s", decode)
            report.add("decode tokens/s, llama.cpp", peer_decode)
            report.add("decode ratio", decode / peer_decode)
            report.add("prefill tokens/s", prefill)
            report.add("prefill tokens/s, llama.cpp", peer_prefill)
            report.add("prefill ratio", prefill / peer_prefill)
    return report
