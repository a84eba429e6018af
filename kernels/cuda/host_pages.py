"""KV pages in pinned host memory, which travel with the layers.

While a layer computes, the pages of the next that the sweep's rows read are copied into one of two
buffers on the device, and once its attention is done, those that it wrote are copied back. They
come on the stream that weights come on; a kernel on a stream of its own takes them back, since they
are many and far apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cupy as cp
import numpy as np

from kernels.cuda.clock import DeviceClock
from kernels.cuda.matrix import DeviceArray
from kernels.cuda.modules import get_kernel
from kernels.cuda.pinned import device_view, pinned_bytes
from kernels.cuda.plan import SweepPlan
from kernels.cuda.uploads import Uploads
from kernels.host_pages import pages_read, pages_written, runs_of
from kernels.ops import STAGED_LAYERS, Int32, KvTravel, KvType

_TO_DEVICE = 1  # cudaMemcpyKind
_THREADS, _MOST_BLOCKS = 256, 48  # of the copies back; more would take the device from products
_WORD_NBYTES = 16


@dataclass(frozen=True, slots=True)
class Part:
    """Keys, values or scales of pages.

    staged: (STAGED_LAYERS, num_pages, ...) on the device
    in_host: (num_layers, num_pages, ...) the pages, as the device reads and writes them
    """

    staged: DeviceArray
    in_host: DeviceArray

    @classmethod
    def of(cls, staged: DeviceArray, num_layers: int) -> Part:
        shape = (num_layers, *staged.shape[1:])
        pinned = pinned_bytes(num_layers * staged[0].nbytes)
        return cls(staged, device_view(pinned).view(staged.dtype).reshape(shape))

    @property
    def page_nbytes(self) -> int:
        return int(self.staged[0, 0].nbytes)


class HostPages:
    """The pages of one pool that lie in host memory, from page `first_page` of it on.

    copies: the stream that they come on
    """

    def __init__(
        self, parts: Sequence[Part], *, first_page: int, kv_type: KvType, copies: Any
    ) -> None:
        self.parts = parts
        self._first_page, self._kv_type = first_page, kv_type
        self._num_layers = len(parts[0].in_host)
        self._copies, self._leaving = copies, cp.cuda.Stream(non_blocking=True)
        self._arrived: list[Any] = [None] * STAGED_LAYERS
        self._left = [cp.cuda.Event(disable_timing=True) for _ in range(STAGED_LAYERS)]
        self._uploads = Uploads()
        self._serial = 0  # of the sweep that is under way
        self._runs: list[tuple[int, int]] = []
        self._written: DeviceArray = cp.empty(0, np.int32)
        self._clock = DeviceClock()
        self._in_nbytes = self._out_nbytes = 0

    @property
    def num_pages(self) -> int:
        return int(self.parts[0].in_host.shape[1])

    def before_layer(self, plan: SweepPlan, layer: int) -> None:
        """Let operations called after this find the layer's pages staged."""
        if plan.serial != self._serial:
            self._begin(plan, layer)
        buffer = layer % STAGED_LAYERS
        arrived = self._arrived[buffer]
        if arrived is not None:
            self._clock.wait_for(arrived)
        else:
            cp.cuda.get_current_stream().wait_event(self._left[buffer])

    def after_layer(self, layer: int) -> None:
        """The layer's operations have been called: take back what they write, and read on."""
        self._take_back(layer)
        self._bring(layer + STAGED_LAYERS)

    def settle(self) -> None:
        """Operations called after this may write pages in host memory."""
        for left in self._left:
            cp.cuda.get_current_stream().wait_event(left)

    def travel(self) -> KvTravel:
        self._clock.read()
        return KvTravel(
            in_nbytes=self._in_nbytes,
            out_nbytes=self._out_nbytes,
            copy_s=self._clock.copy_s,
            wait_s=self._clock.wait_s,
        )

    def _begin(self, plan: SweepPlan, layer: int) -> None:
        self._serial = plan.serial
        read = pages_read(plan.batch, self._first_page, self._kv_type)
        written = pages_written(plan.batch, self._first_page, self._kv_type)
        self._runs = [(int(begin), int(end)) for begin, end in runs_of(read)]
        self._written = self._on_device(written)
        begun = cp.cuda.Event(disable_timing=True)
        begun.record()
        self._copies.wait_event(begun)
        for ahead in range(STAGED_LAYERS):
            self._bring(layer + ahead)

    def _on_device(self, written: Int32) -> DeviceArray:
        self.settle()  # the copies of the sweep before read the list that this writes over
        (there,) = self._uploads.bring([written])
        return there

    def _bring(self, layer: int) -> None:
        if layer >= self._num_layers:
            return
        buffer = layer % STAGED_LAYERS
        self._arrived[buffer] = None
        if not self._runs:
            return
        self._copies.wait_event(self._left[buffer])
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record(self._copies)
        for part in self.parts:
            self._copy_runs(part, layer, part.staged[buffer].data.ptr)
        end.record(self._copies)
        self._arrived[buffer] = end
        self._clock.copies.append((begin, end))

    def _copy_runs(self, part: Part, layer: int, target: int) -> None:
        source, page_nbytes = part.in_host[layer].data.ptr, part.page_nbytes
        for begin, end in self._runs:
            at, nbytes = begin * page_nbytes, (end - begin) * page_nbytes
            cp.cuda.runtime.memcpyAsync(
                target + at, source + at, nbytes, _TO_DEVICE, self._copies.ptr
            )
            self._in_nbytes += nbytes

    def _take_back(self, layer: int) -> None:
        buffer, done = layer % STAGED_LAYERS, cp.cuda.Event(disable_timing=True)
        done.record()
        self._leaving.wait_event(done)
        if len(self._written):
            with self._leaving:
                for part in self.parts:
                    self._copy_written(part, layer, buffer)
        self._left[buffer].record(self._leaving)

    def _copy_written(self, part: Part, layer: int, buffer: int) -> None:
        count, num_words = len(self._written), part.page_nbytes // _WORD_NBYTES
        get_kernel("host_pages.cu", "copy_pages")(
            (min(count, _MOST_BLOCKS),),
            (_THREADS,),
            (
                np.int32(count),
                np.int32(num_words),
                self._written,
                part.staged[buffer],
                part.in_host[layer],
            ),
        )
        self._out_nbytes += count * part.page_nbytes
