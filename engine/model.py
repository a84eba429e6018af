"""The transformer: one sweep over all layers, as a plain list of backend calls."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from engine.hparams import Hparams, rope_tables
from engine.weight_stream import WeightStream
from engine.weights import LayerMatrices, LayerVectors, Weights
from kernels.ops import Batch, Float32, HeadParams, KvPool, KvShape, Ops, Rope


def kv_shape(hparams: Hparams) -> KvShape:
    return KvShape(
        num_layers=hparams.num_layers,
        num_kv_heads=hparams.num_kv_heads,
        key_length=hparams.key_length,
        value_length=hparams.value_length,
    )


class Buffers:
    """Work buffers of a sweep, allocated once. max_tokens: of it; max_logits: that are wanted

    Attention and the feed-forward part share memory where operations run in order.
    """

    def __init__(self, hparams: Hparams, ops: Ops, max_tokens: int, max_logits: int) -> None:
        self.x = ops.empty(max_tokens, hparams.hidden)
        self.normed = ops.empty(max_tokens, hparams.hidden)
        attention, feed_forward = attention_widths(hparams), feed_forward_widths(hparams)
        width = shared_width(hparams, ops.runs_in_order)
        shared = ops.empty(max_tokens, width)
        self.qkv, self.q, self.attention = _cut(shared, attention)
        begin = 0 if ops.runs_in_order else max_tokens * sum(attention)
        self.gate_up, self.activated = _cut(shared, feed_forward, begin)
        self.head_normed = ops.empty(max_logits, hparams.hidden)
        self.logits = ops.empty(max_logits, hparams.vocab_size)


def attention_widths(hparams: Hparams) -> tuple[int, int, int]:
    """Values per token of: q, k and v together; q; what attention gives."""
    q = hparams.num_heads * hparams.key_length
    kv = hparams.num_kv_heads * (hparams.key_length + hparams.value_length)
    return q + kv, q, hparams.num_heads * hparams.value_length


def feed_forward_widths(hparams: Hparams) -> tuple[int, int]:
    """Values per token of: gate and up; their product."""
    return 2 * hparams.ffn, hparams.ffn


def shared_width(hparams: Hparams, runs_in_order: bool) -> int:
    """Values per token of both parts, or of the larger where they share memory."""
    both = sum(attention_widths(hparams)), sum(feed_forward_widths(hparams))
    return max(both) if runs_in_order else sum(both)


def _cut(shared: Float32, widths: Sequence[int], begin: int = 0) -> list[Float32]:
    """Buffers one behind the other from value `begin` on, each (num_tokens, width)."""
    num_tokens, buffers = len(shared), []
    flat = shared.reshape(-1)
    for width in widths:
        end = begin + num_tokens * width
        buffers.append(flat[begin:end].reshape(num_tokens, width))
        begin = end
    return buffers


class Model:
    """Weights, rotary tables and buffers, run by a backend."""

    def __init__(
        self,
        hparams: Hparams,
        weights: Weights,
        ops: Ops,
        *,
        max_tokens: int,
        max_logits: int,
        freq_factors: Float32 | None = None,
        stream: WeightStream | None = None,
    ) -> None:
        self.hparams = hparams
        self.weights = weights
        self.ops = ops
        self.buffers = Buffers(hparams, ops, max_tokens, max_logits)
        self.stream = stream
        self._freq_factors = freq_factors
        self._rope = self._tables(min(1024, hparams.context_length))
        self._heads = [self._head_params(vectors) for vectors in weights.vectors]

    def forward(self, batch: Batch, pool: KvPool, key: Hashable = None) -> Float32:
        """Run the batch through all layers, adding its keys and values to the pool.

        key: stands for the model and the pool, where both live on, so that the backend may record
            small sweeps; an object of the caller's, which no later pair can be mistaken for

        Returns (num_logits, vocab_size) float32, where the operations have it: a view of a buffer
        that the next call reuses.
        """
        self._ensure_positions(int(batch.positions.max()) + 1)
        plan = self.ops.plan(batch, kv_shape(self.hparams), self.hparams.num_heads)
        logits = self.buffers.logits[: len(batch.logit_indices)]
        stays = self.stream is None and pool.num_host_pages == 0
        lives_on = key is not None and stays
        calls = (key, len(logits), len(self._rope.cos)) if lives_on else None
        self.ops.run_sweep(
            plan, calls, lambda worker: self._sweep(worker, plan, batch, pool, logits)
        )
        if self.stream is not None:
            self.stream.advance()
        return logits

    def restart_stream(self) -> None:
        """Begin to stream from the first parcel again, after a sweep that failed."""
        if self.stream is not None:
            self.stream.restart()

    def close(self) -> None:
        """Stop streaming. Idempotent."""
        if self.stream is not None:
            self.stream.close()

    def _sweep(
        self, worker: int, plan: object, batch: Batch, pool: KvPool, logits: Float32
    ) -> None:
        ops, weights, eps = self.ops, self.weights, self.hparams.norm_eps
        n = batch.num_tokens
        b = self.buffers
        x, normed = b.x[:n], b.normed[:n]
        ops.embed(worker, plan, weights.embedding, batch.token_ids, x)
        for index, vectors in enumerate(weights.vectors):
            matrices = self._layer(worker, index)
            ops.rms_norm(worker, plan, x, vectors.attn_norm, eps, normed)
            self._attention(worker, plan, batch, pool, index, vectors, matrices)
            ops.rms_norm(worker, plan, x, vectors.ffn_norm, eps, normed)
            ops.matmul(worker, plan, normed, matrices.gate_up, b.gate_up[:n])
            ops.swiglu(worker, plan, b.gate_up[:n], b.activated[:n])
            ops.matmul(worker, plan, b.activated[:n], matrices.ffn_down, x, accumulate=True)
        self._logits(worker, plan, batch, x, logits)

    def _layer(self, worker: int, index: int) -> LayerMatrices:
        resident = self.weights.layers[index]
        if resident is not None:
            return resident
        assert self.stream is not None
        return self.stream.layer(worker, index)

    def _logits(self, worker: int, plan: object, batch: Batch, x: Float32, logits: Float32) -> None:
        head = self.weights.head
        if head is None:
            assert self.stream is not None
            head = self.stream.head(worker)
        if len(batch.logit_indices):
            scratch = self.buffers.head_normed[: len(batch.logit_indices)]
            norm, eps = self.weights.output_norm, self.hparams.norm_eps
            self.ops.head(worker, plan, x, norm, eps, head, batch.logit_indices, scratch, logits)

    def _attention(
        self,
        worker: int,
        plan: object,
        batch: Batch,
        pool: KvPool,
        index: int,
        vectors: LayerVectors,
        matrices: LayerMatrices,
    ) -> None:
        ops, b, n = self.ops, self.buffers, batch.num_tokens
        qkv, q, out = b.qkv[:n], b.q[:n], b.attention[:n]
        head = self._heads[index]
        ops.matmul(worker, plan, b.normed[:n], matrices.qkv, qkv, bias=vectors.qkv_bias)
        ops.rope_store(worker, plan, qkv, head, self._rope, batch, pool, index, q)
        ops.attention(worker, plan, q, head, batch, pool, index, out)
        ops.matmul(worker, plan, out, matrices.attn_output, b.x[:n], accumulate=True)

    def _head_params(self, vectors: LayerVectors) -> HeadParams:
        h = self.hparams
        return HeadParams(
            num_heads=h.num_heads,
            num_kv_heads=h.num_kv_heads,
            key_length=h.key_length,
            value_length=h.value_length,
            norm_eps=h.norm_eps,
            q_norm=vectors.q_norm,
            k_norm=vectors.k_norm,
        )

    def _tables(self, num_positions: int) -> Rope:
        cos, sin = rope_tables(self.hparams.rope, num_positions, self._freq_factors)
        put = self.ops.put
        return Rope(cos=put(cos), sin=put(sin), style=self.hparams.rope.style)

    def _ensure_positions(self, num_positions: int) -> None:
        have = len(self._rope.cos)
        if num_positions > have:
            self._rope = self._tables(max(num_positions, 2 * have))
