"""How parcels come into the ring: the contract of a link, and the CPU's, which only reads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from engine.extents import SlotLayout
from nvme import Reader, ReadRequest, ReadStats, page_aligned

Bytes = npt.NDArray[np.uint8]
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Parcel:
    """One unit of the stream. index: its place in a sweep; kind: "weights" or "head"."""

    index: int
    kind: str
    layout: SlotLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkStats:
    """What a link has done since it was opened.

    wait_s: the computing stood still for parcels
    copied_nbytes, copy_busy_s: from host memory to the device, and the time that took; 0 where
        reads go straight into the ring
    read: what came off the disk
    """

    wait_s: float = 0.0
    copied_nbytes: int = 0
    copy_busy_s: float = 0.0
    read: ReadStats = field(default_factory=ReadStats)

    def __sub__(self, earlier: LinkStats) -> LinkStats:
        return LinkStats(
            wait_s=self.wait_s - earlier.wait_s,
            copied_nbytes=self.copied_nbytes - earlier.copied_nbytes,
            copy_busy_s=self.copy_busy_s - earlier.copy_busy_s,
            read=self.read - earlier.read,
        )


class Link(Protocol):
    """Fills slots of the ring. One thread calls it, and waits in the order of submission."""

    def make_ring(self, nbytes: int) -> Bytes:
        """Memory for slots, (nbytes,) uint8, where the operations want it."""

    def submit(self, parcel: Parcel, slot: Bytes) -> Any:
        """Start to fill a slot once all operations called so far are done; returns a ticket.

        Parcels are submitted in their order of use, again and again, but for `restart`.
        """

    def wait(self, ticket: Any) -> None:
        """Operations called after this see the slot filled. Raises ReadError."""

    def restart(self, tickets: Sequence[Any]) -> None:
        """Give up these tickets; returns when nothing writes into their slots any more."""

    def stats(self) -> LinkStats: ...

    def close(self) -> None:
        """Idempotent."""


def read_requests(layout: SlotLayout, slot: Bytes) -> list[ReadRequest]:
    """Reads that fill a parcel's slot."""
    return [
        ReadRequest(
            file_idx=extent.file_idx,
            offset=extent.begin,
            out=slot[extent.slot_offset : extent.slot_offset + extent.nbytes],
        )
        for extent in layout.extents
    ]


class ReaderLink:
    """Reads go straight into the ring.

    reader: of the model's files; closed with the link
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._wait_s = 0.0

    def make_ring(self, nbytes: int) -> Bytes:
        return page_aligned(nbytes)

    def submit(self, parcel: Parcel, slot: Bytes) -> Any:
        return self._reader.submit(read_requests(parcel.layout, slot))

    def wait(self, ticket: Any) -> None:
        started = time.perf_counter()
        self._reader.wait(ticket)
        self._wait_s += time.perf_counter() - started

    def restart(self, tickets: Sequence[Any]) -> None:
        for ticket in tickets:
            # The failed sweep has said what failed; here the slots must only be quiet.
            with contextlib.suppress(OSError):
                self._reader.wait(ticket)

    def stats(self) -> LinkStats:
        return LinkStats(wait_s=self._wait_s, read=self._reader.stats())

    def close(self) -> None:
        self._reader.close()
