"""The engine against the bare matrix products of its sweeps."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

import numpy as np

from engine import EngineConfig, Request, SamplingParams
from engine.engine import Engine
from engine.model import kv_shape
from kernels.ops import Batch, KvShape, PackedMatrix
from scripts.bench_report import Report

PREFILL_ROWS = 4
BLAS_PROGRAM = """
import sys, time
import numpy as np
shapes = [tuple(map(int, s.split("x"))) for s in sys.argv[1].split(",")]
rng = np.random.default_rng(0)
normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
data = [(normal(t, k), normal(n, k), np.empty((t, n), np.float32)) for t, k, n in shapes]
for line in sys.stdin:
    started = time.perf_counter()
    for x, w, out in data:
        np.matmul(x, w.T, out=out)
    print(time.perf_counter() - started, flush=True)
"""


def make_engine(options: argparse.Namespace, sweep_tokens: int | None = None) -> Engine:
    config = EngineConfig(
        kv_type=options.kv_type, num_threads=options.threads, sweep_tokens=sweep_tokens
    )
    return Engine(options.model, config)


def random_requests(
    engine: Engine, lengths: list[int], max_tokens: int, seed: int = 0
) -> list[Request]:
    rng = np.random.default_rng(seed)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [
        Request(
            row_index=index,
            token_ids=rng.integers(10, engine.tokenizer.num_tokens - 10, n).astype(np.int32),
            params=params,
        )
        for index, n in enumerate(lengths)
    ]


def sweep_matrices(engine: Engine) -> list[PackedMatrix]:
    layers = [layer for layer in engine._model.weights.layers if layer is not None]
    return [m for w in layers for m in (w.qkv, w.attn_output, w.gate_up, w.ffn_down)]


class BareProducts:
    """The matrix products of one sweep and nothing else, by our kernel and by NumPy's BLAS.

    NumPy runs in a process of its own, without OPENBLAS_CORETYPE and with every core; it sleeps
    while the engine is timed.
    """

    def __init__(self, engine: Engine, num_tokens: int, num_logits: int) -> None:
        self._engine = engine
        head = engine._model.weights.head
        assert head is not None, "bare products are measured on resident models"
        self._calls = [(m, num_tokens) for m in sweep_matrices(engine)] + [(head, num_logits)]
        rng = np.random.default_rng(0)
        widths = {(t, m.num_inputs) for m, t in self._calls}
        self._inputs = {key: rng.standard_normal(key, dtype=np.float32) for key in widths}
        self._outputs = {
            (t, m.num_outputs): np.empty((t, m.num_outputs), np.float32) for m, t in self._calls
        }
        self._plans = {t: engine._ops.plan(*_plan_arguments(engine, t)) for _, t in self._calls}
        shapes = ",".join(f"{t}x{m.num_inputs}x{m.num_outputs}" for m, t in self._calls)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
        self._blas = subprocess.Popen(
            [sys.executable, "-c", BLAS_PROGRAM, shapes],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.blas_s()
        self.ours_s()

    def ours_s(self) -> float:
        ops = self._engine._ops

        def body(worker: int) -> None:
            for matrix, t in self._calls:
                x = self._inputs[t, matrix.num_inputs]
                ops.matmul(worker, self._plans[t], x, matrix, self._outputs[t, matrix.num_outputs])

        started = time.perf_counter()
        ops.run(body)
        return time.perf_counter() - started

    def blas_s(self) -> float:
        assert self._blas.stdin is not None and self._blas.stdout is not None
        self._blas.stdin.write("go\n")
        self._blas.stdin.flush()
        return float(self._blas.stdout.readline())

    def best_s(self) -> float:
        """The faster of the two, each the median of three."""
        ours = sorted(self.ours_s() for _ in range(3))[1]
        blas = sorted(self.blas_s() for _ in range(3))[1]
        return min(ours, blas)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._blas.stdin is not None
        self._blas.stdin.close()
        self._blas.wait()
        assert self._blas.stdout is not None
        self._blas.stdout.close()


def _plan_arguments(engine: Engine, num_tokens: int) -> tuple[Batch, KvShape, int]:
    batch = Batch(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=np.zeros(num_tokens, np.int32),
        rows=np.arange(num_tokens, dtype=np.int32),
        page_table=np.zeros((num_tokens, 1), np.int32),
        segments=np.stack([np.arange(num_tokens), np.arange(1, num_tokens + 1)], 1).astype(
            np.int32
        ),
        logit_indices=np.arange(num_tokens, dtype=np.int32),
    )
    return batch, kv_shape(engine.hparams), engine.hparams.num_heads


def decode_s(engine: Engine, rows: int, context: int, new_tokens: int) -> tuple[float, float]:
    """Seconds of `new_tokens` sweeps with `rows` rows decoding from `context` tokens on.

    Prompts are staggered by the sweep in which they are prefilled, so that all rows stand at
    about `context` when the clock starts. Returns (seconds, mean context at the start).
    """
    per_sweep = max(1, engine.plan.sweep_tokens // context)
    prefill_sweeps = -(-rows // per_sweep)
    lengths = [context - (prefill_sweeps - 1 - index // per_sweep) for index in range(rows)]
    for request in random_requests(engine, lengths, new_tokens + prefill_sweeps + 8):
        engine.add(request)
    while engine.num_waiting or any(r.progress().pending > 1 for r in engine._running.values()):
        engine.sweep()
    start = np.mean([row.progress().known for row in engine._running.values()])
    started = time.perf_counter()
    for _ in range(new_tokens):
        engine.sweep()
    elapsed_s = time.perf_counter() - started
    assert engine.num_running == rows, "a row ended inside the timed part"
    engine.cancel_all()
    return elapsed_s, float(start)


def prefill_s(engine: Engine, rows: int, context: int, sweeps: int) -> float:
    """Seconds of `sweeps` sweeps that each prefill `rows` prompts of `context` tokens."""
    requests = random_requests(engine, [context] * rows * sweeps, 1)
    started = time.perf_counter()
    for index in range(sweeps):
        for request in requests[index * rows : (index + 1) * rows]:
            engine.add(request)
        finished = engine.sweep()
        assert len(finished) == rows, (len(finished), rows)
    return time.perf_counter() - started


def bench_decode(options: argparse.Namespace) -> Report:
    title = f"decode, {options.rows} rows from context {options.context}, {options.kv_type} KV"
    report = Report(title)
    with make_engine(options, 2048) as engine, BareProducts(engine, *(options.rows,) * 2) as bare:
        decode_s(engine, options.rows, options.context, 2)
        for _ in range(options.repeats):
            elapsed_s, start = decode_s(engine, options.rows, options.context, options.new_tokens)
            best_s = bare.best_s()
            sweep_s = elapsed_s / options.new_tokens
            report.facts["mean context at start"] = round(start, 1)
            report.add("decode tokens/s", options.rows / sweep_s)
            report.add("sweep ms", 1e3 * sweep_s)
            report.add("bare products ms, ours", 1e3 * bare.ours_s())
            report.add("bare products ms, NumPy", 1e3 * bare.blas_s())
            report.add("ratio to the better bare products", best_s / sweep_s)
    return report


def bench_prefill(options: argparse.Namespace) -> Report:
    num_tokens = PREFILL_ROWS * options.context
    title = f"prefill, {PREFILL_ROWS} prompts of {options.context}, {options.kv_type} KV"
    report = Report(title)
    with (
        make_engine(options, num_tokens) as engine,
        BareProducts(engine, num_tokens, PREFILL_ROWS) as bare,
    ):
        prefill_s(engine, PREFILL_ROWS, options.context, 2)
        for _ in range(options.repeats):
            sweep_s = prefill_s(engine, PREFILL_ROWS, options.context, 6) / 6
            best_s = bare.best_s()
            report.add("prefill tokens/s", num_tokens / sweep_s)
            report.add("sweep ms", 1e3 * sweep_s)
            report.add("bare products ms, ours", 1e3 * bare.ours_s())
            report.add("bare products ms, NumPy", 1e3 * bare.blas_s())
            report.add("ratio to the better bare products", best_s / sweep_s)
    return report
