"""Sweeps of a 70B model whose weights stream from pinned memory, beside the link's own rate.

    python -m scripts.bench_gpu_stream [--layers 80] [--host-share 1.0] [--json FILE]

Random weights in the shape of Llama 3 70B and the types of Q4_K_M; all layers hold the same bytes,
each in pinned memory of its own. Sweeps run through engine.model, wall time, logits on the host.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import cupy as cp
import numpy as np

from engine.hparams import Hparams
from engine.model import Model, kv_shape
from engine.rope import RopeParams
from engine.weights import LayerMatrices, LayerVectors, Weights
from kernels.cuda.backend import CudaOps
from kernels.ops import PAGE_TOKENS, Batch
from kernels.quants import BlockTensor
from scripts.bench_gpu import tensor
from scripts.bench_report import Report, machine_facts

ROWS, CONTEXT, PROMPT = 96, 640, 512
SWEEPS = 3


def hparams_of(num_layers: int) -> Hparams:
    return Hparams(
        architecture="llama",
        num_layers=num_layers,
        hidden=8192,
        ffn=28672,
        num_heads=64,
        num_kv_heads=8,
        key_length=128,
        value_length=128,
        vocab_size=128256,
        num_tokens=128256,
        context_length=8192,
        norm_eps=1e-5,
        rope=RopeParams(rotary_dim=128, base=500000.0, style="adjacent"),
        tied_embeddings=False,
        has_qkv_bias=False,
        has_qk_norm=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--host-share", type=float, default=1.0)
    parser.add_argument(
        "--prefill-tokens", type=int, nargs="+", default=[2560, 3072], help="multiples of 512"
    )
    parser.add_argument("--json", type=Path, help="write all samples here")
    options = parser.parse_args(sys.argv[1:])
    report = Report(f"{options.layers} layers of a 70B model, {options.host_share} streamed")
    bench(report, options)
    print(report.table())
    if options.json is not None:
        facts = {"machine": machine_facts(), "bench": "gpu stream", **report.to_dict()}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


def bench(report: Report, options: argparse.Namespace) -> None:
    link = link_rate(report)
    compute = time_compute(report, options)
    cp.get_default_memory_pool().free_all_blocks()
    hparams = hparams_of(options.layers)
    ops = CudaOps(host_share=options.host_share)
    started = time.perf_counter()
    weights = synthetic_weights(hparams, ops)
    report.facts["gpu"] = ops.device_name
    report.facts["seconds to fill pinned memory"] = round(time.perf_counter() - started, 1)
    report.facts["GB in pinned memory"] = round(ops.host_tier.nbytes / 1e9, 2)
    model = Model(hparams, weights, ops, max_tokens=max(options.prefill_tokens))
    pool = ops.kv_pool(kv_shape(hparams), num_pages=ROWS * CONTEXT // PAGE_TOKENS, kv_type="f16")
    for name, batch in batches(options.prefill_tokens).items():
        model.forward(batch, pool)
        for _ in range(SWEEPS):
            copied = ops.host_tier.nbytes_copied
            seconds = time_sweep(model, batch, pool)
            copied = ops.host_tier.nbytes_copied - copied
            report.add(f"{name}, tokens/s", batch.num_tokens / seconds)
            report.add(f"{name}, s", seconds)
            report.add(f"{name}, GB/s of link", copied / 1e9 / seconds)
            report.add(f"{name}, share of link", copied / 1e9 / seconds / link)
            floor = max(copied / 1e9 / link, compute[name] * options.layers)
            report.add(f"{name}, sweep / max(transfer, compute)", seconds / floor)
    free, total = cp.cuda.runtime.memGetInfo()
    report.facts["GiB of device memory taken"] = round((total - free) / 2**30, 2)
    used = cp.get_default_memory_pool().used_bytes()
    report.facts["GiB of device memory used"] = round(used / 2**30, 2)
    ops.close()


def link_rate(report: Report) -> float:
    pinned, target = cp.cuda.alloc_pinned_memory(1 << 30), cp.empty(1 << 30, np.uint8)
    stream = cp.cuda.get_current_stream()
    for _ in range(7):
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record()
        target.data.copy_from_host_async(pinned.ptr, 1 << 30, stream)
        end.record()
        end.synchronize()
        seconds = cp.cuda.get_elapsed_time(begin, end) / 1e3
        report.add("limit: pinned memory to device, GB/s", (1 << 30) / 1e9 / seconds)
    return report.median("limit: pinned memory to device, GB/s")


def time_compute(report: Report, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a layer without transfers, from a model of nine less one of one."""
    times: dict[str, dict[int, float]] = {}
    for num_layers in (1, 9):
        ops, hparams = CudaOps(), hparams_of(num_layers)
        model = Model(
            hparams, synthetic_weights(hparams, ops), ops, max_tokens=max(options.prefill_tokens)
        )
        pool = ops.kv_pool(
            kv_shape(hparams), num_pages=ROWS * CONTEXT // PAGE_TOKENS, kv_type="f16"
        )
        for name, batch in batches(options.prefill_tokens).items():
            model.forward(batch, pool)
            seconds = [time_sweep(model, batch, pool) for _ in range(7)]
            times.setdefault(name, {})[num_layers] = min(seconds)  # the host's part varies
        ops.close()
    layer = {name: (by_layers[9] - by_layers[1]) / 8 for name, by_layers in times.items()}
    for name, seconds_of_layer in layer.items():
        report.add(f"{name}, ms of a layer without transfer", seconds_of_layer * 1e3)
    return layer


