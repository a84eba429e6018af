"""The streamed part of a model's weights: its parcels, their tensors, and who asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.extents import SlotLayout, lay_out
from engine.gguf_file import GgufFile
from engine.hparams import Hparams
from engine.placement import spread
from engine.requests import MemoryBudgetError
from engine.streamer import Bytes, Parcel, Streamer, read_requests
from engine.weights import (
    HEAD_TENSOR,
    LAYER_PARTS,
    LayerMatrices,
    Residence,
    as_tensor,
    layer_tensor_names,
)
from kernels.ops import Ops, PackedMatrix
from nvme import Reader, ReadStats, page_aligned


def parcel_layouts(file: GgufFile, hparams: Hparams) -> tuple[list[SlotLayout], SlotLayout | None]:
    """Where each layer and the head lie in the file; no head where it is the embedding."""
    sizes = [path.stat().st_size for path in file.paths]
    layers = [
        lay_out([file.tensors[name] for name in layer_tensor_names(layer)], sizes)
        for layer in range(hparams.num_layers)
    ]
    if hparams.tied_embeddings:
        return layers, None
    return layers, lay_out([file.tensors[HEAD_TENSOR]], sizes)


class WeightStream:
    """Layers and head that stream, by their place in the model.

    ring_nbytes: of the buffer that they stream through
    """

    def __init__(
        self,
        file: GgufFile,
        hparams: Hparams,
        residence: Residence,
        reader: Reader,
        ops: Ops,
        *,
        ring_nbytes: int,
    ) -> None:
        if not ops.packs_views:
            # Tensors are made once for each place in the ring; copies would go stale unseen.
            raise MemoryBudgetError(
                f"the {ops.name} backend cannot stream weights from disk; "
                "give it the memory to keep them all"
            )
        self._file = file
        self._ops = ops
        self._reader = reader
        layers, head = parcel_layouts(file, hparams)
        self._places: dict[int, int] = {}  # layer -> parcel
        self.parcels: list[Parcel] = []
        for layer, layout in enumerate(layers):
            if not residence.layers[layer]:
                self._places[layer] = len(self.parcels)
                self.parcels.append(Parcel(len(self.parcels), "weights", layout))
        if head is not None and not residence.head:
            self.parcels.append(Parcel(len(self.parcels), "head", head))
        self._layers = list(self._places)
        self.ring_nbytes = ring_nbytes
        self._streamer: Streamer[Any] = Streamer(
            self.parcels,
            reader,
            page_aligned(ring_nbytes),
            build=self._build,
            barrier=ops.barrier,
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
        buffer = page_aligned(parcel.layout.nbytes)
        self._reader.wait(self._reader.submit(read_requests(parcel.layout, buffer)))
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

    def reader_stats(self) -> ReadStats:
        """What the reader has delivered so far, and by which way."""
        return self._reader.stats()

    def close(self) -> None:
        self._reader.close()

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
            view: np.ndarray = slot[offset : offset + info.nbytes]
            tensors.append(as_tensor(info, view))
        return self._ops.pack(tensors, expand=False)
