"""Benchmarks of the GPU's operations, each beside a limit measured in the same run.

    python -m scripts.bench_gpu [--json FILE] [--only few ...]

Shapes are those of a layer of a 70B model: hidden 8192, ffn 28672, 64 heads on 8 KV heads of 128.
Every figure is the median of event timings of ten calls on random data.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import cupy as cp
import numpy as np

from engine.requests import Request, SamplingParams
from engine.sampler import RowSampler, choose
from kernels.cuda import matrix, sharing
from kernels.cuda.backend import CudaOps
from kernels.cuda.recordings import Recordings
from kernels.ops import PAGE_TOKENS, Batch, HeadParams, KvShape, Rope
from kernels.quants import BlockTensor
from scripts.bench_report import Report, machine_facts
from scripts.synth_blocks import TYPES, random_weights

HIDDEN, FFN = 8192, 28672
SHAPES = {
    "qkv": (HIDDEN + 2 * 1024, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "gate_up": (2 * FFN, HIDDEN),
    "ffn_down": (HIDDEN, FFN),
}
KV = KvShape(num_layers=1, num_kv_heads=8, key_length=128, value_length=128)
HEAD = HeadParams(num_heads=64, num_kv_heads=8, key_length=128, value_length=128, norm_eps=1e-5)
PREFIX = 1500  # tokens that rows have in common
VOCABULARY = 128_256
SAMPLING = {
    "greedy": SamplingParams(),
    "greedy with 5 logprobs": SamplingParams(logprobs=5),
    "temperature": SamplingParams(temperature=1.0),
    "top_k 40": SamplingParams(temperature=1.0, top_k=40, top_p=0.95),
    "top_p 0.95": SamplingParams(temperature=0.7, top_p=0.95),
    "penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.2),
}
REPEATS, CALLS = 7, 10  # timings, and calls in each: launches are hidden as in a sweep

_READ = """
extern "C" __global__ void read_all(long long count, const uint4* __restrict__ source,
                                    unsigned* found) {
  unsigned bits = 0;
  const long long step = (long long)gridDim.x * blockDim.x;
#pragma unroll 8
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step) {
    const uint4 some = __ldg(source + i);
    bits |= some.x ^ some.y ^ some.z ^ some.w;
  }
  if (bits == 0x12345678u) *found = bits;
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all samples here")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="leave the others out")
    options = parser.parse_args(sys.argv[1:])
    report = bench(options.only or SECTIONS)
    print(report.table())
    if options.json is not None:
        facts = {"machine": machine_facts(), "bench": "gpu", **report.to_dict()}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


def bench(sections: Iterable[str]) -> Report:
    ops = CudaOps()
    report = Report("GPU operations")
    report.facts["gpu"] = ops.device_name
    report.facts["driver"] = ops.driver_version()
    for name in sections:
        SECTIONS[name](report, ops)
        cp.get_default_memory_pool().free_all_blocks()
    ops.close()
    return report


