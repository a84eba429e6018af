"""A job through the engine on a GPU that its model does not fit, from first admission to last row.

    python -m scripts.synth_gguf /tmp/70b.gguf --layers 80 --hidden 8192 --ffn 28672 --heads 64 \
        --kv-heads 8 --vocab 128256 --mix Q4_K_M --hollow
    python -m scripts.bench_gpu_job --model /tmp/70b.gguf --rows 1000 --kv-type int8 --json FILE

Rows have random prompts, none with a beginning in common but for `--prefix`, and outputs of one
length. Weights are random blocks made as they are read. The plan is made from rates measured in the
run, for `--plan-rows` rows; a prediction of the rows that were run stands beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np

from engine import EngineConfig, Request, SamplingParams
from engine.cuda_link import measure_link
from engine.devices import open_ops
from engine.engine import Engine
from engine.gguf_file import GgufFile
from engine.hparams import read_hparams
from engine.planner import Rates, Workload
from engine.rates import probe_rates
from engine.sweep_log import SweepRecord
from kernels.ops import PAGE_TOKENS, Ops
from ntx_batch.spec import parse_size
from scripts.bench_gpu_stream import Watch
from scripts.bench_report import Report, machine_facts
from scripts.filled_reader import FilledReader

# llama.cpp b11434 on an H200 with all layers in pinned memory: tokens/s of prompts, and of 96 rows
# that decode, at this rate of the link.
PEER_PREFILL, PEER_DECODE, PEER_LINK = 828.0, 109.6, 55.2e9
GB = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="hollow, mixed as Q4_K_M")
    parser.add_argument("--memory", default="24GiB")
    parser.add_argument("--host-memory")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--host-kv", default="auto", choices=["auto", "never"])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--plan-rows", type=int, default=1000, help="of the job that is planned")
    parser.add_argument("--prefix", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt's own")
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--sweep-tokens", type=int)
    parser.add_argument("--json", type=Path, help="write all samples here")
    options = parser.parse_args(sys.argv[1:])
    report = Report(
        f"{options.rows} rows of {options.prefix} + {options.prompt} + {options.output}"
    )
    try:
        bench(report, options)
    finally:
        print(report.table(), flush=True)
        if options.json is not None:
            facts = {"machine": machine_facts(), "bench": "gpu job", **report.to_dict()}
            options.json.write_text(json.dumps(facts, indent=1) + "\n")


def bench(report: Report, options: argparse.Namespace) -> None:
    facts = report.facts
    facts["command"] = " ".join(sys.argv[1:])
    facts["gpu"] = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    config = EngineConfig(
        device="gpu",
        expand="never",
        kv_type=options.kv_type,
        host_kv=options.host_kv,
        memory_nbytes=parse_size(options.memory),
        host_memory_nbytes=parse_size(options.host_memory) if options.host_memory else None,
        sweep_tokens=options.sweep_tokens,
    )
    ops, started = open_ops(config), time.perf_counter()
    rates = rates_of(options, ops)
    facts["seconds to measure rates"] = round(time.perf_counter() - started, 1)
    link = rates.link_nbytes_per_s or measure_link()
    facts["link, GB/s"] = round(link / GB, 2)
    started = time.perf_counter()
    with Watch() as watch:
        engine = Engine(
            options.model,
            config,
            ops=ops,
            reader_factory=lambda paths: FilledReader(paths[0]),
            rates=rates,
            workload=workload_of(options, options.plan_rows),
        )
        with engine:
            facts["seconds to load"] = round(time.perf_counter() - started, 1)
            facts["plan"] = engine.plan.record()
            facts["predicted, of the plan's job"] = dict(engine.plan.predicted)
            print(json.dumps(facts, indent=1), flush=True)
            done = run(engine, options)
            predicted = engine.predict(workload_of(options, done.num_rows))
    facts["device memory, most in use, GiB"] = round(watch.most_nbytes / 2**30, 2)
    facts["predicted, of the rows run"] = predicted
    add_figures(report, options, done, link)


def rates_of(options: argparse.Namespace, ops: Ops) -> Rates:
    """Measured here, but for the disk, which nothing streams from."""
    file = GgufFile.open(options.model)
    matrices = {
        t.type_name
        for name, t in file.tensors.items()
        if name.startswith("blk.") and len(t.shape) > 1
    }
    return probe_rates(
        ops,
        sorted(matrices),
        (),
        "",
        hparams=read_hparams(file),
        head_type=file.tensors["output.weight"].type_name,
        expand=False,
        kv_type=options.kv_type,
    )


def workload_of(options: argparse.Namespace, num_rows: int) -> Workload:
    prompt, prefix = options.prefix + options.prompt, options.prefix
    return Workload(
        num_rows=num_rows,
        prompt_tokens=prompt,
        output_tokens=options.output,
        reused_tokens=prefix * (num_rows - 1) / num_rows,
        reused_pages=prefix // PAGE_TOKENS * (num_rows - 1) / num_rows,
        longest_tokens=prompt + options.output,
    )


@dataclass(slots=True)
class Done:
    """seconds: from the first admission on; sweeps: each, with the rows then on board"""

    num_rows: int
    seconds: float = 0.0
    num_finished: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    sweeps: list[tuple[SweepRecord, int, bool]] = field(default_factory=list)


def run(engine: Engine, options: argparse.Namespace) -> Done:
    """The whole job, or as much of it as goes into `--seconds`."""
    rng = np.random.default_rng(1)
    beginning = rng.integers(3, 30_000, options.prefix)
    params = SamplingParams(max_tokens=options.output, ignore_eos=True)
    for index in range(options.rows):
        ids = np.concatenate([beginning, rng.integers(3, 30_000, options.prompt)])
        engine.add(Request(row_index=index, token_ids=ids.astype(np.int32), params=params))
    done, started = Done(options.rows), time.perf_counter()
    while engine.has_work and done.seconds < options.seconds:
        finished = engine.sweep()
        assert all(row.status == "ok" for row in finished), finished[0].error_message
        done.seconds = time.perf_counter() - started
        done.num_finished += len(finished)
        prefilling = engine.num_prefilling > 0
        done.sweeps.append(
            (engine.sweeps.recent[-1], engine.num_running + len(finished), prefilling)
        )
        if len(done.sweeps) % 25 == 0:
            record = done.sweeps[-1][0]
            print(
                f"{done.seconds:7.1f} s  {done.num_finished} rows done, {engine.num_running} on "
                f"board, {record.num_tokens} tokens in {record.seconds:.3f} s, waited "
                f"{record.wait_s:.3f} s, KV in {record.kv_in_nbytes / GB:.1f} GB",
                flush=True,
            )
    totals = engine.totals
    done.prompt_tokens, done.output_tokens = totals.prompt_tokens, totals.completion_tokens
    done.computed_tokens = totals.prompt_tokens - totals.reused_tokens
    return done


def add_figures(report: Report, options: argparse.Namespace, done: Done, link: float) -> None:
    facts, records = report.facts, [record for record, _, _ in done.sweeps]
    copied = sum(record.copied_nbytes for record in records)
    facts["seconds, first admission to the end"] = round(done.seconds, 1)
    facts["rows finished"] = done.num_finished
    facts["rows on board, most"] = max(rows for _, rows, _ in done.sweeps)
    facts["sweeps"] = len(records)
    facts["share of link"] = round(copied / done.seconds / link, 3)
    facts["KV in, GB"] = round(sum(record.kv_in_nbytes for record in records) / GB, 1)
    facts["KV out, GB"] = round(sum(record.kv_out_nbytes for record in records) / GB, 1)
    facts["prompt tokens, computed"] = [done.prompt_tokens, done.computed_tokens]
    facts["output tokens"] = done.output_tokens
    facts["tokens/s, prompts and outputs"] = round(
        (done.prompt_tokens + done.output_tokens) / done.seconds, 1
    )
    if done.num_finished == done.num_rows:
        peer_s = done.prompt_tokens / PEER_PREFILL + done.output_tokens / PEER_DECODE
        peer_s *= PEER_LINK / link
        facts["peer's seconds at this link"] = round(peer_s, 1)
        facts["times the peer's rate"] = round(peer_s / done.seconds, 3)
    decoding = [(r, rows) for r, rows, prefilling in done.sweeps if not prefilling]
    most = max((r.num_rows for r, _ in decoding), default=0)
    full = [r for r, _ in decoding if r.num_rows >= 0.98 * most]
    for record in full:
        report.add("decode sweeps of a full board: s", record.seconds)
        report.add("decode sweeps of a full board: outputs/s", record.num_rows / record.seconds)
    facts["rows in them"] = most
    facts["sweeps by 25"] = [
        _mean(done.sweeps[at : at + 25]) for at in range(0, len(done.sweeps), 25)
    ]


def _mean(sweeps: list[tuple[SweepRecord, int, bool]]) -> dict[str, Any]:
    records = [record for record, _, _ in sweeps]
    return {
        "s": round(float(np.mean([r.seconds for r in records])), 4),
        "tokens": round(float(np.mean([r.num_tokens for r in records]))),
        "outputs": round(float(np.mean([r.load.outputs for r in records]))),
        "rows": round(float(np.mean([rows for _, rows, _ in sweeps]))),
        "waited s": round(float(np.mean([r.wait_s for r in records])), 4),
        "copying s": round(float(np.mean([r.copy_busy_s for r in records])), 4),
        "KV in GB": round(float(np.mean([r.kv_in_nbytes for r in records])) / GB, 2),
    }


if __name__ == "__main__":
    main()
