"""A packed weight on the GPU: its quantised bytes, and halves where it is expanded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import cupy as cp
import numpy as np

from kernels.cuda.modules import blocks_for, get_kernel
from kernels.ops import KernelError, UnsupportedTypeError
from kernels.quants import QUANT_TYPES, BlockTensor

_GROUP = 8  # values that a thread decodes
_THREADS = 256

DeviceArray = Any  # a cupy.ndarray; CuPy has no types


@dataclass(frozen=True, slots=True)
class CudaPart:
    """One tensor of a packed weight. blocks: (num_outputs, row_nbytes) uint8."""

    type_name: str
    first_output: int
    num_outputs: int
    blocks: DeviceArray


@dataclass(frozen=True, slots=True, eq=False)
class CudaMatrix:
    """parts: in order of their outputs. halves: (num_outputs, num_inputs) float16, or None."""

    num_outputs: int
    num_inputs: int
    parts: tuple[CudaPart, ...]
    halves: DeviceArray | None

    @property
    def nbytes(self) -> int:
        expanded = 0 if self.halves is None else int(self.halves.nbytes)
        return expanded + sum(int(part.blocks.nbytes) for part in self.parts)

    @property
    def layout(self) -> str:
        return "gguf-rows" if self.halves is None else "f16-rows"


def pack(tensors: Sequence[BlockTensor], *, expand: bool) -> CudaMatrix:
    """Copy tensors to the device, but for those whose bytes are there: they are read in place.

    Raises UnsupportedTypeError, KernelError.
    """
    num_inputs = tensors[0].num_inputs
    parts, first_output = [], 0
    for tensor in tensors:
        _check_tensor(tensor, num_inputs)
    for type_name, data in _joined(tensors):
        blocks = cp.ascontiguousarray(cp.asarray(data))
        parts.append(CudaPart(type_name, first_output, len(blocks), blocks))
        first_output += len(blocks)
    matrix = CudaMatrix(first_output, num_inputs, tuple(parts), None)
    if not expand:
        return matrix
    halves = cp.empty((matrix.num_outputs, matrix.num_inputs), cp.float16)
    dequantize(matrix, 0, halves)
    return replace(matrix, halves=halves)


def _joined(tensors: Sequence[BlockTensor]) -> Iterator[tuple[str, Any]]:
    """Types and bytes; neighbours of one type that are on the host become one part.

    Fewer parts are fewer launches. What is on the device stays where it is.
    """
    for type_name, group in groupby(tensors, lambda tensor: tensor.type.name):
        arrays = [tensor.data for tensor in group]
        if len(arrays) > 1 and all(isinstance(array, np.ndarray) for array in arrays):
            arrays = [np.concatenate(arrays)]
        yield from ((type_name, array) for array in arrays)


def dequantize(weight: CudaMatrix, begin: int, halves: DeviceArray) -> None:
    """Decode outputs from `begin` on into `halves`, (num_outputs, num_inputs) float16."""
    end = begin + len(halves)
    for part in weight.parts:
        first = max(begin, part.first_output)
        last = min(end, part.first_output + part.num_outputs)
        if first < last:
            blocks = part.blocks[first - part.first_output : last - part.first_output]
            num_groups = (last - first) * weight.num_inputs // _GROUP
            get_kernel("dequant.cu", f"dequantize<{part.type_name}>")(
                (blocks_for(num_groups, _THREADS),),
                (_THREADS,),
                (np.int64(num_groups), blocks, halves[first - begin :]),
            )


def gather_rows(weight: CudaMatrix, ids: DeviceArray, out: DeviceArray) -> None:
    """out[t] = row ids[t] of weight, as float32."""
    for part in weight.parts:
        get_kernel("dequant.cu", f"gather_rows<{part.type_name}>")(
            (len(ids),),
            (128,),
            (
                np.int32(weight.num_inputs),
                np.int32(part.first_output),
                np.int32(part.num_outputs),
                np.int64(part.blocks.shape[1]),
                part.blocks,
                ids,
                out,
            ),
        )


def _check_tensor(tensor: BlockTensor, num_inputs: int) -> None:
    if QUANT_TYPES.get(tensor.type.type_id) != tensor.type:
        raise UnsupportedTypeError(
            f"{tensor.name}: no dequantiser for type {tensor.type.name}; "
            "convert the model to a supported type"
        )
    if tensor.num_inputs != num_inputs:
        raise KernelError(
            f"{tensor.name} has {tensor.num_inputs} inputs, the tensors it is packed with "
            f"{num_inputs}; pack it alone"
        )
    step = max(tensor.type.block_size, _GROUP)
    if num_inputs % step:
        raise KernelError(
            f"{tensor.name}: {num_inputs} inputs are not a multiple of {step}, which the GPU "
            f"kernels need for {tensor.type.name}; run the model on the CPU"
        )
    shape = (tensor.num_outputs, tensor.type.row_nbytes(num_inputs))
    if tensor.data.shape != shape:
        raise KernelError(f"{tensor.name}: bytes of shape {tensor.data.shape}, expected {shape}")