def timed(call: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Seconds of a call, by events around several, after two to warm up."""
    call()
    call()
    seconds = []
    for _ in range(repeats):
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        seconds.append(cp.cuda.get_elapsed_time(begin, end) / 1e3 / CALLS)
    return seconds


def replayed_s(call: Callable[[], None]) -> float:
    """Seconds of a call, the median, where several are recorded together as a small sweep is."""
    recordings = Recordings()

    def calls() -> None:
        for _ in range(CALLS):
            call()

    for _ in range(2):
        recordings.run("calls", calls)
    seconds = median(timed(lambda: recordings.run("calls", calls))) / CALLS
    assert recordings.num_replayed > REPEATS, recordings.num_replayed
    recordings.clear()
    return seconds


def add_rates(report: Report, name: str, amount: float, seconds: list[float]) -> None:
    for second in seconds:
        report.add(name, amount / second)


def bench_limits(report: Report, ops: CudaOps) -> None:
    source, target = cp.ones(1 << 31, cp.uint8), cp.empty(1 << 31, cp.uint8)
    seconds = timed(lambda: cp.copyto(target, source))
    add_rates(report, "limit: device memory, GB/s", 2 * source.nbytes / 1e9, seconds)
    pinned = cp.cuda.alloc_pinned_memory(1 << 30)
    np.frombuffer(pinned, np.uint8, 1 << 30)[:] = 7
    stream = cp.cuda.get_current_stream()
    seconds = timed(lambda: target.data.copy_from_host_async(pinned.ptr, 1 << 30, stream))
    add_rates(report, "limit: pinned memory to device, GB/s", (1 << 30) / 1e9, seconds)


def synthetic(ops: CudaOps, type_name: str, num_outputs: int, num_inputs: int) -> Any:
    return ops.pack([tensor(type_name, num_outputs, num_inputs)], expand=False)


def tensor(type_name: str, num_outputs: int, num_inputs: int) -> BlockTensor:
    quant_type = TYPES[type_name]
    num_blocks = num_outputs * num_inputs // quant_type.block_size
    data = random_weights(np.random.SFC64(1), quant_type, num_blocks, num_inputs**-0.5)
    return BlockTensor("w", quant_type, num_outputs, num_inputs, data.reshape(num_outputs, -1))


def read_rate() -> float:
    """Bytes per second at which a kernel reads device memory, the median."""
    kernel = cp.RawKernel(_READ, "read_all")
    source, found = cp.ones(1 << 31, cp.uint8), cp.zeros(1, cp.uint32)
    arguments = (np.int64(source.nbytes // 16), source, found)
    grid = (num_processors() * 8,)
    return float(source.nbytes) / median(timed(lambda: kernel(grid, (512,), arguments)))


def num_processors() -> int:
    return int(cp.cuda.Device().attributes["MultiProcessorCount"])


def bench_few(report: Report, _: CudaOps) -> None:
    """Products of few tokens, replayed as in a sweep, beside the rate at which memory is read; no
    weight is in a cache.
    """
    ops, rate = CudaOps(products="few"), read_rate()
    report.add("limit: reading device memory, GB/s", rate / 1e9)
    for type_name in ("Q4_K", "Q6_K", "Q8_0"):
        copies = {name: few_weights(ops, type_name, *shape) for name, shape in SHAPES.items()}
        for num_tokens in (1, 2, 4, 8):
            nbytes, total = 0, 0.0
            for name, weights in copies.items():
                seconds = replayed_s(few_call(ops, weights, num_tokens))
                label = f"few-token product {type_name} {name}, {num_tokens} tokens"
                report.add(f"{label}, share of read rate", weights[0].nbytes / seconds / rate)
                nbytes, total = nbytes + weights[0].nbytes, total + seconds
            label = f"few-token products {type_name} of a layer, {num_tokens} tokens"
            report.add(f"{label}, GB/s", nbytes / total / 1e9)
            report.add(f"{label}, share of read rate", nbytes / total / rate)
    ops.close()


def few_weights(ops: CudaOps, type_name: str, num_outputs: int, num_inputs: int) -> list[Any]:
    """Copies of a weight, more than caches hold."""
    one = tensor(type_name, num_outputs, num_inputs)
    there, count = cp.asarray(one.data), 2 + (1 << 28) // one.data.nbytes
    return [ops.pack([replace(one, data=there.copy())], expand=False) for _ in range(count)]


def few_call(ops: CudaOps, weights: list[Any], num_tokens: int) -> Callable[[], None]:
    shape = (num_tokens, weights[0].num_inputs)
    x = cp.random.standard_normal(shape, dtype=cp.float32)
    out = cp.empty((num_tokens, weights[0].num_outputs), cp.float32)
    turn = cycle(weights)
    return lambda: ops.products.matmul(x, next(turn), out, None, False)


def bench_dequantize(report: Report, ops: CudaOps) -> None:
    shape = (8192, 16384)
    halves = cp.empty(shape, cp.float16)
    for type_name in TYPES:
        weight = matrix.pack([tensor(type_name, *shape)], expand=False)
        seconds = timed(partial(matrix.dequantize, weight, 0, halves))
        add_rates(
            report,
            f"dequantise {type_name}, GB/s read and written",
            (weight.nbytes + halves.nbytes) / 1e9,
            seconds,
        )


def bench_tiles(report: Report, ops: CudaOps) -> None:
    weights = {name: synthetic(ops, "Q4_K", *shape) for name, shape in SHAPES.items()}
    for num_tokens in (1, 96, 256, 1024, 2048):
        bench_products(report, ops, weights, num_tokens)
    report.facts["product paths"] = str(ops.products.paths())


def bench_products(report: Report, ops: CudaOps, weights: dict[str, Any], num_tokens: int) -> None:
    plan = ops.plan(rows_of([(0, 1)] * num_tokens), KV, HEAD.num_heads)
    total = np.zeros((3, REPEATS))
    flops = sum(2.0 * num_tokens * n * m for n, m in SHAPES.values())
    for name, (num_outputs, num_inputs) in SHAPES.items():
        x = cp.random.standard_normal((num_tokens, num_inputs), dtype=cp.float32)
        out = cp.zeros((num_tokens, num_outputs), cp.float32)
        weight, accumulate = weights[name], name in ("attn_output", "ffn_down")
        whole = cp.empty((num_outputs, num_inputs), cp.float16)
        expanded = matrix.CudaMatrix(num_outputs, num_inputs, weight.parts, whole)
        matrix.dequantize(weight, 0, whole)
        halves = x.astype(cp.float16)

        for way, used in enumerate((weight, expanded)):
            call = partial(ops.matmul, 0, plan, x, used, out, accumulate=accumulate)
            total[way] += timed(call)
        total[2] += timed(partial(cp.matmul, halves, whole.T))
    names = ("dequantise and multiply", "multiply expanded", "limit: library alone, half")
    for name, seconds in zip(names, total, strict=True):
        label = f"{name}, {num_tokens} tokens, TFLOP/s"
        add_rates(report, label, flops / 1e12, list(seconds))
    for second, limit in zip(total[0], total[2], strict=True):
        report.add(f"library / ours, {num_tokens} tokens", limit / second)


def rows_of(spans: list[tuple[int, int]]) -> Batch:
    """Rows whose tokens of positions [begin, end) are in the sweep, their pages shuffled."""
    sizes = [end - begin for begin, end in spans]
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    most = max(-(-end // PAGE_TOKENS) for _, end in spans)
    pages = np.random.default_rng(3).permutation(len(spans) * most).astype(np.int32)
    return Batch(
        token_ids=np.zeros(bounds[-1], np.int32),
        positions=np.concatenate([np.arange(*span, dtype=np.int32) for span in spans]),
        rows=np.repeat(np.arange(len(spans), dtype=np.int32), sizes),
        page_table=pages.reshape(len(spans), most),
        segments=np.stack([bounds[:-1], bounds[1:]], axis=1),
        logit_indices=bounds[1:] - 1,
    )


def bench_attentions(report: Report, ops: CudaOps) -> None:
    bench_attention(report, ops, "decode attention, 96 rows x 1000", [(999, 1000)] * 96)
    bench_attention(report, ops, "decode attention, 1 row x 30000", [(29999, 30000)])
    bench_attention(report, ops, "prefill attention, 4 prompts x 512", [(0, 512)] * 4)
    bench_attention(report, ops, "prefill attention, 512 after 8192", [(8192, 8704)])


def bench_attention(report: Report, ops: CudaOps, name: str, spans: list[tuple[int, int]]) -> None:
    batch = rows_of(spans)
    pool = ops.kv_pool(KV, num_pages=batch.page_table.size, kv_type="f16")
    pool.keys[...] = cp.random.standard_normal(pool.keys.size, cp.float32).reshape(pool.keys.shape)
    pool.values[...] = pool.keys.reshape(pool.values.shape)
    q = cp.random.standard_normal((batch.num_tokens, 64 * 128), dtype=cp.float32)
    out, plan = cp.empty_like(q), ops.plan(batch, KV, HEAD.num_heads)
    seconds = timed(lambda: ops.attention(0, plan, q, HEAD, batch, pool, 0, out))
    positions = int((batch.positions + 1).sum())
    kv_nbytes = sum(end for _, end in spans) * KV.num_kv_heads * 256 * 2
    add_rates(report, f"{name}, GB/s of KV", kv_nbytes / 1e9, seconds)
    add_rates(report, f"{name}, TFLOP/s", 4.0 * positions * 64 * 128 / 1e12, seconds)
    add_rates(report, f"{name}, ms", 1e3, [1 / second for second in seconds])


def bench_sharing(report: Report, ops: CudaOps) -> None:
    """Rows that decode behind one prefix: through its pages together, each by itself, and each with
    pages of its own.
    """
    for num_rows, kv_type in ((96, "f16"), (96, "int8"), (1000, "f16")):
        name = f"decode attention, {num_rows} rows behind {PREFIX} tokens, {kv_type}"
        bench_prefix(report, ops, name, num_rows, kv_type)


def bench_prefix(report: Report, ops: CudaOps, name: str, num_rows: int, kv_type: Any) -> None:
    """A layer's attention of rows that have gone on for 20 to 148 tokens."""
    positions = [PREFIX + 20 + 128 * row // num_rows for row in range(num_rows)]
    batch = rows_of([(position, position + 1) for position in positions])
    own, common = batch.page_table, PREFIX // PAGE_TOKENS
    shared = own.copy()
    shared[:, :common] = own[0, :common]
    pool = ops.kv_pool(KV, num_pages=own.size, kv_type=kv_type, num_rows=num_rows)
    fill(pool)
    q = cp.random.standard_normal((num_rows, 64 * 128), dtype=cp.float32)
    ways = {"together": shared, "each by itself": shared, "with own pages": own}
    samples, outs = {}, {}
    for way, table in ways.items():
        with each_alone(way != "together"):
            sweep = replace(batch, page_table=table)
            plan, out = ops.plan(sweep, KV, HEAD.num_heads), cp.empty_like(q)
        call = partial(ops.attention, 0, plan, q, HEAD, sweep, pool, 0, out)
        samples[way], outs[way] = timed(call), out
        for second in samples[way]:
            report.add(f"{name}, {way}, ms", 1e3 * second)
        tasks = plan.host_tasks
        report.facts[f"{name}, {way}, pages read"] = tasks.pages_read(8, KV.num_kv_heads)
    assert bool((outs["together"] == outs["each by itself"]).all()), name
    for way in ("each by itself", "with own pages"):
        for alone, together in zip(samples[way], samples["together"], strict=True):
            report.add(f"{name}, {way} / together", alone / together)


@contextlib.contextmanager
def each_alone(is_alone: bool) -> Iterator[None]:
    """Inside, no sweep is planned with rows that read pages together."""
    least = sharing.LEAST_SAVED
    if is_alone:
        sharing.LEAST_SAVED = 1 << 60
    try:
        yield
    finally:
        sharing.LEAST_SAVED = least


def fill(pool: Any) -> None:
    """Random keys, values and scales."""
    for array in (pool.keys, pool.values, pool.scales, pool.open_pages):
        for layer in array if array.size else ():
            numbers = cp.random.standard_normal(layer.size, cp.float32).reshape(layer.shape)
            layer[...] = 30 * numbers if layer.dtype == cp.int8 else numbers
    pool.scales[...] = abs(pool.scales) / 30


def bench_pointwise(report: Report, ops: CudaOps) -> None:
    num_tokens = 2048
    batch = rows_of([(0, num_tokens)])
    plan = ops.plan(batch, KV, HEAD.num_heads)
    x = cp.random.standard_normal((num_tokens, HIDDEN), dtype=cp.float32)
    gate_up = cp.random.standard_normal((num_tokens, 2 * FFN), dtype=cp.float32)
    qkv = cp.random.standard_normal((num_tokens, SHAPES["qkv"][0]), dtype=cp.float32)
    pool = ops.kv_pool(KV, num_pages=batch.page_table.size, kv_type="f16")
    table = cp.ones((num_tokens, 64), cp.float32)
    rope = Rope(cos=table, sin=table, style="adjacent")
    normed, activated, weight = cp.empty_like(x), cp.empty((num_tokens, FFN), cp.float32), x[0]
    calls: dict[str, tuple[float, Callable[[], None]]] = {
        "rms_norm": (2 * x.nbytes, lambda: ops.rms_norm(0, plan, x, weight, 1e-5, normed)),
        "swiglu": (1.5 * gate_up.nbytes, lambda: ops.swiglu(0, plan, gate_up, activated)),
        "rope_store": (
            1.9 * qkv.nbytes,
            lambda: ops.rope_store(0, plan, qkv, HEAD, rope, batch, pool, 0, normed),
        ),
    }
    for name, (nbytes, call) in calls.items():
        add_rates(report, f"{name}, 2048 tokens, GB/s", nbytes / 1e9, timed(call))


def bench_sampling(report: Report, ops: CudaOps) -> None:
    """The choice of a token for every row, on the host's clock: uploads and answers included."""
    for num_rows in (96, 512):
        logits = cp.random.standard_normal((num_rows, VOCABULARY), dtype=cp.float32) * 3
        for name, params in SAMPLING.items():
            rows = [sampler_row(index, params) for index in range(num_rows)]
            for repeat in range(2 + REPEATS):
                ops.synchronize()
                begin = time.perf_counter()
                choose(logits, rows, num_tokens=VOCABULARY, ops=ops)
                if repeat >= 2:
                    seconds = time.perf_counter() - begin
                    report.add(f"choice for {num_rows} rows, {name}, ms", seconds * 1e3)


def sampler_row(index: int, params: SamplingParams) -> RowSampler:
    ids = np.arange(200, dtype=np.int32) * 7 + index
    return RowSampler(Request(row_index=index, token_ids=ids, params=params), frozenset())


SECTIONS: dict[str, Callable[[Report, CudaOps], None]] = {
    "limits": bench_limits,
    "dequantise": bench_dequantize,
    "products": bench_tiles,
    "few": bench_few,
    "attention": bench_attentions,
    "sharing": bench_sharing,
    "pointwise": bench_pointwise,
    "sampling": bench_sampling,
}

if __name__ == "__main__":
    main()
