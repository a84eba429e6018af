"""Attention of decoding rows whose prompts begin alike, on pages that they share, or on their own.

No model is needed: keys, values and queries are random numbers.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np

from kernels.cpu import CpuOps
from kernels.cpu.backend import CpuKvPool
from kernels.ops import PAGE_TOKENS, Batch, Float32, HeadParams, Int32, KvShape
from scripts.bench_report import Report

ROWS, PREFIX = 64, 1000
_CALLS = 8  # of one layer's attention, in one sample


@dataclass(frozen=True, slots=True)
class Heads:
    name: str
    num_heads: int
    num_kv_heads: int
    length: int


HEADS = (Heads("9/3 heads of 64", 9, 3, 64), Heads("32/4 heads of 128", 32, 4, 128))


def page_tables(num_rows: int, prefix: int) -> tuple[Int32, Int32]:
    """Of rows that share the whole pages of `prefix` tokens, and of rows that share none.

    Each row has one token more, so that its last page is its own.
    """
    pages, common = prefix // PAGE_TOKENS + 1, prefix // PAGE_TOKENS
    separate = np.random.default_rng(0).permutation(num_rows * pages).astype(np.int32)
    separate = separate.reshape(num_rows, pages)
    shared = separate.copy()
    shared[:, :common] = separate[0, :common]
    return shared, separate


def decoding(page_table: Int32, position: int) -> Batch:
    """One token of each row, at `position`."""
    rows = np.arange(len(page_table), dtype=np.int32)
    return Batch(
        token_ids=np.zeros_like(rows),
        positions=np.full_like(rows, position),
        rows=rows,
        page_table=page_table,
        segments=np.stack([rows, rows + 1], axis=1),
        logit_indices=rows,
    )


def bench_attention(options: argparse.Namespace) -> Report:
    """64 rows on a prefix of 1,000 tokens, for two shapes of heads."""
    report = Report(f"attention, {ROWS} rows after a prefix of {PREFIX}, {options.kv_type} KV")
    ops = CpuOps(options.threads)
    try:
        for heads in HEADS:
            _bench_heads(report, ops, heads, options)
    finally:
        ops.close()
    return report


def kv_shape(head: HeadParams) -> KvShape:
    """One layer of such heads."""
    return KvShape(
        num_layers=1,
        num_kv_heads=head.num_kv_heads,
        key_length=head.key_length,
        value_length=head.value_length,
    )


def _bench_heads(report: Report, ops: CpuOps, heads: Heads, options: argparse.Namespace) -> None:
    head = HeadParams(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        key_length=heads.length,
        value_length=heads.length,
        norm_eps=0.0,
    )
    tables = page_tables(ROWS, PREFIX)
    pool = ops.kv_pool(
        kv_shape(head), num_pages=tables[0].size, kv_type=options.kv_type, num_rows=ROWS
    )
    rng = np.random.default_rng(1)
    q = rng.standard_normal((ROWS, heads.num_heads * heads.length), dtype=np.float32)
    for array in pool.arrays:
        fill(array, rng)
    out = np.empty_like(q)
    for _ in range(options.repeats):
        seconds = []
        for name, table in zip(("shared", "separate"), tables, strict=True):
            elapsed_s, pages = time_layer(ops, head, decoding(table, PREFIX), pool, q, out)
            seconds.append(elapsed_s)
            report.add(f"{heads.name}, {name}, ms a layer", 1e3 * elapsed_s)
            report.facts[f"{heads.name}, {name}, pages read"] = pages
        report.add(f"{heads.name}, separate / shared", seconds[1] / seconds[0])


def time_layer(
    ops: CpuOps, head: HeadParams, batch: Batch, pool: CpuKvPool, q: Float32, out: Float32
) -> tuple[float, int]:
    """Seconds of one layer's attention, and the pages that it reads."""
    plan = ops.plan(batch, kv_shape(head), head.num_heads)

    def body(worker: int) -> None:
        for _ in range(_CALLS):
            ops.attention(worker, plan, q, head, batch, pool, 0, out)

    ops.run(body)
    plan.pages_read[:] = 0
    started = time.perf_counter()
    ops.run(body)
    return (time.perf_counter() - started) / _CALLS, int(plan.pages_read.sum()) // _CALLS


def fill(array: np.ndarray, rng: np.random.Generator) -> None:
    """Random numbers of any type of element, halves being held as uint16."""
    if array.dtype == np.int8:
        array[:] = rng.integers(-127, 128, array.shape)
        return
    numbers = rng.standard_normal(array.shape, dtype=np.float32)
    array[:] = numbers if array.dtype == np.float32 else numbers.astype(np.float16).view(np.uint16)
