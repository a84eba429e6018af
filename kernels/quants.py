"""Block formats of GGUF tensors: the type table, and a NumPy dequantiser used as reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class QuantType:
    """A tensor type: `block_nbytes` bytes hold `block_size` values."""

    type_id: int
    name: str
    block_size: int
    block_nbytes: int

    def row_nbytes(self, num_inputs: int) -> int:
        return num_inputs // self.block_size * self.block_nbytes


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A matrix in its file's bytes.

    data: (num_outputs, row_nbytes) uint8, contiguous
    """

    name: str
    type: QuantType
    num_outputs: int
    num_inputs: int
    data: npt.NDArray[np.uint8]
