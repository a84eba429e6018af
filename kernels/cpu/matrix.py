"""A packed weight of the CPU backend, and what may be packed together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.cpu import dequant, product
from kernels.cpu.vector import PANEL
from kernels.ops import KernelError, UnsupportedTypeError
from kernels.quants import BlockTensor


@dataclass(frozen=True, slots=True)
class CpuMatrix:
    """A packed weight: its parts by address, and the arrays that own the memory.

    parts: (num_parts, PART_FIELDS) int64
    """

    num_outputs: int
    num_inputs: int
    nbytes: int
    layout: str
    parts: npt.NDArray[np.int64]
    owners: tuple[npt.NDArray[np.float32] | npt.NDArray[np.uint8], ...]


def round_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


def quantised_matrix(tensors: Sequence[BlockTensor]) -> CpuMatrix:
    """Parts that point into the tensors' own bytes."""
    num_inputs = tensors[0].num_inputs
    parts = np.zeros((len(tensors), product.PART_FIELDS), np.int64)
    first_output = first_panel = 0
    for part, tensor in zip(parts, tensors, strict=True):
        _check_tensor(tensor, num_inputs)
        part[product.ADDRESS] = tensor.data.ctypes.data
        part[product.ROW_NBYTES] = tensor.type.row_nbytes(num_inputs)
        part[product.TYPE_ID] = tensor.type.type_id
        part[product.BLOCK_SIZE] = tensor.type.block_size
        part[product.BLOCK_NBYTES] = tensor.type.block_nbytes
        part[product.NUM_OUTPUTS] = tensor.num_outputs
        part[product.FIRST_OUTPUT] = first_output
        part[product.FIRST_PANEL] = first_panel
        first_output += tensor.num_outputs
        first_panel += round_up(tensor.num_outputs, PANEL) // PANEL
    return CpuMatrix(
        num_outputs=first_output,
        num_inputs=num_inputs,
        nbytes=sum(tensor.data.nbytes for tensor in tensors),
        layout="gguf-rows",
        parts=parts,
        owners=tuple(tensor.data for tensor in tensors),
    )


def _check_tensor(tensor: BlockTensor, num_inputs: int) -> None:
    if tensor.type.type_id not in dequant.TYPE_IDS:
        raise UnsupportedTypeError(
            f"{tensor.name}: no dequantiser for type {tensor.type.name}; "
            "convert the model to a supported type"
        )
    if tensor.num_inputs != num_inputs:
        raise KernelError(
            f"{tensor.name} has {tensor.num_inputs} inputs, the tensors it is packed with "
            f"{num_inputs}; pack it alone"
        )
    if num_inputs % tensor.type.block_size:
        raise KernelError(
            f"{tensor.name}: {num_inputs} inputs are not whole blocks of {tensor.type.block_size}"
        )
    shape = (tensor.num_outputs, tensor.type.row_nbytes(num_inputs))
    if tensor.data.shape != shape or not tensor.data.flags.c_contiguous:
        raise KernelError(f"{tensor.name}: bytes of shape {tensor.data.shape}, expected {shape}")
