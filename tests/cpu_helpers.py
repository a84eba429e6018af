"""Ragged batches, quantised tensors and a float64 reference for the tests of the CPU backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.cpu import CpuOps
from kernels.ops import PAGE_TOKENS, Batch, HeadParams, KvShape, Rope
from kernels.quants import QUANT_TYPES, BlockTensor

TYPES = {quant_type.name: quant_type for quant_type in QUANT_TYPES.values()}
# Offsets of the float16 scales inside a block.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def random_tensor(
    rng: np.random.Generator, type_name: str, num_outputs: int, num_inputs: int, name: str = "w"
) -> BlockTensor:
    """Random blocks of a type, with scales that keep values finite."""
    quant_type = TYPES[type_name]
    values = rng.standard_normal((num_outputs, num_inputs), dtype=np.float32)
    if type_name == "F32":
        data = values.view(np.uint8)
    elif type_name == "F16":
        data = values.astype(np.float16).view(np.uint8)
    elif type_name == "BF16":
        data = np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
    else:
        blocks = num_inputs // quant_type.block_size
        data = rng.integers(0, 256, (num_outputs, blocks, quant_type.block_nbytes), dtype=np.uint8)
        for at in HALVES[type_name]:
            scales = rng.uniform(-0.1, 0.1, (num_outputs, blocks, 1)).astype(np.float16)
            data[:, :, at : at + 2] = scales.view(np.uint8)
        data = data.reshape(num_outputs, -1)
    return BlockTensor(name, quant_type, num_outputs, num_inputs, np.ascontiguousarray(data))


def f32_tensor(values: np.ndarray) -> BlockTensor:
    data = np.ascontiguousarray(values, np.float32).view(np.uint8)
    return BlockTensor("w", TYPES["F32"], *values.shape, data)


def poisoned(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def flat_batch(num_tokens: int) -> Batch:
    """`num_tokens` rows of one token each, at position 0."""
    count = np.arange(num_tokens, dtype=np.int32)
    return Batch(
        token_ids=count,
        positions=np.zeros(num_tokens, np.int32),
        rows=count,
        page_table=count[:, None].copy(),
        segments=np.stack([count, count + 1], axis=1),
        logit_indices=count,
    )


FLAT_SHAPE = KvShape(num_layers=1, num_kv_heads=1, key_length=16, value_length=16)


def matmul(ops: CpuOps, x: np.ndarray, weight: Any, **options: Any) -> np.ndarray:
    """x · weightᵀ on all workers, into a poisoned output (or `out`, where given)."""
    out = options.pop("out", None)
    out = poisoned(len(x), weight.num_outputs) if out is None else out.copy()
    plan = ops.plan(flat_batch(len(x)), FLAT_SHAPE, 1)
    ops.run(lambda worker: ops.matmul(worker, plan, x, weight, out, **options))
    return out


def segments_batch(
    segments: list[tuple[int, int, int]], lengths: list[int], rng: np.random.Generator | None = None
) -> Batch:
    """Segments (row, begin position, end position) of rows of `lengths` tokens, pages shuffled."""
    pages_of = [-(-length // PAGE_TOKENS) for length in lengths]
    table = np.full((len(lengths), max(pages_of)), -1, np.int32)
    order = np.arange(sum(pages_of)) if rng is None else rng.permutation(sum(pages_of))
    first = 0
    for row, count in enumerate(pages_of):
        table[row, :count] = order[first : first + count]
        first += count
    sizes = [end - begin for _, begin, end in segments]
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    positions = [np.arange(begin, end) for _, begin, end in segments]
    return Batch(
        token_ids=np.zeros(bounds[-1], np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        rows=np.repeat([row for row, _, _ in segments], sizes).astype(np.int32),
        page_table=table,
        segments=np.stack([bounds[:-1], bounds[1:]], axis=1),
        logit_indices=(bounds[1:] - 1).astype(np.int32),
    )


@dataclass(frozen=True)
class AttentionCase:
    """Rows of random q, k, v, run through rope_store and attention in any chunks."""

    head: HeadParams
    rope: Rope
    qkv: list[np.ndarray]  # of each row: (length, width)

    @property
    def shape(self) -> KvShape:
        return KvShape(
            num_layers=2,
            num_kv_heads=self.head.num_kv_heads,
            key_length=self.head.key_length,
            value_length=self.head.value_length,
        )

    def run(
        self,
        ops: CpuOps,
        chunks: list[list[tuple[int, int, int]]],
        kv_type: str = "f32",
        rng: np.random.Generator | None = None,
    ) -> list[np.ndarray]:
        """Outputs of each row, (length, heads * value_length), from sweeps of segments."""
        lengths = [len(rows) for rows in self.qkv]
        out = [poisoned(n, self.head.num_heads * self.head.value_length) for n in lengths]
        pool: Any = None
        for segments in chunks:
            batch = segments_batch(segments, lengths, np.random.default_rng(7) if rng else None)
            if pool is None:
                num_pages = int(batch.page_table.max()) + 1
                pool = ops.kv_pool(
                    self.shape,
                    num_pages=num_pages,
                    kv_type=kv_type,  # type: ignore[arg-type]
                    num_rows=len(lengths),
                )
            sweep = self._sweep(ops, batch, pool, segments)
            for (row, begin, end), (first, last) in zip(segments, batch.segments, strict=True):
                out[row][begin:end] = sweep[first:last]
        return out

    def _sweep(
        self, ops: CpuOps, batch: Batch, pool: Any, segments: list[tuple[int, int, int]]
    ) -> np.ndarray:
        head = self.head
        qkv = np.concatenate([self.qkv[row][begin:end] for row, begin, end in segments])
        q = poisoned(len(qkv), head.num_heads * head.key_length)
        out = poisoned(len(qkv), head.num_heads * head.value_length)
        plan = ops.plan(batch, self.shape, head.num_heads)

        def body(worker: int) -> None:
            ops.rope_store(worker, plan, qkv, head, self.rope, batch, pool, 1, q)
            ops.attention(worker, plan, q, head, batch, pool, 1, out)

        ops.run(body)
        return out


def attention_case(
    rng: np.random.Generator,
    lengths: list[int],
    *,
    num_heads: int = 3,
    num_kv_heads: int = 1,
    key_length: int = 64,
    value_length: int = 64,
    rotary_dim: int | None = None,
    style: str = "adjacent",
    norms: bool = False,
) -> AttentionCase:
    width = num_heads * key_length + num_kv_heads * (key_length + value_length)
    pairs = (key_length if rotary_dim is None else rotary_dim) // 2
    angles = np.arange(max(lengths))[:, None] * 10000.0 ** -(np.arange(pairs) / max(pairs, 1))
    head = HeadParams(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_length=key_length,
        value_length=value_length,
        norm_eps=1e-6,
        q_norm=rng.uniform(0.5, 2, key_length).astype(np.float32) if norms else None,
        k_norm=rng.uniform(0.5, 2, key_length).astype(np.float32) if norms else None,
    )
    rope = Rope(
        cos=np.cos(angles).astype(np.float32),
        sin=np.sin(angles).astype(np.float32),
        style=style,  # type: ignore[arg-type]
    )
    rows = [rng.standard_normal((n, width), dtype=np.float32) for n in lengths]
    return AttentionCase(head, rope, rows)


def rotated(x: np.ndarray, rope: Rope, positions: np.ndarray) -> np.ndarray:
    """Rotary embedding in float64; x: (num_tokens, heads, length)."""
    out = x.astype(np.float64)
    pairs = rope.cos.shape[1]
    index = np.arange(pairs)
    low, high = (index, index + pairs) if rope.style == "halves" else (2 * index, 2 * index + 1)
    c, s = (table[positions][:, None].astype(np.float64) for table in (rope.cos, rope.sin))
    a, b = out[:, :, low].copy(), out[:, :, high].copy()
    out[:, :, low], out[:, :, high] = a * c - b * s, a * s + b * c
    return out


def heads_reference(case: AttentionCase, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v of a row in float64, normalised and rotated: (length, heads, size) each."""
    head, x = case.head, case.qkv[row].astype(np.float64)
    n, q_width = len(x), head.num_heads * head.key_length
    k_width = head.num_kv_heads * head.key_length
    q = x[:, :q_width].reshape(n, head.num_heads, -1)
    k = x[:, q_width : q_width + k_width].reshape(n, head.num_kv_heads, -1)
    v = x[:, q_width + k_width :].reshape(n, head.num_kv_heads, -1)
    if head.q_norm is not None and head.k_norm is not None:
        q, k = rms(q, head.q_norm, head.norm_eps), rms(k, head.k_norm, head.norm_eps)
    positions = np.arange(n)
    return rotated(q, case.rope, positions), rotated(k, case.rope, positions), v


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def attention_reference(case: AttentionCase, row: int) -> np.ndarray:
    """Causal softmax(q · k / sqrt(length)) · v in float64: (length, heads * value_length)."""
    q, k, v = heads_reference(case, row)
    group = case.head.num_heads // case.head.num_kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(case.head.key_length)
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", p, v).reshape(len(q), -1)
