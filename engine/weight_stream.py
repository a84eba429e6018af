"""The streamed part of a model's weights: its parcels, their tensors, and who asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.extents import SlotLayout, lay_out
from engine.gguf_file import GgufFile
from engine.hparams import Hparams
from engine.links import Bytes, Link, LinkStats, Parcel
from engine.placement import spread
from engine.streamer import Streamer
from engine.weights import (
    HEAD_TENSOR,
    LAYER_PARTS,
    LayerMatrices,
    Residence,
    as_tensor,
    layer_tensor_names,
)
from kernels.ops import Ops, PackedMatrix
from nvme import ReadError


def parcel_layouts(file: GgufFile, hparams: Hparams) -> tuple[list[SlotLayout], SlotLayout | None]:
    """Where each layer and the head lie in the file; no head where it is the embedding."""
    sizes = [path.stat().st_size for path in file.paths]
    for tensor in file.tensors.values():
        if tensor.offset + tensor.nbytes > sizes[tensor.file_idx]:
            raise ReadError(
                f"{file.paths[tensor.file_idx]} has {sizes[tensor.file_idx]:,} bytes, and "
                f"{tensor.name} ends at {tensor.offset + tensor.nbytes:,}: it was cut short since "
                "it was opened; put the whole file back"
            )
    layers = [
        lay_out([file.tensors[name] for name in layer_tensor_names(layer)], sizes)
        for layer in range(hparams.num_layers)
    ]
    if hparams.tied_embeddings:
        return layers, None
    return layers, lay_out([file.tensors[HEAD_TENSOR]], sizes)


def parcels_of(file: GgufFile, hparams: Hparams, residence: Residence) -> list[Parcel]:
    """What streams, in order of use."""
    layers, head = parcel_layouts(file, hparams)
    streamed = [
        ("weights", layout)
        for layout, stays in zip(layers, residence.layers, strict=True)
        if not stays
    ]
    if head is not None and not residence.head:
        streamed.append(("head", head))
    return [Parcel(index, kind, layout) for index, (kind, layout) in enumerate(streamed)]


class WeightStream:
    """Layers and head that stream, by their place in the model.

    parcels: of `parcels_of`
    link: brings them; closed with the stream
    ring_nbytes: of the memory that they stream through
    """

    def __init__(
        self,
        file: GgufFile,
        residence: Residence,
        parcels: Sequence[Parcel],
        link: Link,
        ops: Ops,
        *,
        ring_nbytes: int,
    ) -> None:
        self._file = file
        self._ops = ops
        self._link = link
        self.parcels = parcels
        self._layers = [layer for layer, stays in enumerate(residence.layers) if not stays]
        self._places = {layer: place for place, layer in enumerate(self._layers)}
        self.ring_nbytes = ring_nbytes
        self._streamer: Streamer[Any] = Streamer(
            parcels, link, ring_nbytes=ring_nbytes, build=self._build, barrier=ops.barrier
        )
        self.totals = self._streamer.totals
        self._kept: dict[int, LayerMatrices] = {}  # by parcel

    @property
    def sweep_nbytes(self) -> int:
        """Bytes that stream in each sweep."""
        streamed = (parcel for parcel in self.parcels if parcel.index not in self._kept)
        return sum(parcel.layout.nbytes for parcel in streamed)

    @property
    def layer_nbytes(self) -> int:
        """Bytes of the largest layer that streams."""
        return max((p.layout.nbytes for p in self.parcels if p.kind == "weights"), default=0)

    @property
    def num_layers(self) -> int:
        """Layers that stream by plan."""
        return len(self._layers)

    @property
    def num_kept(self) -> int:
        """Layers that stream by plan and are kept in memory for now."""
        return len(self._kept)

    def keep(self, num_layers: int) -> None:
        """Keep this many of the streamed layers in memory, spread evenly; 0 keeps none.

        Called between two sweeps. Raises ReadError.
        """
        num_layers = min(num_layers, len(self._layers))
        chosen = [i for i, stays in enumerate(spread(num_layers, len(self._layers))) if stays]
        self._kept = {i: self._kept[i] if i in self._kept else self._read(i) for i in chosen}
        self._streamer.leave_out(self._kept)

    def _read(self, index: int) -> LayerMatrices:
        parcel = self.parcels[index]
        buffer = self._link.make_ring(parcel.layout.nbytes)
        self._link.wait(self._link.submit(parcel, buffer))
        matrices = self._build(parcel, buffer)
        assert isinstance(matrices, LayerMatrices)
        return matrices

    def layer(self, worker: int, layer: int) -> LayerMatrices:
        place = self._places[layer]
        if place in self._kept:
            return self._kept[place]
        matrices: LayerMatrices = self._streamer.acquire(worker, place)
        return matrices

    def head(self, worker: int) -> PackedMatrix:
        head: PackedMatrix = self._streamer.acquire(worker, len(self.parcels) - 1)
        return head

    def advance(self) -> None:
        """The sweep is over: read on for the next one."""
        self._streamer.advance()

    def restart(self) -> None:
        """Begin with the first parcel again, after a sweep that failed."""
        self._streamer.restart()

    def link_stats(self) -> LinkStats:
        """What the link has brought so far, and how long that was waited for."""
        return self._link.stats()

    def close(self) -> None:
        self._link.close()

    def _build(self, parcel: Parcel, slot: Bytes) -> LayerMatrices | PackedMatrix:
        if parcel.kind == "head":
            return self._matrix(parcel, slot, [HEAD_TENSOR])
        layer = self._layers[parcel.index]
        matrices = {
            field: self._matrix(parcel, slot, [f"blk.{layer}.{part}.weight" for part in parts])
            for field, parts in LAYER_PARTS.items()
        }
        return LayerMatrices(**matrices)

    def _matrix(self, parcel: Parcel, slot: Bytes, names: Sequence[str]) -> PackedMatrix:
        tensors = []
        for name in names:
            info, offset = self._file.tensors[name], parcel.layout.tensor_offsets[name]
            view: Bytes = slot[offset : offset + info.nbytes]
            tensors.append(as_tensor(info, view))
        return self._ops.pack(tensors, expand=False)
