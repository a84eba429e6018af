"""The contract of a compute backend: what the engine may ask of it, and in which shapes.

A backend owns its workers (CPU threads; one on a GPU). `Ops.run(body)` calls `body(worker)` once
on each of them, and inside a body *every worker makes the same op calls in the same order with
the same, whole arrays*; each op works on its worker's share and puts whatever barrier it needs
around itself. So a model is written once, as a plain list of calls.

Exactness. A matrix product's output is a sum over fixed blocks of `K_BLOCK` inputs: one chain of
fused multiply-adds from zero inside a block, the block sums added in order. Attention is computed
as partials (m, l, o) over fixed blocks of `ATTENTION_BLOCK` positions, merged in order. Both hold
for any number of tokens, any split over workers and any weight layout, so a row's bytes depend on
that row alone.

KV of 8 bits. A page is *open* until its last position has been stored, and *closed* from then on.
In a pool of type "int8" a closed page holds integers from -127 to 127, keys with one scale for each
KV head and dimension, over the page's positions, values with one for each KV head and position
(Liu et al. 2024, "KIVI"). Scales are the least float16 that reach the largest magnitude. A row's
open page is in float16, apart from the pages, in a place of the row's own. A query reads the page
of its own position in float16 and all earlier ones as integers, whenever they were closed: so its
bytes still do not depend on how the row was cut into sweeps.

    KernelError
    └── UnsupportedTypeError     a tensor type no backend can dequantise
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kernels.choices import Choices, Edits, Rows
from kernels.quants import BlockTensor

KvType = Literal["f32", "f16", "int8"]
RopeStyle = Literal["adjacent", "halves"]

PAGE_TOKENS = 32  # tokens of a KV page
K_BLOCK = 256  # inputs of a product that form one chain of multiply-adds
ATTENTION_BLOCK = 256  # positions of one attention partial
STAGED_LAYERS = 2  # whose KV pages in host memory are on the device at once

# What a backend gets back, it made itself: a PackedMatrix, a KvPool, a plan of its own class.
OwnMatrix: TypeAlias = Any
OwnPool: TypeAlias = Any
OwnPlan: TypeAlias = Any

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


def shares_partial_pages(kv_type: KvType) -> bool:
    """Whether the first positions of a page serve a row that goes on otherwise (`Ops.kv_copy`).

    The scales of 8 bits come from all positions of a page, so it serves whole or not at all.
    """
    return kv_type != "int8"


class KernelError(Exception):
    """Base of what a backend raises on purpose."""


class UnsupportedTypeError(KernelError):
    """A tensor type without a dequantiser; the message names the tensor and the type."""


class PackedMatrix(Protocol):
    """A weight in a backend's own layout; made by `Ops.pack`, read by `Ops.matmul`."""

    @property
    def num_outputs(self) -> int: ...

    @property
    def num_inputs(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def layout(self) -> str:
        """Either "f32-panels", expanded, or "gguf-rows", quantised and decoded by tiles."""


class KvPool(Protocol):
    """KV cache pages of all layers, allocated once; inner layout and bytes belong to the backend.

    A page holds `PAGE_TOKENS` positions of one row, keys and values, of every layer.
    """

    @property
    def num_pages(self) -> int:
        """Those on the device."""

    @property
    def num_host_pages(self) -> int:
        """Those after them, in host memory."""

    @property
    def kv_type(self) -> KvType: ...

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page over all layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvShape:
    """num_layers, num_kv_heads, key_length, value_length: what a KV pool holds per token."""

    num_layers: int
    num_kv_heads: int
    key_length: int
    value_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KvTravel:
    """What KV pages in host memory have cost so far.

    in_nbytes, out_nbytes: copied to the device, and back
    copy_s: the copies to the device alone took
    wait_s: operations stood still for them
    """

    in_nbytes: int = 0
    out_nbytes: int = 0
    copy_s: float = 0.0
    wait_s: float = 0.0

    def __sub__(self, earlier: KvTravel) -> KvTravel:
        return KvTravel(
            in_nbytes=self.in_nbytes - earlier.in_nbytes,
            out_nbytes=self.out_nbytes - earlier.out_nbytes,
            copy_s=self.copy_s - earlier.copy_s,
            wait_s=self.wait_s - earlier.wait_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The tokens of one sweep, all rows in one ragged list.

    token_ids: (num_tokens,) int32
    positions: (num_tokens,) int32, position of each token in its row
    rows: (num_tokens,) int32, index into `page_table`
    page_table: (num_rows, max_pages) int32, page of each 32 positions of a row; -1 where none;
        rows may have pages in common where all of their positions lie before the tokens
    segments: (num_segments, 2) int32, token ranges [begin, end) of one row each, with
        consecutive positions; they cover all tokens in order. With KV of 8 bits one that begins
        inside a page ends in it, so that a sweep can be run again after it failed
    logit_indices: (num_logits,) int32, tokens whose logits are wanted, in ascending order
    """

    token_ids: Int32
    positions: Int32
    rows: Int32
    page_table: Int32
    segments: Int32
    logit_indices: Int32

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary embedding tables.

    cos, sin: (num_positions, rotary_dim // 2) float32, attention scaling included
    style: "adjacent" rotates pairs (2i, 2i+1), "halves" pairs (i, i + rotary_dim/2)
    Dimensions from rotary_dim on are left as they are.
    """

    cos: Float32
    sin: Float32
    style: RopeStyle


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadParams:
    """What happens to q and k between their product and attention.

    num_heads, num_kv_heads, key_length, value_length: head counts and sizes
    q_norm, k_norm: (key_length,) float32 RMS norm weights per head (qwen3), or None
    norm_eps: epsilon of those norms
    """

    num_heads: int
    num_kv_heads: int
    key_length: int
    value_length: int
    norm_eps: float
    q_norm: Float32 | None = None
    k_norm: Float32 | None = None


class Ops(Protocol):
    """One compute backend. Arrays are C-contiguous float32 unless said otherwise."""

    name: str
    num_workers: int
    default_kv_type: KvType
    product_way: str  # how products are computed, for records
    runs_in_order: bool  # one operation after the other, so that buffers may share memory
    frees_pages: bool  # `kv_release` gives memory back, for others to take
    copies: Any  # the stream that all comes from host memory on; None where nothing does

    def close(self) -> None:
        """Stop the workers. Idempotent."""

    def run(self, body: Callable[[int], None]) -> None:
        """Call `body(worker)` on every worker and wait; re-raises the first exception."""

    def run_sweep(self, plan: OwnPlan, key: Hashable, body: Callable[[int], None]) -> None:
        """As `run`, for a whole sweep by a plan.

        key: what the calls of the body depend on beside the plan, so that a backend may record
            them and replay them for the next sweep of equal key; None where they always differ
        """

    def pack(self, tensors: Sequence[BlockTensor], *, expand: bool) -> PackedMatrix:
        """Stack matrices of equal num_inputs along their outputs into one packed weight.

        tensors: each (num_outputs_i, num_inputs), any supported type, types may differ; data that
            lies where the operations want it already is not copied: what is packed unexpanded
            reads those bytes, whatever they become
        expand: True for float32 in the product's layout, False to keep the quantised bytes
        Raises UnsupportedTypeError. Not called inside `run`.
        """

    def memory_info(self) -> tuple[int, int]:
        """Bytes of the device's memory that nobody holds, and all bytes."""

    def synchronize(self) -> None:
        """Wait until all operations called so far are done."""

    def scratch_nbytes(self, shapes: Sequence[tuple[int, int]], num_tokens: int) -> int:
        """Bytes beside their arguments that products of (num_outputs, num_inputs) take at most."""

    def empty(self, num_rows: int, width: int) -> Float32:
        """A work buffer (num_rows, width) float32 where the operations want it; not zeroed."""

    def shared(self, nbytes: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Host memory that operations read in place: (nbytes,) uint8 as the host fills it, and the
        same bytes as `pack` takes them without a copy.
        """

    def put(self, array: Float32) -> Float32:
        """A host array where the operations want it: norms, biases, rotary tables."""

    def get(self, array: Float32) -> Float32:
        """A result of the operations as a host array; may be a view that the next sweep reuses."""

    def kv_pool(
        self,
        shape: KvShape,
        *,
        num_pages: int,
        kv_type: KvType,
        num_rows: int = 0,
        num_host_pages: int = 0,
    ) -> KvPool:
        """Allocate a pool of zeroed pages.

        num_rows: lines of the page tables it is used with, each of which may have an open page
        num_host_pages: pages after the others, in host memory beside the device. Of each layer
            those that a sweep reads are copied to the device, one layer ahead, and those that it
            writes are copied back; `STAGED_LAYERS` layers of all of them have a place there.
            Where the device's memory is the host's, they are like the others
        Raises KernelError: the backend has no such type.
        """

    def kv_travel(self, pool: OwnPool) -> KvTravel:
        """What a pool's pages in host memory have cost so far."""

    def kv_page_nbytes(self, shape: KvShape, kv_type: KvType) -> int:
        """Bytes of one page of such a pool over all layers. Raises KernelError, as above."""

    def kv_row_nbytes(self, shape: KvShape, kv_type: KvType) -> int:
        """Bytes of a row's open page over all layers; 0 where it is one of the pool's pages."""

    def kv_release(self, pool: OwnPool, pages: Sequence[int]) -> None:
        """Give the memory of pages back where the system allows it; a later write takes it anew."""

    def kv_copy(self, pool: OwnPool, source: int, target: int) -> None:
        """Copy one page over all layers (copy-on-write of a shared page).

        With KV of 8 bits: a closed page; the open one is not among the pages.
        """

    def choose(self, logits: Float32, specs: Rows, edits: Edits, num_tokens: int) -> Choices:
        """The next token of each row of logits, by the rules of `kernels.choices`; not in `run`.

        logits: (num_rows, vocab_size) float32, as the operations made them; left as they are
        specs: (num_rows,) of ROW
        num_tokens: ids from here on are padding
        """

    def plan(self, batch: Batch, shape: KvShape, num_heads: int) -> OwnPlan:
        """Split a batch over the workers, once a sweep; passed back as `plan` below."""

    # ---- inside run(body), by every worker -------------------------------------------------

    def barrier(self, worker: int) -> None:
        """Wait until every worker is here: what each did before, the others see after."""

    def embed(
        self, worker: int, plan: OwnPlan, weight: OwnMatrix, token_ids: Int32, out: Float32
    ) -> None:
        """out[t] = row token_ids[t] of weight, dequantised; out: (num_tokens, hidden)."""

    def rms_norm(
        self, worker: int, plan: OwnPlan, x: Float32, weight: Float32, eps: float, out: Float32
    ) -> None:
        """out = x / sqrt(mean(x²) + eps) * weight, per token (Zhang & Sennrich 2019)."""

    def matmul(
        self,
        worker: int,
        plan: OwnPlan,
        x: Float32,
        weight: OwnMatrix,
        out: Float32,
        *,
        bias: Float32 | None = None,
        accumulate: bool = False,
    ) -> None:
        """out = x · weightᵀ (+ bias), or out += x · weightᵀ where `accumulate`.

        x: (num_tokens, num_inputs); out: (num_tokens, num_outputs); bias: (num_outputs,)
        """

    def rope_store(
        self,
        worker: int,
        plan: OwnPlan,
        qkv: Float32,
        head: HeadParams,
        rope: Rope,
        batch: Batch,
        pool: OwnPool,
        layer: int,
        q: Float32,
    ) -> None:
        """Normalise (where asked) and rotate q and k, put q into `q`, k and v into the pool.

        qkv: (num_tokens, num_heads·key_length + num_kv_heads·(key_length + value_length))
        q: (num_tokens, num_heads·key_length)
        """

    def attention(
        self,
        worker: int,
        plan: OwnPlan,
        q: Float32,
        head: HeadParams,
        batch: Batch,
        pool: OwnPool,
        layer: int,
        out: Float32,
    ) -> None:
        """Causal attention of each token over its row's positions [0, position].

        What a page holds from an earlier row never reaches the result, NaN included.
        Scaled by key_length^-1/2; out: (num_tokens, num_heads·value_length).
        """

    def swiglu(self, worker: int, plan: OwnPlan, gate_up: Float32, out: Float32) -> None:
        """out = silu(gate) * up; gate_up: (num_tokens, 2·ffn), out: (num_tokens, ffn)."""

    def head(
        self,
        worker: int,
        plan: OwnPlan,
        x: Float32,
        norm: Float32,
        eps: float,
        weight: OwnMatrix,
        logit_indices: Int32,
        normed: Float32,
        logits: Float32,
    ) -> None:
        """logits = rms_norm(x[logit_indices]) · weightᵀ; normed: (num_logits, hidden) scratch."""
