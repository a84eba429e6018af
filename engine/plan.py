"""A plan: how an engine divides its memory, and out of what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

FIXED_NBYTES = 48 << 20  # stacks, Python objects, scratch of the workers


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What memory there is.

    device_nbytes: where the operations work
    host_nbytes: pinned memory beside the device; None where there is no such tier: reads go
        straight to where the operations work
    fixed_nbytes: of the device's, for what no plan changes
    scratch_nbytes: of products, by the tokens of a sweep
    embedding_in_host: one that is not the head as well is gathered from there
    """

    device_nbytes: int
    host_nbytes: int | None = None
    fixed_nbytes: int = FIXED_NBYTES
    scratch_nbytes: Callable[[int], int] = lambda num_tokens: 0
    embedding_in_host: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How an engine divides its memory, and what that should give.

    expand: resident weights kept expanded in the product's layout
    resident: for each layer, whether it stays in the device's memory; head_resident: the head
    host: for each layer, whether it streams from pinned host memory; empty: none does. What is
        neither resident nor there streams from disk. head_in_host: the head
    weights_nbytes, ring_nbytes, activations_nbytes, kv_pages, kv_nbytes: where device memory goes
    host_kv_pages: KV pages beyond those, in pinned host memory, that travel with the layers;
        kv_staging_nbytes: of device memory, what they pass through
    host_nbytes: pinned host memory: weights, what disk reads are staged through, KV pages
    sweep_tokens: most tokens of a sweep
    max_rows: most rows on board
    streamed_nbytes: bytes that come into the ring in each sweep; disk_nbytes: those off the disk
    predicted: figures by name; see `Planner`
    """

    expand: bool
    resident: tuple[bool, ...]
    head_resident: bool
    weights_nbytes: int
    ring_nbytes: int
    activations_nbytes: int
    kv_pages: int
    kv_nbytes: int
    sweep_tokens: int
    max_rows: int
    streamed_nbytes: int
    disk_nbytes: int
    host: tuple[bool, ...] = ()
    head_in_host: bool = False
    host_nbytes: int = 0
    host_kv_pages: int = 0
    kv_staging_nbytes: int = 0
    predicted: Mapping[str, Any] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        return self.streamed_nbytes > 0

    @property
    def device_nbytes(self) -> int:
        """All that it takes of the device's memory."""
        return (
            self.weights_nbytes
            + self.ring_nbytes
            + self.activations_nbytes
            + self.kv_nbytes
            + self.kv_staging_nbytes
        )

    @property
    def total_kv_pages(self) -> int:
        return self.kv_pages + self.host_kv_pages

    @property
    def host_kv_nbytes(self) -> int:
        return self.host_kv_pages * self.kv_nbytes // self.kv_pages

    @property
    def placement(self) -> str:
        """A letter for each layer, then for the head: r resident, h in host memory, d on disk."""
        resident = (*self.resident, self.head_resident)
        host = (*(self.host or (False,) * len(self.resident)), self.head_in_host)
        letters = [
            "r" if stays else "h" if near else "d"
            for stays, near in zip(resident, host, strict=True)
        ]
        return "".join(letters[:-1]) + " " + letters[-1]

    def record(self) -> dict[str, Any]:
        """The plan without its predictions, as plain JSON values."""
        num_resident = sum(self.resident)
        return {
            "expand": self.expand,
            "layers": len(self.resident),
            "resident_layers": num_resident,
            "head_resident": self.head_resident,
            "streamed_parcels": len(self.resident) - num_resident + (not self.head_resident),
            "placement": self.placement,
            "weights_nbytes": self.weights_nbytes,
            "ring_nbytes": self.ring_nbytes,
            "activations_nbytes": self.activations_nbytes,
            "kv_pages": self.kv_pages,
            "kv_nbytes": self.kv_nbytes,
            "host_kv_pages": self.host_kv_pages,
            "host_kv_nbytes": self.host_kv_nbytes,
            "kv_staging_nbytes": self.kv_staging_nbytes,
            "host_nbytes": self.host_nbytes,
            "sweep_tokens": self.sweep_tokens,
            "max_rows": self.max_rows,
            "streamed_nbytes": self.streamed_nbytes,
            "disk_nbytes": self.disk_nbytes,
        }