def time_sweep(model: Model, batch: Batch, pool: object) -> float:
    started = time.perf_counter()
    logits = model.forward(batch, pool)  # type: ignore[arg-type]
    seconds = time.perf_counter() - started
    assert np.isfinite(logits[:, :64]).all()
    return seconds


def batches(prefill_tokens: list[int]) -> dict[str, Batch]:
    """Decoding rows at the end of their context, whole prompts, and both at once."""
    decode = [(row, CONTEXT - 10, CONTEXT - 9) for row in range(ROWS)]
    mixed = decode + [(row, 0, PROMPT) for row in range(max(prefill_tokens) // PROMPT - 1)]
    made = {f"decode, {ROWS} rows": batch_of(decode)}
    for num_tokens in prefill_tokens:
        prompts = [(row, 0, PROMPT) for row in range(num_tokens // PROMPT)]
        made[f"prefill, {num_tokens} tokens"] = batch_of(prompts)
    made[f"decode and prefill, {ROWS} + {len(mixed[ROWS:]) * PROMPT} tokens"] = batch_of(mixed)
    return made


def batch_of(spans: list[tuple[int, int, int]]) -> Batch:
    """(row, begin, end) in order; each row has pages of its own for the whole context."""
    sizes = [end - begin for _, begin, end in spans]
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return Batch(
        token_ids=np.random.default_rng(5).integers(0, 128000, bounds[-1]).astype(np.int32),
        positions=np.concatenate([np.arange(b, e, dtype=np.int32) for _, b, e in spans]),
        rows=np.repeat([row for row, _, _ in spans], sizes).astype(np.int32),
        page_table=np.arange(ROWS * CONTEXT // PAGE_TOKENS, dtype=np.int32).reshape(ROWS, -1),
        segments=np.stack([bounds[:-1], bounds[1:]], axis=1),
        logit_indices=bounds[1:] - 1,
    )


class Tensors:
    """Random tensors by type and shape, each made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int, int], BlockTensor] = {}

    def __call__(self, type_name: str, num_outputs: int, num_inputs: int) -> BlockTensor:
        key = (type_name, num_outputs, num_inputs)
        if key not in self._made:
            self._made[key] = tensor(*key)
        return self._made[key]


_TENSORS = Tensors()


def synthetic_weights(hparams: Hparams, ops: CudaOps) -> Weights:
    hidden, ffn, kv = hparams.hidden, hparams.ffn, 8 * 128
    ones = ops.put(np.ones(hidden, np.float32))
    vectors = LayerVectors(attn_norm=ones, qkv_bias=None, q_norm=None, k_norm=None, ffn_norm=ones)
    made = _TENSORS

    def layer(index: int) -> LayerMatrices:
        rich = "Q6_K" if _gets_more_bits(index, hparams.num_layers) else "Q4_K"
        q, k, v = made("Q4_K", hidden, hidden), made("Q4_K", kv, hidden), made(rich, kv, hidden)
        gate_up = [made("Q4_K", ffn, hidden)] * 2
        return LayerMatrices(
            qkv=ops.pack([q, k, v], expand=False),
            attn_output=ops.pack([q], expand=False),
            gate_up=ops.pack(gate_up, expand=False),
            ffn_down=ops.pack([made(rich, hidden, ffn)], expand=False),
        )

    layers = tuple(layer(index) for index in range(hparams.num_layers))
    vocab = hparams.vocab_size
    return Weights(
        embedding=ops.pack([made("Q4_K", vocab, hidden)], expand=False),
        vectors=(vectors,) * hparams.num_layers,
        layers=layers,
        output_norm=ones,
        head=ops.pack([made("Q6_K", vocab, hidden)], expand=False),
    )


def _gets_more_bits(layer: int, num_layers: int) -> bool:
    """The layers whose v and down are Q6_K in Q4_K_M (llama.cpp, use_more_bits)."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2


if __name__ == "__main__":
    main()
