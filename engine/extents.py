"""Which bytes of the model's files a layer occupies, and where they lie once read.

A parcel's tensors are covered by few contiguous extents: neighbours are merged over small gaps
and ends aligned outward to what direct reads want. In a slot the extents lie one after the other,
each at an aligned offset, so that file offset and memory address agree and bytes go into place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.gguf_file import TensorInfo
from nvme import align_outward

ALIGNMENT = 4096
MAX_GAP_NBYTES = 64 << 10  # reading across this costs less than one more request


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [begin, end) of a file, at `slot_offset` of the slot. Offsets in bytes."""

    file_idx: int
    begin: int
    end: int
    slot_offset: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Extents of a parcel, and the offset of each tensor in its slot.

    nbytes: of the slot, a multiple of ALIGNMENT
    """

    extents: tuple[Extent, ...]
    tensor_offsets: Mapping[str, int]
    nbytes: int


def lay_out(tensors: Sequence[TensorInfo], file_nbytes: Sequence[int]) -> SlotLayout:
    """Cover tensors by extents.

    file_nbytes: size of each file; an extent's aligned end is cut there
    """
    extents: list[Extent] = []
    slot_offset = 0
    for file_idx, begin, end in _merged_ranges(tensors):
        begin, end = align_outward(begin, end, file_nbytes=file_nbytes[file_idx])
        extents.append(Extent(file_idx, begin, end, slot_offset))
        slot_offset += -(-(end - begin) // ALIGNMENT) * ALIGNMENT
    offsets = {tensor.name: _offset_in_slot(tensor, extents) for tensor in tensors}
    return SlotLayout(tuple(extents), offsets, slot_offset)


def _merged_ranges(tensors: Sequence[TensorInfo]) -> list[tuple[int, int, int]]:
    merged: list[tuple[int, int, int]] = []
    for tensor in sorted(tensors, key=lambda t: (t.file_idx, t.offset)):
        end = tensor.offset + tensor.nbytes
        if merged:
            file_idx, first, last = merged[-1]
            if file_idx == tensor.file_idx and tensor.offset - last <= MAX_GAP_NBYTES:
                merged[-1] = (file_idx, first, max(last, end))
                continue
        merged.append((tensor.file_idx, tensor.offset, end))
    return merged


def _offset_in_slot(tensor: TensorInfo, extents: Sequence[Extent]) -> int:
    for extent in extents:
        if extent.file_idx == tensor.file_idx and extent.begin <= tensor.offset < extent.end:
            return extent.slot_offset + tensor.offset - extent.begin
    raise AssertionError(tensor)
