"""The CUDA backend behind host arrays, so that what tests one backend also tests this one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kernels.ops import Batch, HeadParams, KvShape, Rope


class HostOps:
    """Takes and fills NumPy arrays; each call copies its arrays to the GPU and its output back."""

    num_workers = 1

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.name = ops.name
        self.pack, self.kv_pool, self.plan = ops.pack, ops.kv_pool, ops.plan

    def run(self, body: Callable[[int], None]) -> None:
        self.ops.run(body)

    def embed(self, worker: int, plan: Any, weight: Any, ids: np.ndarray, out: np.ndarray) -> None:
        self._fill(out, lambda o: self.ops.embed(worker, plan, weight, ids, o))

    def rms_norm(
        self, worker: int, plan: Any, x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray
    ) -> None:
        put = self.ops.put
        self._fill(out, lambda o: self.ops.rms_norm(worker, plan, put(x), put(weight), eps, o))

    def matmul(
        self,
        worker: int,
        plan: Any,
        x: np.ndarray,
        weight: Any,
        out: np.ndarray,
        *,
        bias: np.ndarray | None = None,
        accumulate: bool = False,
    ) -> None:
        x, bias = self.ops.put(x), self._put(bias)
        self._fill(
            out,
            lambda o: self.ops.matmul(worker, plan, x, weight, o, bias=bias, accumulate=accumulate),
        )

    def swiglu(self, worker: int, plan: Any, gate_up: np.ndarray, out: np.ndarray) -> None:
        self._fill(out, lambda o: self.ops.swiglu(worker, plan, self.ops.put(gate_up), o))

    def rope_store(
        self,
        worker: int,
        plan: Any,
        qkv: np.ndarray,
        head: HeadParams,
        rope: Rope,
        batch: Batch,
        pool: Any,
        layer: int,
        q: np.ndarray,
    ) -> None:
        head = replace(head, q_norm=self._put(head.q_norm), k_norm=self._put(head.k_norm))
        rope = replace(rope, cos=self._put(rope.cos), sin=self._put(rope.sin))
        qkv = self.ops.put(qkv)
        self._fill(
            q, lambda o: self.ops.rope_store(worker, plan, qkv, head, rope, batch, pool, layer, o)
        )

    def attention(
        self,
        worker: int,
        plan: Any,
        q: np.ndarray,
        head: HeadParams,
        batch: Batch,
        pool: Any,
        layer: int,
        out: np.ndarray,
    ) -> None:
        q = self.ops.put(q)
        self._fill(out, lambda o: self.ops.attention(worker, plan, q, head, batch, pool, layer, o))

    def head(
        self,
        worker: int,
        plan: Any,
        x: np.ndarray,
        norm: np.ndarray,
        eps: float,
        weight: Any,
        logit_indices: np.ndarray,
        normed: np.ndarray,
        logits: np.ndarray,
    ) -> None:
        x, norm, scratch = (self.ops.put(array) for array in (x, norm, normed))
        self._fill(
            logits,
            lambda o: self.ops.head(worker, plan, x, norm, eps, weight, logit_indices, scratch, o),
        )
        normed[...] = self.ops.get(scratch)

    def _put(self, array: np.ndarray | None) -> Any:
        return None if array is None else self.ops.put(array)

    def _fill(self, out: np.ndarray, call: Callable[[Any], None]) -> None:
        on_device = self.ops.put(out)
        call(on_device)
        out[...] = self.ops.get(on_device)


def kv_shape_of(key_length: int, value_length: int, num_kv_heads: int = 1) -> KvShape:
    return KvShape(
        num_layers=1,
        num_kv_heads=num_kv_heads,
        key_length=key_length,
        value_length=value_length,
    )
