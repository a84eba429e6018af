"""Parcels on their way to a GPU: from pinned host memory, and off the disk through it.

A copy stream runs beside the computing. A slot is written once the operations that read it are
done, and operations wait for what they read; events on the device order the two, so the host
launches ahead. Only pinned memory that the disk is read into is waited for on the host.
"""

from __future__ import annotations

import contextlib
import queue
import statistics
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import cupy as cp
import numpy as np

from engine.links import Bytes, LinkStats, OnProgress, Parcel, read_requests
from kernels.cuda.clock import DeviceClock
from kernels.cuda.pinned import pinned_bytes
from nvme import Reader

STAGING_BUFFERS = 2
FILLS_IN_FLIGHT = 4
PROBE_NBYTES = 256 << 20
_PROBE_REPEATS = 7


def measure_link() -> float:
    """Bytes per second of copies from pinned memory to the device, the median of a few."""
    pinned, target = pinned_bytes(PROBE_NBYTES), cp.empty(PROBE_NBYTES, np.uint8)
    stream, rates = cp.cuda.get_current_stream(), []
    for _ in range(_PROBE_REPEATS):
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record(stream)
        target.data.copy_from_host_async(pinned.ctypes.data, PROBE_NBYTES, stream)
        end.record(stream)
        end.synchronize()
        rates.append(PROBE_NBYTES / cp.cuda.get_elapsed_time(begin, end) * 1e3)
    del target
    cp.get_default_memory_pool().free_all_blocks()
    return float(statistics.median(rates))


@dataclass(slots=True)
class _Ticket:
    """A slot to fill. free: passes when it may be written; arrived: when it has been."""

    parcel: Parcel
    slot: Any
    free: Any
    arrived: Any = None


class CudaLink:
    """Fills a ring in device memory.

    reader: of the model's files; closed with the link
    parcels: all that stream, in order of use
    in_host: which of them stay in pinned memory; they are read into it now
    copies: the stream that they come on
    progress: called as (parcels read, parcels to read)

    Raises ReadError.
    """

    def __init__(
        self,
        reader: Reader,
        parcels: Sequence[Parcel],
        in_host: Sequence[bool],
        copies: Any,
        progress: OnProgress | None = None,
    ) -> None:
        self._reader = reader
        near = [parcel for parcel, stays in zip(parcels, in_host, strict=True) if stays]
        self._pinned = _read_into_host(reader, near, progress or (lambda done, total: None))
        far = [parcel for parcel in parcels if parcel.index not in self._pinned]
        self._stream = copies
        self._pending: deque[_Ticket] = deque()  # whose bytes are not in host memory yet
        self._staging = _Staging(reader, far) if far else None
        self._clock = DeviceClock()
        self._copied_nbytes = 0

    def make_ring(self, nbytes: int) -> Bytes:
        ring: Bytes = cp.empty(nbytes, np.uint8)
        return ring

    def submit(self, parcel: Parcel, slot: Bytes) -> _Ticket:
        free = cp.cuda.Event(disable_timing=True)
        free.record()
        ticket = _Ticket(parcel, slot, free)
        pinned = self._pinned.get(parcel.index)
        if pinned is None:
            self._pending.append(ticket)
        else:
            self._copy(ticket, pinned)
        self._copy_staged()
        return ticket

    def wait(self, ticket: _Ticket) -> None:
        while ticket.arrived is None:
            assert self._staging is not None
            self._copy_one(self._staging.take())
        self._clock.wait_for(ticket.arrived)

    def restart(self, tickets: Sequence[_Ticket]) -> None:
        self._pending.clear()
        if self._staging is not None:
            self._staging.restart()
        self._stream.synchronize()
        cp.cuda.get_current_stream().synchronize()

    def stats(self) -> LinkStats:
        self._clock.read()
        return LinkStats(
            wait_s=self._clock.wait_s,
            copied_nbytes=self._copied_nbytes,
            copy_busy_s=self._clock.copy_s,
            read=self._reader.stats(),
        )

    def close(self) -> None:
        if self._staging is not None:
            self._staging.stop()
        self._stream.synchronize()
        self._pinned = {}
        self._reader.close()

    def _copy_staged(self) -> None:
        while self._pending and self._staging is not None:
            staged = self._staging.take_ready()
            if staged is None:
                return
            self._copy_one(staged)

    def _copy_one(self, staged: _Staged) -> None:
        ticket = self._pending.popleft()
        assert ticket.parcel.index == staged.index, (ticket.parcel.index, staged.index)
        self._copy(ticket, staged.buffer)
        assert self._staging is not None
        self._staging.give_back(staged.buffer, ticket.arrived)

    def _copy(self, ticket: _Ticket, source: Bytes) -> None:
        nbytes = ticket.parcel.layout.nbytes
        self._stream.wait_event(ticket.free)
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record(self._stream)
        ticket.slot.data.copy_from_host_async(source.ctypes.data, nbytes, self._stream)
        end.record(self._stream)
        ticket.arrived = end
        self._copied_nbytes += nbytes
        self._clock.copies.append((begin, end))


