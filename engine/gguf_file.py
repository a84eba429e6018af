"""GGUF files: metadata and the list of tensors, over all shards of a model.

Nothing but headers is read here; tensors are described, not loaded.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from engine.gguf_header import (
    ARRAY,
    DOWNLOAD_HINT,
    SCALAR_FORMATS,
    STRING,
    FileStamp,
    Header,
    TensorEntry,
    Value,
    read_extent,
    read_header,
)
from engine.gguf_shards import read_shards
from engine.requests import GgufError
from kernels.quants import LISTED_TYPES, QUANT_TYPES

DEFAULT_ALIGNMENT = 32
ALIGNMENTS = tuple(1 << bits for bits in range(3, 25))  # 8 bytes to 16 MiB
MAX_TENSOR_VALUES = 1 << 62


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies.

    shape: row-major, (num_outputs, num_inputs) for a matrix
    type_name: "Q4_K", …, or "unknown type 153"
    file_idx: index into `GgufFile.paths`
    offset, nbytes: its bytes in that file; of an unknown type, the bytes up to the next tensor
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    file_idx: int
    offset: int
    nbytes: int


class Metadata(Mapping[str, Any]):
    """Key-value pairs of a header; strings and arrays are read from the file on first access.

    Scalars are int, float and bool, strings str (bad UTF-8 replaced by U+FFFD), arrays of strings
    list[str], other arrays NumPy arrays. Access raises GgufError when the file has changed.
    """

    def __init__(self, path: Path, stamp: FileStamp, values: Mapping[str, Value]) -> None:
        self._path = path
        self._stamp = stamp
        self._values = dict(values)
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            self._decoded[key] = self._decode(self._values[key])
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def array_len(self, key: str) -> int | None:
        """Number of items without reading them; None where there is no such array."""
        value = self._values.get(key)
        return value.count if value is not None and value.kind == ARRAY else None

    def get_bytes_array(self, key: str) -> list[bytes]:
        """The strings of an array as the bytes they are stored as."""
        value = self._values[key]
        if value.item_kind != STRING:
            raise GgufError(f"{self._path}: metadata key {key!r} is not an array of strings")
        return _split_strings(self._read(value), value.count)

    def _decode(self, value: Value) -> Any:
        if value.scalar is not None:
            return value.scalar
        data = self._read(value)
        if value.kind == STRING:
            return data.decode(errors="replace")
        if value.item_kind == STRING:
            return [text.decode(errors="replace") for text in _split_strings(data, value.count)]
        return np.frombuffer(data, np.dtype(SCALAR_FORMATS[value.item_kind]))

    def _read(self, value: Value) -> bytes:
        return read_extent(self._path, self._stamp, value.offset, value.nbytes)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model's headers.

    path: as given; paths: all shards in order
    metadata: of the first shard
    tensors: of all shards, by name, in file order
    """

    path: Path
    paths: tuple[Path, ...]
    version: int
    metadata: Metadata
    tensors: dict[str, TensorInfo]

    @staticmethod
    def open(path: str | Path) -> GgufFile:
        """Read the header, and those of the other shards where the file is one of several.

        Raises GgufError: not a GGUF file, damaged, incomplete, or with missing shards.
        """
        path = Path(path)
        headers = read_shards(read_header(path))
        first = headers[0]
        tensors: dict[str, TensorInfo] = {}
        for file_idx, header in enumerate(headers):
            for tensor in _place_tensors(header, file_idx):
                _check_new(tensor, tensors, headers)
                tensors[tensor.name] = tensor
        return GgufFile(
            path=path,
            paths=tuple(header.path for header in headers),
            version=first.version,
            metadata=Metadata(first.path, first.stamp, first.values),
            tensors=tensors,
        )

    def get_bytes_array(self, key: str) -> list[bytes]:
        """The strings of a metadata array, as the bytes they are stored as."""
        return self.metadata.get_bytes_array(key)


