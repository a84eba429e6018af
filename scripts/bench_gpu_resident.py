"""A model that stays on the GPU, through the engine, beside what its memory and its products allow.

    python -m scripts.synth_gguf /data/8b.gguf --layers 32 --hidden 4096 --ffn 14336 --heads 32 \
        --kv-heads 8 --vocab 128256 --mix Q4_K_M
    python -m scripts.bench_gpu_resident --model /data/8b.gguf --memory 24GiB --json FILE

Many rows: all sweeps, from the first admission to the last finished row. Their limit: the larger
of the products' FLOPs over the library's rate, and of the bytes of weights and KV pages that each
sweep reads over the memory's rate. One row: tokens per second of decoding, and the bytes of the
weights that each reads.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import cupy as cp
import numpy as np

from engine import EngineConfig, Request, SamplingParams
from engine.engine import Engine
from engine.planner import Workload
from ntx_batch.spec import parse_size
from scripts.bench_report import Report, machine_facts

FEW_TOKENS = 8  # of a sweep: products from quantised bytes
_SIDE, _COPY_NBYTES = 8192, 2 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--memory", default="24GiB")
    parser.add_argument("--kv-memory", default="12GiB")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write all samples here")
    options = parser.parse_args(sys.argv[1:])
    report = Report(f"{options.model.name} on a GPU, {options.memory}")
    report.facts["gpu"] = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    report.add("limit: memory, GB/s", memory_rate() / 1e9)
    report.add("limit: products of halves, TFLOP/s", product_rate() / 1e12)
    bench_many(report, options)
    bench_one(report, options)
    print(report.table(), flush=True)
    if options.json is not None:
        facts = {"machine": machine_facts(), "bench": "gpu resident", **report.to_dict()}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


def memory_rate() -> float:
    """Bytes per second of a copy inside the device, read and written."""
    source, target = cp.ones(_COPY_NBYTES, np.uint8), cp.empty(_COPY_NBYTES, np.uint8)
    return 2 * _COPY_NBYTES / _event_s(lambda: cp.copyto(target, source))


def product_rate() -> float:
    """FLOP/s of the library's product of random halves."""
    rng = cp.random.default_rng(0)
    a, b = (rng.standard_normal((_SIDE, _SIDE), dtype=np.float32).astype(np.float16) for _ in "ab")
    return float(2 * _SIDE**3 / _event_s(lambda: a @ b))


def _event_s(work: object, repeats: int = 9) -> float:
    assert callable(work)
    work()
    times = []
    for _ in range(repeats):
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(begin, end) / 1e3)
    cp.get_default_memory_pool().free_all_blocks()
    return float(np.median(times))


def config_of(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        device="gpu",
        memory_nbytes=parse_size(options.memory),
        kv_memory_nbytes=parse_size(options.kv_memory),
        reuse_prefixes=False,
    )


def requests(count: int, num_tokens: int, new: int) -> list[Request]:
    rng = np.random.default_rng(count)
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    return [
        Request(
            row_index=index,
            token_ids=rng.integers(3, 30_000, num_tokens).astype(np.int32),
            params=params,
        )
        for index in range(count)
    ]


def bench_many(report: Report, options: argparse.Namespace) -> None:
    rows, prompt, new = options.rows, options.prompt, options.new
    work = Workload(num_rows=rows, prompt_tokens=prompt, output_tokens=new)
    with Engine(options.model, config_of(options), workload=work) as engine:
        assert not engine.plan.streams, engine.plan.placement
        report.facts["plan"] = engine.plan.record()
        _run(engine, requests(40, prompt, 4))
        before = engine.sweeps.totals.copy()
        seconds = _run(engine, requests(rows, prompt, new))
        sweeps = engine.sweeps.totals - before
        weights = engine.plan.weights_nbytes
        values = _product_values(engine)
        kv_token = engine.kv_page_nbytes / 32
    positions = rows * new * (prompt + new / 2)  # that decoding tokens look back at
    read_s = (
        (sweeps.num_sweeps * weights + positions * kv_token)
        / 1e9
        / report.median("limit: memory, GB/s")
    )
    flops = 2 * values * rows * (prompt + new)
    compute_s = flops / 1e12 / report.median("limit: products of halves, TFLOP/s")
    report.add(f"{rows} rows: seconds", seconds)
    report.add(f"{rows} rows: sweeps", sweeps.num_sweeps)
    report.add(f"{rows} rows: rows per sweep", sweeps.num_rows / sweeps.num_sweeps)
    report.add(f"{rows} rows: tokens/s generated", rows * new / seconds)
    report.add(f"{rows} rows: tokens/s in and out", rows * (prompt + new) / seconds)
    report.add(f"{rows} rows: limit, s reading", read_s)
    report.add(f"{rows} rows: limit, s of products", compute_s)
    report.add(f"{rows} rows: share of the limit", max(read_s, compute_s) / seconds)


def bench_one(report: Report, options: argparse.Namespace) -> None:
    config = replace(config_of(options), sweep_tokens=FEW_TOKENS)
    with Engine(options.model, config) as engine:
        report.facts["products of one row"] = engine.record().get("products")
        for repeat in range(3):
            (request,) = requests(1, 64, 200)
            engine.add(replace(request, row_index=repeat))
            while engine.num_waiting or engine.num_prefilling:
                engine.sweep()
            for _ in range(20):
                engine.sweep()
            started, count = time.perf_counter(), 0
            while engine.num_running:
                engine.sweep()
                count += 1
            rate = count / (time.perf_counter() - started)
            report.add("one row: tokens/s", rate)
            share = rate * engine.plan.weights_nbytes / 1e9 / report.median("limit: memory, GB/s")
            report.add("one row: share of the memory's rate", share)


def _run(engine: Engine, rows: list[Request]) -> float:
    for request in rows:
        engine.add(request)
    started = time.perf_counter()
    while engine.has_work:
        for row in engine.sweep():
            assert row.status == "ok", row.error_message
    return time.perf_counter() - started


def _product_values(engine: Engine) -> int:
    """Weights that each token is multiplied by; the head's, once a row, are left out."""
    h = engine.hparams
    q, kv = h.num_heads * h.key_length, h.num_kv_heads * (h.key_length + h.value_length)
    return h.num_layers * h.hidden * (2 * q + kv + 3 * h.ffn)


if __name__ == "__main__":
    main()
