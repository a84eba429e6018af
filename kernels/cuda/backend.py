"""CudaOps: the Ops protocol on one GPU. Each operation is one or a few launches on one stream."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt

from kernels.choices import Choices, Edits, Rows
from kernels.cuda import ProductWay, kv_pool, matrix, sampling
from kernels.cuda.few import FewProducts
from kernels.cuda.kv_pool import CudaKvPool
from kernels.cuda.launch import Kernel
from kernels.cuda.matrix import CudaMatrix, DeviceArray
from kernels.cuda.modules import MAX_GRID_Y, NULL, blocks_for, floats_together, get_kernel
from kernels.cuda.pinned import device_view, pinned_bytes
from kernels.cuda.plan import HalfPages, SweepPlan, plan_sweep
from kernels.cuda.product import Products
from kernels.cuda.recordings import Recordings
from kernels.cuda.scratch import Scratch, free_unused
from kernels.cuda.tasks import PARTIALS_NBYTES, TaskMemory, most_partials
from kernels.cuda.uploads import Uploads
from kernels.ops import (
    STAGED_LAYERS,
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

_TYPE_NAMES = {"f32": "float", "f16": "__half"}  # of a pool's elements, in its own kernels
_THREADS, _MOST_THREADS = 256, 1024
_FULL_BLOCKS = 256  # blocks of `_THREADS` that fill a device
_WARPS = 4
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # cudaDeviceAttr


class CudaOps:
    """See `kernels.ops.Ops`. One worker, whose calls return before the GPU has done them.

    device: index among the visible GPUs
    products: "tiles" of any number of tokens, inputs rounded to halves (`kernels.cuda.product`), or
        "few": all sweeps in groups of eight tokens (`kernels.cuda.few`); bytes differ between them
    library: whether tiles may use the vendor's library
    copies: the stream that weights and KV pages come from host memory on
    """

    name = "cuda"
    runs_in_order = True
    frees_pages = False  # device memory stays with its pool
    default_kv_type: KvType = "f16"
    num_workers = 1

    def __init__(
        self,
        device: int = 0,
        *,
        products: ProductWay = "tiles",
        library: bool = True,
    ) -> None:
        check_device(device)
        self._device = cp.cuda.Device(device)
        self._device.use()
        self.products: Products | FewProducts
        self.product_way: str = products
        self._scratch = scratch = Scratch()
        few = products == "few"
        self.products = FewProducts(scratch) if few else Products(scratch, library=library)
        self._plan_uploads, self._choice_uploads = Uploads(), Uploads()
        self._tasks = TaskMemory()
        self.copies = cp.cuda.Stream(non_blocking=True)
        self._has_int8_pools = False
        self.recordings = Recordings()

    @property
    def device_name(self) -> str:
        properties = cp.cuda.runtime.getDeviceProperties(self._device.id)
        return str(properties["name"].decode())

    def driver_version(self) -> str:
        """The newest CUDA version that the driver runs, "12.9"."""
        return _version_text(cp.cuda.runtime.driverGetVersion())

    def runtime_version(self) -> str:
        """The CUDA version that CuPy was built for, "12.9"."""
        return _version_text(cp.cuda.runtime.runtimeGetVersion())

    def memory_info(self) -> tuple[int, int]:
        """Bytes of the device that no process holds, and all bytes."""
        free_unused()
        free_nbytes, total_nbytes = self._device.mem_info
        return int(free_nbytes), int(total_nbytes)

    def synchronize(self) -> None:
        self._device.synchronize()

    def scratch_nbytes(self, shapes: Sequence[tuple[int, int]], num_tokens: int) -> int:
        nbytes = self.products.buffers(shapes, num_tokens)
        for name, least in (("sums", PARTIALS_NBYTES), (sampling.ROOM, sampling.ROOM_NBYTES)):
            nbytes[name] = max(nbytes.get(name, 0), least)
        return sum(nbytes.values())

    def close(self) -> None:
        self.recordings.clear()
        self.products.close()
        self._scratch.clear()

    def run(self, body: Callable[[int], None]) -> None:
        with self._device:
            body(0)

    def run_sweep(self, plan: SweepPlan, key: Hashable, body: Callable[[int], None]) -> None:
        if key is None or plan.key is None:
            self.run(body)
            return
        moves = self._scratch.num_moves
        with self._device:
            self.recordings.run((key, plan.key, moves), lambda: body(0))

    def pack(self, tensors: Sequence[BlockTensor], *, expand: bool) -> CudaMatrix:
        return matrix.pack(tensors, expand=expand)

    def empty(self, num_rows: int, width: int) -> Float32:
        buffer: Float32 = cp.empty((num_rows, width), np.float32)
        return buffer

    def shared(self, nbytes: int) -> tuple[npt.NDArray[np.uint8], DeviceArray]:
        host = pinned_bytes(nbytes)
        return host, device_view(host)

    def put(self, array: Float32) -> Float32:
        on_device: Float32 = cp.asarray(np.ascontiguousarray(array, np.float32))
        return on_device

    def get(self, array: Float32) -> Float32:
        on_host: Float32 = cp.asnumpy(array)
        return on_host

    def kv_page_nbytes(self, shape: KvShape, kv_type: KvType) -> int:
        return kv_pool.page_nbytes(shape, kv_type)

    def kv_row_nbytes(self, shape: KvShape, kv_type: KvType) -> int:
        return kv_pool.row_nbytes(shape, kv_type)

    def kv_pool(
        self,
        shape: KvShape,
        *,
        num_pages: int,
        kv_type: KvType,
        num_rows: int = 0,
        num_host_pages: int = 0,
    ) -> CudaKvPool:
        self._has_int8_pools |= kv_type == "int8"
        return kv_pool.make_pool(
            shape, num_pages, kv_type, num_rows, num_host_pages, copies=self.copies
        )

    def kv_copy(self, pool: CudaKvPool, source: int, target: int) -> None:
        kv_pool.copy_page(pool, source, target)

    def kv_travel(self, pool: CudaKvPool) -> KvTravel:
        return KvTravel() if pool.host is None else pool.host.travel()

    def kv_release(self, pool: CudaKvPool, pages: Sequence[int]) -> None:
        pass

    def choose(self, logits: Float32, specs: Rows, edits: Edits, num_tokens: int) -> Choices:
        on_device = cp.asarray(logits)
        return sampling.choose(
            on_device, specs, edits, num_tokens, self._scratch, self._choice_uploads
        )

    def plan(self, batch: Batch, shape: KvShape, num_heads: int) -> SweepPlan:
        return plan_sweep(
            batch,
            shape,
            num_heads,
            self._plan_uploads,
            self._tasks,
            in_halves=self._has_int8_pools,
        )

    # ---- inside run(body) ------------------------------------------------------------------

    def barrier(self, worker: int) -> None:
        pass  # one worker, and one stream that keeps the order of the calls

    def embed(
        self, worker: int, plan: SweepPlan, weight: CudaMatrix, token_ids: Int32, out: Float32
    ) -> None:
        if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < weight.num_outputs:
            raise KernelError(
                f"token ids from {token_ids.min()} to {token_ids.max()}, but the embedding has "
                f"rows 0 to {weight.num_outputs - 1}"
            )
        is_batch = token_ids is plan.batch.token_ids
        ids = self._current(plan).token_ids if is_batch else cp.asarray(token_ids)
        matrix.gather_rows(weight, ids, out)

    def _current(self, plan: SweepPlan) -> SweepPlan:
        assert plan.serial == self._plan_uploads.serial, "a later plan has taken its place"
        return plan

    def rms_norm(
        self, worker: int, plan: SweepPlan, x: Float32, weight: Float32, eps: float, out: Float32
    ) -> None:
        assert x.shape == out.shape == (plan.num_tokens, len(weight)), (x.shape, out.shape)
        _rms_norm(x, NULL, weight, eps, out)

    def matmul(
        self,
        worker: int,
        plan: SweepPlan,
        x: Float32,
        weight: CudaMatrix,
        out: Float32,
        *,
        bias: Float32 | None = None,
        accumulate: bool = False,
    ) -> None:
        assert len(x) == plan.num_tokens, (x.shape, plan.num_tokens)
        assert bias is None or len(bias) == weight.num_outputs, (bias.shape, weight.num_outputs)
        self._product(x, weight, out, bias, accumulate)

    def _product(
        self,
        x: Float32,
        weight: CudaMatrix,
        out: Float32,
        bias: Float32 | None = None,
        accumulate: bool = False,
    ) -> None:
        assert x.shape[1] == weight.num_inputs, (x.shape, weight.num_inputs)
        assert out.shape == (len(x), weight.num_outputs), (out.shape, len(x), weight.num_outputs)
        self.products.matmul(x, weight, out, bias, accumulate)

    def rope_store(
        self,
        worker: int,
        plan: SweepPlan,
        qkv: Float32,
        head: HeadParams,
        rope: Rope,
        batch: Batch,
        pool: CudaKvPool,
        layer: int,
        q: Float32,
    ) -> None:
        assert len(qkv) == len(q) == plan.num_tokens, (qkv.shape, q.shape, plan.num_tokens)
        plan = self._current(plan)
        if pool.host is not None:
            pool.host.before_layer(plan, layer)
        if pool.kv_type == "int8":
            assert not half_pages_of(plan).leaves_an_open_page, batch.segments
            name = "rope_store_int8"
            places = self._half_page_places(plan, pool, layer)
        else:
            name = f"rope_store<{_TYPE_NAMES[pool.kv_type]}>"
            places = (*_table(plan, pool, layer), pool.keys, pool.values)
        parts = blocks_for(head.num_heads + head.num_kv_heads, _THREADS // 32)
        get_kernel("pointwise.cu", name)(
            (plan.num_tokens, min(parts, blocks_for(_FULL_BLOCKS, plan.num_tokens))),
            (_THREADS,),
            (
                np.int32(head.num_heads),
                np.int32(head.num_kv_heads),
                np.int32(head.key_length),
                np.int32(head.value_length),
                np.int32(pool.keys.shape[4]),
                qkv,
                NULL if head.q_norm is None else head.q_norm,
                NULL if head.k_norm is None else head.k_norm,
                np.float32(head.norm_eps),
                rope.cos,
                rope.sin,
                np.int32(rope.cos.shape[1]),
                np.int32(rope.style == "halves"),
                plan.positions,
                plan.segments,
                *places,
                q,
            ),
            shared_mem=_THREADS // 32 * head.key_length * 4,
        )

    def attention(
        self,
        worker: int,
        plan: SweepPlan,
        q: Float32,
        head: HeadParams,
        batch: Batch,
        pool: CudaKvPool,
        layer: int,
        out: Float32,
    ) -> None:
        plan = self._current(plan)
        places: tuple[Any, ...] = ()
        arrays: tuple[DeviceArray, ...] = (pool.keys, pool.values)
        if pool.kv_type == "int8":
            self._close_pages(plan, pool, layer)
            places = self._half_page_places(plan, pool, layer)
            arrays += (pool.scales,)
        scale = np.float32(head.key_length**-0.5)
        sizes = (np.int32(head.num_heads), np.int32(head.num_kv_heads))
        key_sizes = (*sizes, np.int32(head.key_length), scale)
        value_sizes = (*sizes, np.int32(head.value_length), scale)
        table, partials = _table(plan, pool, layer), self._partial_buffers(head.value_length)
        for part in plan.rounds:
            if len(part.shared):
                _attention_kernel("attention_shared", pool)(
                    (len(part.shared), head.num_kv_heads),
                    (_WARPS * 32,),
                    (*key_sizes, part.shared, plan.members, *table, q, *arrays, *partials),
                )
            _attention_kernel("attention", pool)(
                (len(part.tasks), head.num_kv_heads),
                (_WARPS * 32,),
                (*key_sizes, part.tasks, *table, *places, q, *arrays, out, *partials),
            )
            if len(part.merges):
                get_kernel("attention.cu", "merge_partials")(
                    (len(part.merges), head.num_kv_heads),
                    (_round_up(head.value_length, 32),),
                    (*value_sizes, part.merges, *partials, out),
                )
        if pool.host is not None:
            pool.host.after_layer(layer)

    def _close_pages(self, plan: SweepPlan, pool: CudaKvPool, layer: int) -> None:
        closing = half_pages_of(plan).closing
        if len(closing) == 0:
            return
        _, _, num_kv_heads, value_length, _ = pool.values.shape
        get_kernel("close_pages.cu", "close_pages")(
            (len(closing), num_kv_heads),
            (_THREADS,),
            (
                np.int32(num_kv_heads),
                np.int32(pool.keys.shape[4]),
                np.int32(value_length),
                closing,
                *_table(plan, pool, layer),
                *self._half_page_places(plan, pool, layer),
                pool.keys,
                pool.values,
                pool.scales,
            ),
        )

    def _half_page_places(
        self, plan: SweepPlan, pool: CudaKvPool, layer: int
    ) -> tuple[DeviceArray | np.int64, ...]:
        """Where a layer's pages in halves lie, as the kernels take it.

        The new pages are where products, of which none is going on, keep their inputs.
        """
        half_pages = half_pages_of(plan)
        _, num_rows, page_len = pool.open_pages.shape
        shape = (max(half_pages.num_new, 1), page_len)
        new_pages = self._scratch.take("x", shape, np.float16)
        return half_pages.homes, np.int64(layer * num_rows), pool.open_pages, new_pages

    def _partial_buffers(self, value_length: int) -> list[DeviceArray]:
        """Sums and statistics, where they are in every sweep: recordings hold the addresses."""
        count = most_partials(value_length)
        return self._scratch.take_all(
            "sums", (((count * value_length,), cp.float32), ((count, 2), cp.float32))
        )

    def swiglu(self, worker: int, plan: SweepPlan, gate_up: Float32, out: Float32) -> None:
        num_tokens, ffn = out.shape
        assert gate_up.shape == (plan.num_tokens, 2 * ffn), (gate_up.shape, out.shape)
        count = floats_together(ffn)
        get_kernel("pointwise.cu", f"swiglu<{count}>")(
            (blocks_for(ffn, count * _THREADS), min(num_tokens, MAX_GRID_Y)),
            (_THREADS,),
            (np.int32(num_tokens), np.int32(ffn), gate_up, out),
        )

    def head(
        self,
        worker: int,
        plan: SweepPlan,
        x: Float32,
        norm: Float32,
        eps: float,
        weight: CudaMatrix,
        logit_indices: Int32,
        normed: Float32,
        logits: Float32,
    ) -> None:
        if len(logit_indices) == 0:
            return
        is_batch = logit_indices is plan.batch.logit_indices
        rows = self._current(plan).logit_indices if is_batch else cp.asarray(logit_indices)
        _rms_norm(x, rows, norm, eps, normed)
        self._product(normed, weight, logits)


def half_pages_of(plan: SweepPlan) -> HalfPages:
    assert plan.half_pages is not None, "planned before there was a pool of 8 bits"
    return plan.half_pages


def check_device(index: int) -> None:
    """Raise KernelError where a GPU cannot be used; takes no memory on it."""
    try:
        count = cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise KernelError(f"no GPU can be used: {error}; check the driver (nvidia-smi)") from error
    if not 0 <= index < count:
        raise KernelError(f"GPU {index} is not among the {count} visible; see CUDA_VISIBLE_DEVICES")
    attribute = cp.cuda.runtime.deviceGetAttribute
    major, minor = attribute(_CAPABILITY_MAJOR, index), attribute(_CAPABILITY_MINOR, index)
    if major < 8:
        raise KernelError(
            f"GPU {index} has compute capability {major}{minor}, the kernels need 80 (Ampere) or "
            "newer; run on the CPU"
        )


def _table(plan: SweepPlan, pool: CudaKvPool, layer: int) -> tuple[Any, ...]:
    """The page table, its width, and where the layer's pages are, as the kernels take them."""
    first_staged = len(pool.keys) * pool.num_pages + layer % STAGED_LAYERS * pool.num_host_pages
    return (
        plan.pages,
        np.int32(plan.pages.shape[1]),
        np.int32(pool.num_pages),
        np.int64(layer * pool.num_pages),
        np.int64(first_staged),
    )


def _attention_kernel(name: str, pool: CudaKvPool) -> Kernel:
    """Of the pool's type and sizes."""
    lengths = f"{pool.keys.shape[4]}, {pool.values.shape[3]}"
    if pool.kv_type == "int8":
        return get_kernel(f"{name}_int8.cu", f"{name}_int8<{lengths}>")
    return get_kernel(f"{name}.cu", f"{name}<{_TYPE_NAMES[pool.kv_type]}, {lengths}>")


def _rms_norm(x: Any, rows: Any, weight: Any, eps: float, out: Any) -> None:
    count = floats_together(x.shape[1])
    threads = min(_MOST_THREADS, blocks_for(x.shape[1] // count, 32) * 32)
    get_kernel("pointwise.cu", f"rms_norm<{count}>")(
        (len(out),), (threads,), (np.int32(x.shape[1]), x, rows, weight, np.float32(eps), out)
    )


def _version_text(number: int) -> str:
    """12090 is "12.9"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _round_up(value: int, step: int) -> int:
    return blocks_for(value, step) * step