def _split_strings(data: bytes, count: int) -> list[bytes]:
    length_at = struct.Struct("<Q").unpack_from
    texts = []
    at = 0
    for _ in range(count):
        end = at + 8 + length_at(data, at)[0]
        texts.append(data[at + 8 : end])
        at = end
    return texts


def _check_new(
    tensor: TensorInfo, tensors: Mapping[str, TensorInfo], headers: list[Header]
) -> None:
    other = tensors.get(tensor.name)
    if other is not None:
        where = " and ".join(sorted({str(headers[t.file_idx].path) for t in (other, tensor)}))
        raise GgufError(f"{where}: tensor {tensor.name!r} occurs twice: damaged")


def _place_tensors(header: Header, file_idx: int) -> list[TensorInfo]:
    """Absolute extents of a file's tensors, checked to be aligned, apart and inside the file."""
    alignment = _alignment(header)
    data_offset = -(-header.nbytes // alignment) * alignment
    ordered = sorted(header.tensors, key=lambda entry: entry.offset)
    next_offsets = [data_offset + entry.offset for entry in ordered] + [header.stamp.nbytes]
    tensors = []
    for entry, next_offset in zip(ordered, next_offsets[1:], strict=True):
        if entry.offset % alignment:
            raise GgufError(
                f"{header.path}: tensor {entry.name!r} at offset {entry.offset} is not aligned to "
                f"{alignment} bytes: damaged"
            )
        tensors.append(_place(header, entry, file_idx, data_offset + entry.offset, next_offset))
    _check_size(header, tensors)
    _check_apart(header, tensors)
    return tensors


def _alignment(header: Header) -> int:
    alignment = header.int_value("general.alignment", default=DEFAULT_ALIGNMENT)
    if alignment not in ALIGNMENTS:
        raise GgufError(
            f"{header.path}: general.alignment is {alignment}; it must be a power of two from "
            f"{ALIGNMENTS[0]} to {ALIGNMENTS[-1]}: damaged"
        )
    return alignment


def _place(
    header: Header, entry: TensorEntry, file_idx: int, offset: int, next_offset: int
) -> TensorInfo:
    num_values = math.prod(entry.dims)
    if not 0 < num_values <= MAX_TENSOR_VALUES:
        raise GgufError(
            f"{header.path}: tensor {entry.name!r} has dimensions {entry.dims}, "
            f"{num_values} values: damaged"
        )
    quant_type = QUANT_TYPES.get(entry.type_id) or LISTED_TYPES.get(entry.type_id)
    if quant_type is None:
        name, nbytes = f"unknown type {entry.type_id}", max(next_offset - offset, 0)
    elif entry.dims[0] % quant_type.block_size:
        raise GgufError(
            f"{header.path}: tensor {entry.name!r} has rows of {entry.dims[0]} values, not a "
            f"multiple of the {quant_type.block_size} values of a {quant_type.name} block: damaged"
        )
    else:
        name = quant_type.name
        nbytes = num_values // quant_type.block_size * quant_type.block_nbytes
    return TensorInfo(entry.name, entry.dims[::-1], entry.type_id, name, file_idx, offset, nbytes)


def _check_size(header: Header, tensors: list[TensorInfo]) -> None:
    last = max(tensors, key=lambda tensor: tensor.offset + tensor.nbytes, default=None)
    if last is None:
        return
    expected, present = last.offset + last.nbytes, header.stamp.nbytes
    if expected > present:
        raise GgufError(
            f"{header.path}: {present} bytes present, {expected} expected (up to the end of "
            f"tensor {last.name!r}): an incomplete download, or damaged; {DOWNLOAD_HINT}"
        )


def _check_apart(header: Header, tensors: list[TensorInfo]) -> None:
    for before, after in pairwise(tensors):
        if before.offset + before.nbytes > after.offset:
            raise GgufError(
                f"{header.path}: tensors {before.name!r} (to byte {before.offset + before.nbytes}) "
                f"and {after.name!r} (from byte {after.offset}) overlap: damaged"
            )
