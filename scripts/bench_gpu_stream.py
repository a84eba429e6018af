"""A model that streams from pinned memory, through the engine, beside the link's own rate.

    python -m scripts.synth_gguf /data/70b.gguf --layers 80 --hidden 8192 --ffn 28672 --heads 64 \
        --kv-heads 8 --vocab 128256 --mix Q4_K_M
    python -m scripts.bench_gpu_stream --model /data/70b.gguf --memory 24GiB --json FILE

Sweeps of the engine, wall time, sampling included. What a sweep computes without transfers comes
from a second engine on the same device that holds every weight, in as large sweeps.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np

from engine import EngineConfig, Request, SamplingParams
from engine.cuda_link import measure_link
from engine.engine import Engine
from engine.planner import Plan, Workload
from engine.requests import FinishedRow
from ntx_batch.spec import parse_size
from scripts.bench_report import Report, machine_facts

PROMPT = 512
SWEEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--memory", default="24GiB")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--context", type=int, default=576, help="tokens of a decoding row")
    parser.add_argument("--sweep-tokens", type=int, help="most of a sweep; else the plan's choice")
    parser.add_argument("--disk-layers", type=int, default=0, help="run again with so many on disk")
    parser.add_argument("--skip", nargs="*", default=[], help="parts to leave out")
    parser.add_argument("--kv-memory")
    parser.add_argument("--reader", default="auto")
    parser.add_argument("--json", type=Path, help="write all samples here")
    options = parser.parse_args(sys.argv[1:])
    report = Report(f"{options.model.name} streamed to a GPU, {options.memory}")
    try:
        bench(report, options)
    finally:
        print(report.table(), flush=True)
        if options.json is not None:
            facts = {"machine": machine_facts(), "bench": "gpu stream", **report.to_dict()}
            options.json.write_text(json.dumps(facts, indent=1) + "\n")


class Watch:
    """The most device memory in use by all processes, sampled while it is entered."""

    def __init__(self) -> None:
        self.most_nbytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.05):
            free, total = cp.cuda.runtime.memGetInfo()
            self.most_nbytes = max(self.most_nbytes, total - free)


def bench(report: Report, options: argparse.Namespace) -> None:
    report.facts["gpu"] = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    link = measure_link()
    report.facts["link, GB/s"] = round(link / 1e9, 2)
    config = config_of(options)
    with Watch() as watch:
        plan = run_streamed(report, options, config, None, link)
    report.facts["device memory, most in use, GiB"] = round(watch.most_nbytes / 2**30, 2)
    if options.disk_layers:
        spread_plan = with_disk_layers(plan, options.disk_layers)
        run_streamed(report, options, config, spread_plan, link)
    if "compute" not in options.skip:
        add_floors(report, time_compute(report, options, plan.sweep_tokens), link)


def config_of(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        device="gpu",
        expand="never",
        kv_memory_nbytes=parse_size(options.kv_memory) if options.kv_memory else None,
        memory_nbytes=parse_size(options.memory),
        sweep_tokens=options.sweep_tokens,
        reuse_prefixes=False,  # the same prompts come again
        reader=options.reader,
    )


def with_disk_layers(plan: Plan, count: int) -> Plan:
    """`count` of the layers that host memory holds on disk instead, far apart."""
    near = [layer for layer, stays in enumerate(plan.host) if stays]
    step = len(near) / count
    far = {near[int((place + 0.5) * step)] for place in range(count)}
    host = tuple(stays and layer not in far for layer, stays in enumerate(plan.host))
    return replace(plan, host=host)


def run_streamed(
    report: Report,
    options: argparse.Namespace,
    config: EngineConfig,
    plan: Plan | None,
    link: float,
) -> Plan:
    started = time.perf_counter()
    work = Workload(num_rows=1000, prompt_tokens=PROMPT, output_tokens=options.context - PROMPT)
    with Engine(options.model, config, plan=plan, workload=work) as engine:
        far = "" if plan is None else f"{options.disk_layers} on disk: "
        report.facts[f"{far}seconds to load"] = round(time.perf_counter() - started, 1)
        report.facts[f"{far}plan"] = engine.plan.record()
        print(f"{far}loaded: {report.facts[f'{far}plan']}", flush=True)
        for name, sweeps in kinds(options).items():
            if name not in options.skip:
                measure(report, engine, f"{far}{name}", sweeps, link)
        return engine.plan


def time_compute(
    report: Report, options: argparse.Namespace, sweep_tokens: int
) -> dict[str, float]:
    """Seconds of each kind of sweep with every weight on the device."""
    config = replace(
        config_of(options),
        memory_nbytes=None,
        kv_memory_nbytes=24 << 30,
        sweep_tokens=sweep_tokens,
    )
    found = {}
    with Engine(options.model, config) as engine:
        assert not engine.plan.streams, "the device does not hold the model"
        for name, sweeps in kinds(options).items():
            found[name] = float(np.median([sweeps(engine)[0] for _ in range(2)]))
            report.add(f"{name}: s without transfers", found[name])
    return found


def add_floors(report: Report, compute: dict[str, float], link: float) -> None:
    """Each kind of sweep as a ratio to the larger of its transfers and its computing."""
    for label, streamed in report.facts["bytes streamed by a sweep"].items():
        compute_s = compute[label.rpartition(": ")[2]]
        for seconds in report.samples[f"{label}: s"]:
            report.add(
                f"{label}: sweep / max(link, computing)", seconds / max(streamed / link, compute_s)
            )


Sweeps = Callable[[Engine], tuple[float, int, int]]


def kinds(options: argparse.Namespace) -> dict[str, Sweeps]:
    """By name, what runs some sweeps of a kind: (seconds, tokens, decoded tokens) of one."""
    return {
        "decode": lambda engine: decode(engine, options),
        "mixed": lambda engine: mixed(engine, options),
        "prefill": lambda engine: prefill(engine, options),
    }


def measure(
    report: Report,
    engine: Engine,
    name: str,
    sweeps: Sweeps,
    link: float,
) -> None:
    sweeps(engine)  # what products are made of is checked once for each shape
    engine.sweeps.recent.clear()
    for _ in range(3):
        seconds, num_tokens, num_decoded = sweeps(engine)
        records = list(engine.sweeps.recent)[-SWEEPS:]
        streamed = records[-1].streamed_nbytes
        report.add(f"{name}: s", seconds)
        report.add(f"{name}: tokens/s", num_tokens / seconds)
        if num_decoded:
            report.add(f"{name}: decoded tokens/s", num_decoded / seconds)
        report.add(f"{name}: GB/s into the ring", streamed / seconds / 1e9)
        report.add(f"{name}: share of link", streamed / seconds / link)
        report.add(f"{name}: s copying", float(np.mean([r.copy_busy_s for r in records])))
        report.add(f"{name}: s computing stood still", float(np.mean([r.wait_s for r in records])))
        print(f"{name}: {seconds:.3f} s, {num_tokens / seconds:.0f} tokens/s", flush=True)
    report.facts.setdefault("bytes streamed by a sweep", {})[name] = streamed


def decode(engine: Engine, options: argparse.Namespace) -> tuple[float, int, int]:
    board(engine, options)
    rows = engine.num_running
    return timed(engine), rows, rows


def prefill(engine: Engine, options: argparse.Namespace) -> tuple[float, int, int]:
    engine.cancel_all()
    sweep_tokens = engine.plan.sweep_tokens
    add_prompts(engine, (SWEEPS + 1) * sweep_tokens // PROMPT, PROMPT, 1)
    engine.sweep()
    num_tokens = sweep_tokens // PROMPT * PROMPT
    return timed(engine), num_tokens, 0


def mixed(engine: Engine, options: argparse.Namespace) -> tuple[float, int, int]:
    """Decoding rows, and prompts up to nine tenths of a sweep beside them."""
    board(engine, options)
    rows = engine.num_running
    count = int(0.9 * engine.plan.sweep_tokens - rows) // PROMPT
    elapsed, tokens = 0.0, 0
    for turn in range(SWEEPS):
        add_prompts(engine, count, PROMPT, 1, first=10_000 * (turn + 1))
        started = time.perf_counter()
        engine.sweep()
        elapsed += time.perf_counter() - started
        tokens += engine.sweeps.recent[-1].num_tokens
        if engine.num_waiting:
            sys.exit("no room for prompts beside the decoding rows; raise --kv-memory")
    return elapsed / SWEEPS, tokens // SWEEPS, rows


def board(engine: Engine, options: argparse.Namespace) -> None:
    """Put decoding rows on board, at the end of their context."""
    if engine.num_running and not engine.num_waiting and not engine.num_prefilling:
        return
    new = options.context // 4  # enough for all kinds of sweeps
    add_prompts(engine, options.rows, options.context - new, new)
    engine.sweep()
    while engine.num_prefilling:
        engine.sweep()
    if engine.num_running < options.rows:
        sys.exit(
            f"{engine.num_running} of {options.rows} rows are on board: the plan's KV cache holds "
            "no more; ask for it by --kv-memory, or for less by --rows or --context"
        )


def add_prompts(engine: Engine, count: int, num_tokens: int, new: int, first: int = 0) -> None:
    rng = np.random.default_rng(first)
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    for index in range(first, first + count):
        ids = rng.integers(3, 30_000, num_tokens).astype(np.int32)
        engine.add(Request(row_index=index, token_ids=ids, params=params))


def timed(engine: Engine) -> float:
    """Seconds of a sweep, over a few of them."""
    finished: list[FinishedRow] = []
    started = time.perf_counter()
    for _ in range(SWEEPS):
        finished += engine.sweep()
    seconds = (time.perf_counter() - started) / SWEEPS
    assert all(row.status == "ok" for row in finished), finished[0].error_message
    return seconds


if __name__ == "__main__":
    main()
