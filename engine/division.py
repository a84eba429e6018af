"""One way to divide memory after another: what each part takes, and which tier it is in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.hparams import Hparams
from engine.model import shared_width
from engine.placement import spread
from engine.plan import Budget
from engine.requests import EngineConfig
from engine.sizes import ModelSizes, Part
from engine.ways import Way
from kernels.ops import STAGED_LAYERS

RING_PARCELS = 4  # of the largest size: one in use, the others coming
LINK_RING_PARCELS = 3  # a link is steadier than a disk
STAGING_PARCELS = 2  # of the largest size, in host memory, between disk and device


def activations_nbytes(
    hparams: Hparams, sweep_tokens: int, max_rows: int, *, runs_in_order: bool
) -> int:
    """Bytes of the work buffers of a sweep, logits of one token per row included."""
    width = 2 * hparams.hidden + shared_width(hparams, runs_in_order)
    return 4 * sweep_tokens * width + max_rows * row_activations_nbytes(hparams)


def row_activations_nbytes(hparams: Hparams) -> int:
    """Of the work buffers, what each row on board takes: its logits and what they come from."""
    return 4 * (hparams.hidden + hparams.vocab_size)


def kv_staging_nbytes(sizes: ModelSizes, host_kv_pages: int) -> int:
    """Bytes of the device's memory that KV pages in host memory pass through."""
    return STAGED_LAYERS * -(-host_kv_pages * sizes.page_nbytes // len(sizes.layers))


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Where each part is under one way.

    resident, host: a flag for each layer; head_in_host: of the head
    weights_nbytes, ring_nbytes: of the device; host_nbytes: pinned
    streamed_nbytes: into the ring in each sweep; disk_nbytes: of those, off the disk
    """

    resident: tuple[bool, ...]
    host: tuple[bool, ...]
    head_in_host: bool
    weights_nbytes: int
    ring_nbytes: int
    host_nbytes: int
    streamed_nbytes: int
    disk_nbytes: int


class Divider:
    """Places a model's parts under one way or another."""

    def __init__(self, config: EngineConfig, sizes: ModelSizes, budget: Budget) -> None:
        self._config, self._sizes, self._budget = config, sizes, budget

    def place(self, way: Way) -> Placed | None:
        """None where the ring or host memory cannot hold its share."""
        layers = self._sizes.layers
        resident = spread(way.num_resident, len(layers))
        streamed = [layer for layer, stays in zip(layers, resident, strict=True) if not stays]
        head = None if way.head_resident else self._sizes.head
        parcels = [*streamed, head] if head else streamed
        ring_nbytes = self._ring_nbytes(parcels)
        if parcels and ring_nbytes < _largest(parcels):
            return None
        near = self._near(streamed, head)
        if near is None:
            return None
        flags = iter(near.layers)
        in_ring, in_host = _slots_nbytes(parcels), near.nbytes
        return Placed(
            resident=resident,
            host=tuple(not stays and next(flags) for stays in resident) if any(near.layers) else (),
            head_in_host=near.head,
            weights_nbytes=self._weights_nbytes(way, resident),
            ring_nbytes=ring_nbytes,
            host_nbytes=near.host_nbytes,
            streamed_nbytes=in_ring,
            disk_nbytes=in_ring - in_host,
        )

    @property
    def least_host_nbytes(self) -> int:
        """Host memory with which everything may stream from disk."""
        parts = [*self._sizes.layers, *([self._sizes.head] if self._sizes.head else [])]
        return self._host_fixed_nbytes + STAGING_PARCELS * _largest(parts)

    @property
    def _embedding_in_host(self) -> bool:
        return self._budget.embedding_in_host and self._sizes.head is not None

    @property
    def _host_fixed_nbytes(self) -> int:
        return self._sizes.embedding.stored_nbytes if self._embedding_in_host else 0

    def _near(self, streamed: Sequence[Part], head: Part | None) -> _Near | None:
        """What of that host memory keeps: all of it, or the head and evenly spread layers.

        None: it is too small for anything to pass through it.
        """
        nothing = _Near((False,) * len(streamed), False, 0, 0)
        if self._budget.host_nbytes is None:
            return nothing
        fixed_nbytes = self._host_fixed_nbytes
        room = self._budget.host_nbytes - fixed_nbytes
        parcels = [*streamed, head] if head else list(streamed)
        nbytes = _slots_nbytes(parcels)
        if nbytes <= room:
            flags = (True,) * len(streamed)
            return _Near(flags, head is not None, nbytes, fixed_nbytes + nbytes)
        if not parcels:
            return None
        fixed_nbytes += STAGING_PARCELS * _largest(parcels)
        room = self._budget.host_nbytes - fixed_nbytes
        if room < 0:
            return None
        head_nbytes = head.slot_nbytes if head and head.slot_nbytes <= room else 0
        over_nbytes = _slots_nbytes(streamed) + head_nbytes - room
        fewest = max(0, -(-over_nbytes // _largest(parcels)))
        for num_far in range(fewest, len(streamed) + 1):
            flags = tuple(not far for far in spread(num_far, len(streamed)))
            near = [part for part, is_near in zip(streamed, flags, strict=True) if is_near]
            nbytes = _slots_nbytes(near) + head_nbytes
            if nbytes <= room:
                return _Near(flags, head_nbytes > 0, nbytes, fixed_nbytes + nbytes)
        raise AssertionError("none of it fits anywhere")

    def _weights_nbytes(self, way: Way, resident: Sequence[bool]) -> int:
        sizes, has_host_tier = self._sizes, self._budget.host_nbytes is not None
        if way.expand:
            # On a device beside its host, what was expanded from stays with it.
            kept = sizes.stored_nbytes if has_host_tier else 0
            return sizes.expanded_nbytes + kept
        parts = [part for part, stays in zip(sizes.layers, resident, strict=True) if stays]
        if sizes.head is not None and way.head_resident:
            parts.append(sizes.head)
        if not self._embedding_in_host:
            parts.append(sizes.embedding)
        return sizes.vectors_nbytes + sum(part.stored_nbytes for part in parts)

    def _ring_nbytes(self, parcels: Sequence[Part]) -> int:
        if not parcels:
            return 0
        if self._config.ring_nbytes is not None:
            return self._config.ring_nbytes
        most = RING_PARCELS if self._budget.host_nbytes is None else LINK_RING_PARCELS
        return min(most, len(parcels) + 1) * _largest(parcels)


@dataclass(frozen=True, slots=True)
class _Near:
    """layers, head: whether host memory keeps it; nbytes: of those; host_nbytes: with the rest"""

    layers: tuple[bool, ...]
    head: bool
    nbytes: int
    host_nbytes: int


def _largest(parts: Iterable[Part]) -> int:
    return max(part.slot_nbytes for part in parts)


def _slots_nbytes(parts: Iterable[Part]) -> int:
    return sum(part.slot_nbytes for part in parts)