def _read_into_host(
    reader: Reader, parcels: Sequence[Parcel], progress: OnProgress
) -> dict[int, Bytes]:
    """Pinned memory of each parcel, by index; a few are read at once."""
    pinned: dict[int, Bytes] = {}
    under_way: deque[Any] = deque()
    for parcel in parcels:
        # Locking the next pages goes on while the disk reads.
        pinned[parcel.index] = pinned_bytes(parcel.layout.nbytes)
        under_way.append(reader.submit(read_requests(parcel.layout, pinned[parcel.index])))
        if len(under_way) >= FILLS_IN_FLIGHT:
            reader.wait(under_way.popleft())
            progress(len(pinned) - len(under_way), len(parcels))
    while under_way:
        reader.wait(under_way.popleft())
        progress(len(pinned) - len(under_way), len(parcels))
    return pinned


@dataclass(frozen=True, slots=True)
class _Staged:
    index: int
    buffer: Bytes


class _Staging:
    """Parcels off the disk, in order of use, in a few pinned buffers ahead of their copies.

    A thread of its own reads: into a buffer once the copy out of it is done, and on across the
    end of a sweep.
    """

    def __init__(self, reader: Reader, parcels: Sequence[Parcel]) -> None:
        self._reader = reader
        self._parcels = parcels
        largest = max(parcel.layout.nbytes for parcel in parcels)
        self._buffers = [pinned_bytes(largest) for _ in range(STAGING_BUFFERS)]
        self._start()

    def _start(self) -> None:
        self._stopping = threading.Event()
        self._free: queue.SimpleQueue[tuple[Bytes, Any] | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[_Staged | OSError] = queue.SimpleQueue()
        for buffer in self._buffers:
            self._free.put((buffer, None))
        self._thread = threading.Thread(target=self._read_on, name="staging", daemon=True)
        self._thread.start()

    def take(self) -> _Staged:
        """The next parcel, when it is there. Raises ReadError."""
        return _or_raise(self._ready.get())

    def take_ready(self) -> _Staged | None:
        """The next parcel if it is there. Raises ReadError."""
        try:
            return _or_raise(self._ready.get_nowait())
        except queue.Empty:
            return None

    def give_back(self, buffer: Bytes, copied: Any) -> None:
        """The buffer is free once the event `copied` has passed."""
        self._free.put((buffer, copied))

    def restart(self) -> None:
        """Begin with the first parcel again."""
        self.stop()
        self._start()

    def stop(self) -> None:
        self._stopping.set()
        self._free.put(None)
        self._thread.join()

    def _read_on(self) -> None:
        under_way: deque[tuple[_Staged, Any]] = deque()
        order: Iterator[Parcel] = cycle(self._parcels)
        try:
            while not self._stopping.is_set():
                self._submit(order, under_way)
                if under_way:
                    staged, ticket = under_way.popleft()
                    self._reader.wait(ticket)
                    self._ready.put(staged)
        except OSError as error:
            self._ready.put(error)
        finally:
            for _, ticket in under_way:
                # What failed has been said; the buffers must only be quiet.
                with contextlib.suppress(OSError):
                    self._reader.wait(ticket)

    def _submit(self, order: Iterator[Parcel], under_way: deque[tuple[_Staged, Any]]) -> None:
        """Read into every free buffer; wait for one where nothing else is under way."""
        while True:
            try:
                free = self._free.get(block=not under_way)
            except queue.Empty:
                return
            if free is None:
                return
            buffer, copied = free
            if copied is not None:
                copied.synchronize()
            parcel = next(order)
            ticket = self._reader.submit(read_requests(parcel.layout, buffer))
            under_way.append((_Staged(parcel.index, buffer), ticket))


def _or_raise(found: _Staged | OSError) -> _Staged:
    if isinstance(found, OSError):
        raise found
    return found
