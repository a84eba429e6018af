"""CpuOps: the Ops protocol on CPU threads. Each operation is one kernel call per worker."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from kernels.choices import Choices, Edits, Rows
from kernels.cpu import attention, kv, pointwise, product, sampling
from kernels.cpu.barrier import barrier
from kernels.cpu.buffers import give_back, zeros
from kernels.cpu.jit import compile_all, compile_for_kv
from kernels.cpu.matrix import CpuMatrix, quantised_matrix
from kernels.cpu.pages import (
    DEFAULT_KV_TYPE,
    DTYPES,
    KvArrays,
    page_len,
    page_nbytes,
    row_nbytes,
    scales_len,
    value_stride,
)
from kernels.cpu.plan import Scratch, SweepPlan, num_new_pages, plan_sweep, token_range
from kernels.cpu.vector import PANEL
from kernels.cpu.workers import Team, TeamBroken, default_num_threads
from kernels.ops import (
    PAGE_TOKENS,
    Batch,
    Float32,
    HeadParams,
    Int32,
    KernelError,
    KvShape,
    KvTravel,
    KvType,
    Rope,
)
from kernels.quants import BlockTensor

_EMPTY = np.empty(0, np.float32)
# A worker that takes tokens reads all weights, at 400 / tokens GB/s for 200 GFLOP/s; the memory
# carries that for all workers where each has this many tokens, times the number of workers.
_TOKENS_TO_SPLIT = 32


@dataclass(frozen=True, slots=True)
class CpuKvPool:
    """See `KvPool`; arrays: all pages, host memory being the device's"""

    num_pages: int
    num_host_pages: int
    kv_type: KvType
    page_nbytes: int
    arrays: KvArrays

    @property
    def keys(self) -> npt.NDArray[Any]:
        return self.arrays.keys

    @property
    def values(self) -> npt.NDArray[Any]:
        return self.arrays.values


