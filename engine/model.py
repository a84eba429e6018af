"""The transformer: one sweep over all layers, as a plain list of backend calls."""

from __future__ import annotations

import numpy as np

from engine.hparams import Hparams, rope_tables
from engine.weights import LayerWeights, Weights
from kernels.ops import Batch, Float32, HeadParams, KvPool, KvShape, Ops, Rope


def kv_shape(hparams: Hparams) -> KvShape:
    return KvShape(
        num_layers=hparams.num_layers,
        num_kv_heads=hparams.num_kv_heads,
        key_length=hparams.key_length,
        value_length=hparams.value_length,
    )


class Buffers:
    """Work buffers of a sweep of at most `max_tokens`, allocated once."""

    def __init__(self, hparams: Hparams, max_tokens: int) -> None:
        def buffer(width: int) -> Float32:
            return np.empty((max_tokens, width), np.float32)

        q_width = hparams.num_heads * hparams.key_length
        kv_width = hparams.num_kv_heads * (hparams.key_length + hparams.value_length)
        self.x = buffer(hparams.hidden)
        self.normed = buffer(hparams.hidden)
        self.head_normed = buffer(hparams.hidden)
        self.qkv = buffer(q_width + kv_width)
        self.q = buffer(q_width)
        self.attention = buffer(hparams.num_heads * hparams.value_length)
        self.gate_up = buffer(2 * hparams.ffn)
        self.activated = buffer(hparams.ffn)
        self.logits = buffer(hparams.vocab_size)


class Model:
    """Weights, rotary tables and buffers, run by a backend."""

    def __init__(
        self,
        hparams: Hparams,
        weights: Weights,
        ops: Ops,
        *,
        max_tokens: int,
        freq_factors: Float32 | None = None,
    ) -> None:
        self.hparams = hparams
        self.weights = weights
        self.ops = ops
        self.buffers = Buffers(hparams, max_tokens)
        self._freq_factors = freq_factors
        self._rope = self._tables(min(1024, hparams.context_length))
        self._heads = [self._head_params(layer) for layer in weights.layers]

    def forward(self, batch: Batch, pool: KvPool) -> Float32:
        """Run the batch through all layers, adding its keys and values to the pool.

        Returns (num_logits, vocab_size) float32: a view of a buffer that the next call reuses.
        """
        self._ensure_positions(int(batch.positions.max()) + 1)
        plan = self.ops.plan(batch, kv_shape(self.hparams), self.hparams.num_heads)
        logits = self.buffers.logits[: len(batch.logit_indices)]
        self.ops.run(lambda worker: self._sweep(worker, plan, batch, pool, logits))
        return logits

    def _sweep(
        self, worker: int, plan: object, batch: Batch, pool: KvPool, logits: Float32
    ) -> None:
        ops, weights, eps = self.ops, self.weights, self.hparams.norm_eps
        n = batch.num_tokens
        b = self.buffers
        x, normed = b.x[:n], b.normed[:n]
        ops.embed(worker, plan, weights.embedding, batch.token_ids, x)
        for index, layer in enumerate(weights.layers):
            ops.rms_norm(worker, plan, x, layer.attn_norm, eps, normed)
            self._attention(worker, plan, batch, pool, index, layer)
            ops.rms_norm(worker, plan, x, layer.ffn_norm, eps, normed)
            ops.matmul(worker, plan, normed, layer.gate_up, b.gate_up[:n])
            ops.swiglu(worker, plan, b.gate_up[:n], b.activated[:n])
            ops.matmul(worker, plan, b.activated[:n], layer.ffn_down, x, accumulate=True)
        if len(batch.logit_indices):
            scratch = b.head_normed[: len(batch.logit_indices)]
            ops.head(worker, plan, x, weights.output_norm, eps, weights.head,
                     batch.logit_indices, scratch, logits)  # fmt: skip

    def _attention(
        self, worker: int, plan: object, batch: Batch, pool: KvPool, index: int,
        layer: LayerWeights,
    ) -> None:  # fmt: skip
        ops, b, n = self.ops, self.buffers, batch.num_tokens
        qkv, q, out = b.qkv[:n], b.q[:n], b.attention[:n]
        head = self._heads[index]
        ops.matmul(worker, plan, b.normed[:n], layer.qkv, qkv, bias=layer.qkv_bias)
        ops.rope_store(worker, plan, qkv, head, self._rope, batch, pool, index, q)
        ops.attention(worker, plan, q, head, batch, pool, index, out)
        ops.matmul(worker, plan, out, layer.attn_output, b.x[:n], accumulate=True)

    def _head_params(self, layer: LayerWeights) -> HeadParams:
        h = self.hparams
        return HeadParams(
            num_heads=h.num_heads,
            num_kv_heads=h.num_kv_heads,
            key_length=h.key_length,
            value_length=h.value_length,
            norm_eps=h.norm_eps,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
        )

    def _tables(self, num_positions: int) -> Rope:
        cos, sin = rope_tables(self.hparams.rope, num_positions, self._freq_factors)
        return Rope(cos=cos, sin=sin, style=self.hparams.rope.style)

    def _ensure_positions(self, num_positions: int) -> None:
        have = len(self._rope.cos)
        if num_positions > have:
            self._rope = self._tables(max(num_positions, 2 * have))
