"""What this machine's products and disk give, measured by short runs on random weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from engine.planner import DEFAULT_RATES, EXPANDED, Rates
from kernels.ops import Batch, KvShape, Ops, PackedMatrix
from kernels.quants import QUANT_TYPES, BlockTensor, QuantType
from nvme.probe import choose_transfer, measure_disk

PROBE_INPUTS, PROBE_OUTPUTS = 2048, 4096
MANY_TOKENS = 128
_REPEATS = 5
_SHAPE = KvShape(num_layers=1, num_kv_heads=1, key_length=64, value_length=64)


def probe_rates(
    ops: Ops, type_names: Iterable[str], files: Sequence[Path], cache_dir: str | Path
) -> Rates:
    """Measure a pass over weights of each type, products of many tokens, and the disk.

    type_names: of the model's matrices
    files: read for about a second; their pages leave the page cache; none of them, no disk probe
    Raises ReadError, OSError: the files cannot be read.
    """
    values_per_s, flops_per_s = {}, {}
    types = {qtype.name: qtype for qtype in QUANT_TYPES.values()}
    for name in sorted(set(type_names)):
        matrix = _random_matrix(ops, types[name], expand=False)
        values_per_s[name], flops_per_s[name] = _product_rates(ops, matrix)
    expanded = _random_matrix(ops, types["F32"], expand=True)
    values_per_s[EXPANDED], flops_per_s[EXPANDED] = _product_rates(ops, expanded)
    return Rates(
        disk_nbytes_per_s=disk_rate(files, cache_dir) if files else DEFAULT_RATES.disk_nbytes_per_s,
        values_per_s=values_per_s,
        flops_per_s=float(np.median(list(flops_per_s.values()))),
    )


def disk_rate(files: Sequence[Path], cache_dir: str | Path) -> float:
    """Bytes per second of direct reads of the largest file, buffered where those are refused."""
    largest = max(files, key=lambda path: path.stat().st_size)
    disk = measure_disk(largest, choose_transfer(files, cache_dir))
    return disk.direct_bytes_per_s or disk.buffered_bytes_per_s


def _random_matrix(ops: Ops, qtype: QuantType, *, expand: bool) -> PackedMatrix:
    # Small bytes make small finite scales in every block format.
    rng = np.random.default_rng(0)
    shape = (PROBE_OUTPUTS, qtype.row_nbytes(PROBE_INPUTS))
    data = rng.integers(1, 40, shape, dtype=np.uint8)
    tensor = BlockTensor(qtype.name, qtype, PROBE_OUTPUTS, PROBE_INPUTS, data)
    return ops.pack([tensor], expand=expand)


def _product_rates(ops: Ops, matrix: PackedMatrix) -> tuple[float, float]:
    """Weights per second of a pass with one token, and FLOP/s that more tokens add."""
    values = PROBE_INPUTS * PROBE_OUTPUTS
    one_s, many_s = (_product_s(ops, matrix, n) for n in (1, MANY_TOKENS))
    per_token_s = max(1e-12, (many_s - one_s) / (MANY_TOKENS - 1))
    return values / one_s, 2 * values / per_token_s


def _product_s(ops: Ops, matrix: PackedMatrix, num_tokens: int) -> float:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((num_tokens, PROBE_INPUTS), dtype=np.float32)
    out = np.empty((num_tokens, PROBE_OUTPUTS), np.float32)
    plan = ops.plan(_separate_rows(num_tokens), _SHAPE, 1)
    return _median_s(lambda: ops.run(lambda worker: ops.matmul(worker, plan, x, matrix, out)))


def _separate_rows(num_tokens: int) -> Batch:
    ids = np.arange(num_tokens, dtype=np.int32)
    return Batch(
        token_ids=ids,
        positions=np.zeros(num_tokens, np.int32),
        rows=ids,
        page_table=np.zeros((num_tokens, 1), np.int32),
        segments=np.stack([ids, ids + 1], axis=1),
        logit_indices=ids,
    )


def _median_s(work: Callable[[], None]) -> float:
    work()
    samples = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        samples.append(time.perf_counter() - started)
    return float(np.median(samples))
