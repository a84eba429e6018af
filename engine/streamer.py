"""Weights that stream: parcels in order of use, brought ahead into a byte ring, sweep after sweep.

Before a parcel is used all workers meet: they are done with the parcel before, so its place may be
filled again. Then the first worker waits for the bytes and hands the tensors on. A link fills
places on across layers and across the end of a sweep; nobody waits but the layer that needs them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from engine.links import Bytes, Link, Parcel
from engine.ring import ByteRing

MAX_READS_IN_FLIGHT = 8
_MAX_PLACES = 16  # of one parcel in the ring, whose tensors are kept made

T = TypeVar("T")


@dataclass(slots=True)
class StreamTotals:
    """What has streamed since the engine was loaded. nbytes: of parcels used"""

    num_parcels: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class _Coming:
    """A parcel whose bytes are under way, or there, or in use."""

    parcel: Parcel
    slot: Bytes
    ring_offset: int
    ticket: Any


class Streamer(Generic[T]):
    """Brings parcels ahead of their use, again and again in the same order.

    parcels: in order of use within a sweep, at least one
    link: fills slots; its owner closes it
    ring_nbytes: of the memory that the slots are in
    build: makes a parcel's tensors from its slot; called once for each place a parcel takes
    barrier: waits for all workers; called as barrier(worker)
    """

    def __init__(
        self,
        parcels: Sequence[Parcel],
        link: Link,
        *,
        ring_nbytes: int,
        build: Callable[[Parcel, Bytes], T],
        barrier: Callable[[int], None],
    ) -> None:
        self.totals = StreamTotals()
        self._parcels = parcels
        self._link = link
        self._buffer = link.make_ring(ring_nbytes)
        self._ring = ByteRing(ring_nbytes)
        self._build = build
        self._barrier = barrier
        self._built: dict[tuple[int, int], T] = {}
        self._coming: deque[_Coming] = deque()
        self._order = tuple(range(len(parcels)))  # indices of the parcels that are read
        self._next = 0  # place in the order of the next one to read
        self._in_use = False  # the oldest coming parcel is being computed on
        self._current: T | None = None
        self._read_ahead()

    def acquire(self, worker: int, index: int) -> T:
        """The tensors of parcel `index`, valid until the next call; every worker calls in turn.

        Raises ReadError (first worker): its bytes did not come.
        """
        self._barrier(worker)
        if worker == 0:
            self._current = self._fetch(index)
        self._barrier(worker)
        current = self._current
        assert current is not None
        return current

    def advance(self) -> None:
        """No worker uses the current parcel any more: its place may be read into."""
        self._let_go()
        self._read_ahead()

    def leave_out(self, indices: Collection[int]) -> None:
        """Read these parcels no more, from the next sweep on; called between two sweeps."""
        self.restart()
        self._order = tuple(i for i in range(len(self._parcels)) if i not in indices)
        self._read_ahead()

    def restart(self) -> None:
        """Begin again with the first parcel: after a failed sweep, or with another order."""
        self._link.restart([coming.ticket for coming in self._coming])
        self._coming.clear()
        self._ring.clear()
        self._next = 0
        self._in_use = False

    def _fetch(self, index: int) -> T:
        self.advance()
        coming = self._coming[0]
        assert coming.parcel.index == index, (coming.parcel.index, index)
        self._link.wait(coming.ticket)
        self.totals.num_parcels += 1
        self.totals.nbytes += coming.parcel.layout.nbytes
        self._in_use = True
        return self._tensors(coming)

    def _tensors(self, coming: _Coming) -> T:
        place = (coming.parcel.index, coming.ring_offset)
        if place not in self._built:
            if len(self._built) > _MAX_PLACES * len(self._parcels):
                self._built.clear()
            self._built[place] = self._build(coming.parcel, coming.slot)
        return self._built[place]

    def _let_go(self) -> None:
        if self._in_use:
            self._coming.popleft()
            self._ring.free_oldest()
            self._in_use = False

    def _read_ahead(self) -> None:
        """Begin reads while the ring has room, at most MAX_READS_IN_FLIGHT parcels ahead."""
        while self._order and len(self._coming) < MAX_READS_IN_FLIGHT:
            parcel = self._parcels[self._order[self._next]]
            offset = self._ring.take(parcel.layout.nbytes)
            if offset is None:
                break
            slot = self._buffer[offset : offset + parcel.layout.nbytes]
            ticket = self._link.submit(parcel, slot)
            self._coming.append(_Coming(parcel, slot, offset, ticket))
            self._next = (self._next + 1) % len(self._order)
