"""The streamed part of a model's weights: its parcels, their tensors, and who asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.extents import SlotLayout, lay_out
from engine.gguf_file import GgufFile
from engine.hparams import Hparams
from engine.streamer import Bytes, Parcel, Streamer
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

    @property
    def sweep_nbytes(self) -> int:
        """Bytes that stream in each sweep."""
        return sum(parcel.layout.nbytes for parcel in self.parcels)

    def layer(self, worker: int, layer: int) -> LayerMatrices:
        matrices: LayerMatrices = self._streamer.acquire(worker, self._places[layer])
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