class CpuOps:
    """See `kernels.ops.Ops`.

    A worker's tokens stay its own through token-wise operations, which need no barrier; products
    split by outputs, attention and the head wait for all workers before and after.
    """

    name = "cpu"
    default_kv_type = DEFAULT_KV_TYPE
    product_way = "float32"
    runs_in_order = False  # a worker goes on with its tokens while another is behind
    frees_pages = True
    copies = None

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is not None and num_threads < 1:
            raise KernelError(f"num_threads is {num_threads}; give at least 1, or None for all")
        self.num_workers = num_threads or default_num_threads()
        compile_all()
        self._team = Team(self.num_workers)
        self._barrier = self._team.barrier_state
        self._product_scratch = self._scratch(product.SCRATCH_LEN)
        self._attention_scratch = self._scratch(0)
        self._visits = tuple(
            np.empty(attention.VISITS_LEN, np.int64) for _ in range(self.num_workers)
        )
        self._new_pages = zeros((0,), np.uint16)

    def _scratch(self, length: int) -> tuple[Float32, ...]:
        return tuple(zeros((length,), np.float32) for _ in range(self.num_workers))

    def close(self) -> None:
        self._team.close()

    def run(self, body: Callable[[int], None]) -> None:
        self._team.run(body)

    def run_sweep(self, plan: SweepPlan, key: Hashable, body: Callable[[int], None]) -> None:
        self.run(body)

    def pack(self, tensors: Sequence[BlockTensor], *, expand: bool) -> CpuMatrix:
        quantised = quantised_matrix(tensors)
        return self._expand(quantised) if expand else quantised

    def _expand(self, weight: CpuMatrix) -> CpuMatrix:
        panels = zeros((product.num_panels(weight.parts), weight.num_inputs, PANEL), np.float32)

        def body(worker: int) -> None:
            product.expand(worker, self.num_workers, weight.parts, panels)

        self.run(body)
        parts = weight.parts.copy()
        parts[:, product.ADDRESS] = (
            panels.ctypes.data + parts[:, product.FIRST_PANEL] * weight.num_inputs * PANEL * 4
        )
        parts[:, product.TYPE_ID] = product.EXPANDED
        return CpuMatrix(
            num_outputs=weight.num_outputs,
            num_inputs=weight.num_inputs,
            nbytes=panels.nbytes,
            layout="f32-panels",
            parts=parts,
            owners=(panels,),
        )

    def memory_info(self) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    def synchronize(self) -> None:
        pass  # `run` has waited

    def scratch_nbytes(self, shapes: Sequence[tuple[int, int]], num_tokens: int) -> int:
        return 0  # of its workers, made when they start

    def empty(self, num_rows: int, width: int) -> Float32:
        return np.empty((num_rows, width), np.float32)

    def shared(self, nbytes: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        data = np.empty(nbytes, np.uint8)
        return data, data

    def put(self, array: Float32) -> Float32:
        return array

    def get(self, array: Float32) -> Float32:
        return array

    def kv_page_nbytes(self, shape: KvShape, kv_type: KvType) -> int:
        return page_nbytes(shape, kv_type)

    def kv_row_nbytes(self, shape: KvShape, kv_type: KvType) -> int:
        return row_nbytes(shape, kv_type)

    def kv_pool(
        self,
        shape: KvShape,
        *,
        num_pages: int,
        kv_type: KvType,
        num_rows: int = 0,
        num_host_pages: int = 0,
    ) -> CpuKvPool:
        compile_for_kv(kv_type)
        num_all = num_pages + num_host_pages
        outer, is_int8 = (shape.num_layers, num_all, shape.num_kv_heads), kv_type == "int8"
        rows = (shape.num_layers, num_rows if is_int8 else 0, shape.num_kv_heads)
        arrays = KvArrays(
            keys=zeros((*outer, shape.key_length, PAGE_TOKENS), DTYPES[kv_type]),
            values=zeros((*outer, PAGE_TOKENS, value_stride(shape)), DTYPES[kv_type]),
            scales=zeros((*outer, scales_len(shape, kv_type)), np.uint16),
            open_pages=zeros((*rows, page_len(shape)), np.uint16),
        )
        page_nbytes = self.kv_page_nbytes(shape, kv_type)
        return CpuKvPool(num_pages, num_host_pages, kv_type, page_nbytes, arrays)

    def kv_travel(self, pool: CpuKvPool) -> KvTravel:
        return KvTravel()

    def kv_release(self, pool: CpuKvPool, pages: Sequence[int]) -> None:
        for array in (pool.keys, pool.values):
            for layer in array:
                for page in pages:
                    give_back(layer[page])

    def kv_copy(self, pool: CpuKvPool, source: int, target: int) -> None:
        for array in (pool.keys, pool.values, pool.arrays.scales):
            array[:, target] = array[:, source]

    def choose(self, logits: Float32, specs: Rows, edits: Edits, num_tokens: int) -> Choices:
        workers = self.num_workers
        return sampling.choose(logits, specs, edits, num_tokens, run=self.run, num_workers=workers)

    def plan(self, batch: Batch, shape: KvShape, num_heads: int) -> SweepPlan:
        length = attention.scratch_len(
            num_heads // shape.num_kv_heads, shape.key_length, value_stride(shape)
        )
        if len(self._attention_scratch[0]) < length:
            self._attention_scratch = self._scratch(length)
        new_len = int(num_new_pages(batch).sum()) * shape.num_kv_heads * page_len(shape)
        if len(self._new_pages) < new_len:
            self._new_pages = zeros((new_len,), np.uint16)  # memory is taken by int8 alone
        scratch = Scratch(self._attention_scratch, self._visits, self._new_pages[:new_len])
        return plan_sweep(batch, shape, num_heads, scratch)

    # ---- inside run(body), by every worker -------------------------------------------------

    def barrier(self, worker: int) -> None:
        _check(barrier(self._barrier, self.num_workers))

    def embed(
        self, worker: int, plan: SweepPlan, weight: CpuMatrix, token_ids: Int32, out: Float32
    ) -> None:
        if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < weight.num_outputs:
            raise KernelError(
                f"token ids from {token_ids.min()} to {token_ids.max()}, but the embedding has "
                f"rows 0 to {weight.num_outputs - 1}"
            )
        begin, end = plan.ranges[worker]
        scratch = self._product_scratch[worker]
        product.gather_rows(begin, end, weight.parts, token_ids, out, scratch)

    def rms_norm(
        self, worker: int, plan: SweepPlan, x: Float32, weight: Float32, eps: float, out: Float32
    ) -> None:
        assert x.shape == out.shape == (plan.num_tokens, len(weight)), (x.shape, out.shape)
        begin, end = plan.ranges[worker]
        pointwise.rms_norm(begin, end, x, weight, eps, out)

    def matmul(
        self,
        worker: int,
        plan: SweepPlan,
        x: Float32,
        weight: CpuMatrix,
        out: Float32,
        *,
        bias: Float32 | None = None,
        accumulate: bool = False,
    ) -> None:
        assert len(x) == plan.num_tokens, (x.shape, plan.num_tokens)
        assert bias is None or len(bias) == weight.num_outputs, (bias.shape, weight.num_outputs)
        by_tokens = (
            weight.layout == "f32-panels"
            and plan.num_tokens >= _TOKENS_TO_SPLIT * self.num_workers**2
        )
        self._product(
            worker, by_tokens, x, weight, out, _EMPTY if bias is None else bias, accumulate
        )

    def _product(
        self,
        worker: int,
        by_tokens: bool,
        x: Float32,
        weight: CpuMatrix,
        out: Float32,
        bias: Float32,
        accumulate: bool,
    ) -> None:
        assert x.shape[1] == weight.num_inputs, (x.shape, weight.num_inputs)
        assert out.shape == (len(x), weight.num_outputs), (out.shape, len(x), weight.num_outputs)
        done = product.product(
            self._barrier,
            worker,
            self.num_workers,
            by_tokens,
            weight.parts,
            x,
            out,
            bias,
            accumulate,
            self._product_scratch[worker],
        )
        _check(done)

    def rope_store(
        self,
        worker: int,
        plan: SweepPlan,
        qkv: Float32,
        head: HeadParams,
        rope: Rope,
        batch: Batch,
        pool: CpuKvPool,
        layer: int,
        q: Float32,
    ) -> None:
        assert len(qkv) == len(q) == plan.num_tokens, (qkv.shape, q.shape, plan.num_tokens)
        assert pool.kv_type != "int8" or not plan.leaves_an_open_page, batch.segments
        begin, end = plan.ranges[worker]
        pointwise.rope_store(
            begin,
            end,
            qkv,
            _EMPTY if head.q_norm is None else head.q_norm,
            _EMPTY if head.k_norm is None else head.k_norm,
            head.norm_eps,
            rope.cos,
            rope.sin,
            rope.style == "halves",
            batch.positions,
            batch.rows,
            batch.page_table,
            pool.arrays,
            plan.new_pages,
            plan.page_of,
            layer,
            head.value_length,
            q,
            plan.scratch[worker],
        )

    def attention(
        self,
        worker: int,
        plan: SweepPlan,
        q: Float32,
        head: HeadParams,
        batch: Batch,
        pool: CpuKvPool,
        layer: int,
        out: Float32,
    ) -> None:
        if pool.kv_type == "int8" and len(plan.closing):
            self._close_pages(worker, plan, head, batch, pool, layer)
        done = attention.attention(
            self._barrier,
            worker,
            self.num_workers,
            plan.tasks[worker],
            plan.pieces,
            q,
            pool.arrays,
            plan.new_pages,
            plan.page_of,
            layer,
            head.num_heads,
            head.value_length,
            batch.positions,
            batch.rows,
            batch.page_table,
            out,
            plan.scratch[worker],
            plan.visits[worker],
            plan.pages_read,
        )
        _check(done)

    def _close_pages(
        self,
        worker: int,
        plan: SweepPlan,
        head: HeadParams,
        batch: Batch,
        pool: CpuKvPool,
        layer: int,
    ) -> None:
        done = kv.close_pages(
            self._barrier,
            worker,
            self.num_workers,
            plan.closing,
            pool.arrays,
            plan.new_pages,
            plan.page_of,
            layer,
            head.value_length,
            batch.positions,
            batch.rows,
            batch.page_table,
        )
        _check(done)

    def swiglu(self, worker: int, plan: SweepPlan, gate_up: Float32, out: Float32) -> None:
        assert gate_up.shape == (plan.num_tokens, 2 * out.shape[1]), (gate_up.shape, out.shape)
        begin, end = plan.ranges[worker]
        pointwise.swiglu(begin, end, gate_up, out)

    def head(
        self,
        worker: int,
        plan: SweepPlan,
        x: Float32,
        norm: Float32,
        eps: float,
        weight: CpuMatrix,
        logit_indices: Int32,
        normed: Float32,
        logits: Float32,
    ) -> None:
        _check(barrier(self._barrier, self.num_workers))
        begin, end = token_range(len(logit_indices), worker, self.num_workers)
        pointwise.rms_norm_rows(begin, end, x, logit_indices, norm, eps, normed)
        self._product(worker, False, normed, weight, logits, _EMPTY, False)


def _check(done: bool) -> None:
    if not done:
        raise TeamBroken("another worker failed")
