"""Matrix products of few tokens, from the quantised bytes, eight tokens at a time.

    out = (out) + bias + x · weightᵀ        float32; of x, 16 bits of each run of 256 inputs

A weight is read once for each eight tokens, near the rate of the memory. A token's sums are over
the same terms in the same order for any number of tokens, so its bytes depend on it alone; they
differ from those of `kernels.cuda.product`, so an engine keeps to one of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cupy as cp
import numpy as np

from kernels.cuda.launch import Kernel
from kernels.cuda.matrix import CudaMatrix, CudaPart, DeviceArray
from kernels.cuda.modules import NULL, blocks_for, get_kernel
from kernels.cuda.scratch import Scratch

GROUP_TOKENS = 8
_SET_TOKENS, _TILE_OUTPUTS = 4, 16  # of one step of the tensor cores
_RUN, _RUN_WARPS = 256, 8
_TOKEN_NBYTES = 2 * (_RUN + 16)  # of a run of a token: kTokenBytes
_OWN_NBYTES = _TOKEN_NBYTES + 4  # with its scale
_RESERVED_NBYTES = 1024  # of a block, by the system
_PIECE = 16  # bytes that are copied at once
STRIDES = {"Q4_K": 1184, "Q6_K": 1680, "Q8_0": 2192}  # Runs<Type>::kStride


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """How a product is divided; bytes do not depend on it.

    tiles: most tiles of 16 outputs that a block takes
    stages: of its ring
    blocks: that the compiler makes room for in a processor
    """

    tiles: int
    stages: int
    blocks: int


# Of a single token, which each block splits for itself where there is room, and of others.
ONE = {
    "Q4_K": Variant(tiles=1, stages=3, blocks=2),
    "Q6_K": Variant(tiles=1, stages=3, blocks=2),
    "Q8_0": Variant(tiles=1, stages=2, blocks=2),
}
SEVERAL = {
    "Q4_K": Variant(tiles=2, stages=2, blocks=2),
    "Q6_K": Variant(tiles=2, stages=2, blocks=2),
    "Q8_0": Variant(tiles=1, stages=2, blocks=2),
}
_TILE_GAINS = {2: 1.1, 1: 1.0}  # work per time of a block, where its processor is full


class FewProducts:
    """Products of one device, with the scratch they need."""

    def __init__(self, scratch: Scratch) -> None:
        self.one, self.several = dict(ONE), dict(SEVERAL)
        self._scratch = scratch
        self._paths: dict[tuple[int, int], tuple[str, int]] = {}
        attributes = cp.cuda.Device().attributes
        self._num_processors = int(attributes["MultiProcessorCount"])
        self._shared_nbytes = int(attributes["MaxSharedMemoryPerMultiprocessor"])

    def close(self) -> None:
        pass  # it holds nothing of its own

    def paths(self) -> dict[tuple[int, int], tuple[str, int]]:
        """What served each shape (num_outputs, num_inputs) so far, and tokens at once."""
        return dict(self._paths)

    def buffers(self, shapes: Sequence[tuple[int, int]], num_tokens: int) -> dict[str, int]:
        """Bytes of scratch, by name, that products of weights (num_outputs, num_inputs) take."""
        runs = _num_groups(num_tokens) * max(
            blocks_for(num_inputs, _RUN) for _, num_inputs in shapes
        )
        return {"x": runs * GROUP_TOKENS * _OWN_NBYTES + 1024}

    def matmul(
        self,
        x: DeviceArray,
        weight: CudaMatrix,
        out: DeviceArray,
        bias: DeviceArray | None,
        accumulate: bool,
    ) -> None:
        """out (num_tokens, num_outputs) = or += x · weightᵀ (+ bias)."""
        if len(x) == 0:
            return
        fast = [_goes_by_runs(part, weight.num_inputs) for part in weight.parts]
        ways = "+".join(sorted({"runs" if goes else "dots" for goes in fast}))
        self._paths[weight.num_outputs, weight.num_inputs] = (f"few ({ways})", GROUP_TOKENS)
        for part, by_runs in zip(weight.parts, fast, strict=True):
            outputs = slice(part.first_output, part.first_output + part.num_outputs)
            own_bias = NULL if bias is None else bias[outputs]
            if by_runs:
                self._runs(part, x, own_bias, accumulate, out[:, outputs])
            else:
                _dots(part, x, own_bias, accumulate, out[:, outputs])

    def _runs(
        self, part: CudaPart, x: DeviceArray, bias: DeviceArray, accumulate: bool, out: DeviceArray
    ) -> None:
        launch = self._launch(part, x.shape[1], min(len(x), GROUP_TOKENS))
        split = None if launch.own else self._split(x, part.type_name)
        for group in range(_num_groups(len(x))):
            tokens = slice(group * GROUP_TOKENS, (group + 1) * GROUP_TOKENS)
            sides = (NULL, NULL) if split is None else (split[0][group], split[1][group])
            launch(part, x[tokens], sides, bias, accumulate, out[tokens])

    def _launch(self, part: CudaPart, num_inputs: int, num_tokens: int) -> _Launch:
        if num_tokens == 1:
            variant = self.one[part.type_name]
            launch = self._variant(part, num_inputs, num_tokens, variant, own=True)
            if variant.blocks * (launch.shared_nbytes + _RESERVED_NBYTES) <= self._shared_nbytes:
                return launch
        variant = self.several[part.type_name]
        return self._variant(part, num_inputs, num_tokens, variant, own=False)

    def _variant(
        self, part: CudaPart, num_inputs: int, num_tokens: int, variant: Variant, own: bool
    ) -> _Launch:
        places = variant.blocks * self._num_processors
        tiles = _best_tiles(part.num_outputs, variant.tiles, places)
        sets, outputs = blocks_for(num_tokens, _SET_TOKENS), tiles * _TILE_OUTPUTS
        shared = outputs * variant.stages * STRIDES[part.type_name]
        shared += outputs * 4 * _RUN_WARPS * sets * _SET_TOKENS
        if own:
            shared += num_inputs // _RUN * _OWN_NBYTES
        sizes = f"{tiles}, {sets}, {variant.stages}, {variant.blocks}, {str(own).lower()}"
        return _Launch(
            kernel=get_kernel("few.cu", f"few_product<{part.type_name}, {sizes}>"),
            num_blocks=min(blocks_for(part.num_outputs, outputs), places),
            shared_nbytes=shared,
            own=own,
        )

    def _split(self, x: DeviceArray, type_name: str) -> tuple[DeviceArray, DeviceArray]:
        num_tokens, num_inputs = x.shape
        groups, runs = _num_groups(num_tokens), num_inputs // _RUN
        parts, scales = self._scratch.take_all(
            "x",
            (
                ((groups, runs, GROUP_TOKENS * _TOKEN_NBYTES), cp.uint8),
                ((groups, runs, GROUP_TOKENS), cp.float32),
            ),
        )
        get_kernel("few.cu", f"split_tokens<{type_name}>")(
            (runs, groups),
            (GROUP_TOKENS * 32,),
            (np.int32(num_tokens), np.int32(num_inputs), x, parts, scales),
        )
        return parts, scales


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launch:
    """A product of up to 8 tokens. own: each block splits the tokens for itself."""

    kernel: Kernel
    num_blocks: int
    shared_nbytes: int
    own: bool

    def __call__(
        self,
        part: CudaPart,
        x: DeviceArray,
        split: tuple[DeviceArray, DeviceArray],
        bias: DeviceArray,
        accumulate: bool,
        out: DeviceArray,
    ) -> None:
        self.kernel(
            (self.num_blocks,),
            (_RUN_WARPS * 32,),
            (
                np.int32(len(out)),
                np.int32(part.num_outputs),
                np.int32(x.shape[1] // _RUN),
                np.int32(part.blocks.shape[1]),
                np.int32(out.strides[0] // 4),
                part.blocks,
                x,
                *split,
                bias,
                np.int32(accumulate),
                out,
            ),
            shared_mem=self.shared_nbytes,
        )


def _best_tiles(num_outputs: int, most: int, num_places: int) -> int:
    """Tiles of a block: the more the better, unless places for blocks are left empty."""

    def rate(tiles: int) -> float:
        blocks = blocks_for(num_outputs, tiles * _TILE_OUTPUTS)
        return _TILE_GAINS[tiles] * blocks / (blocks_for(blocks, num_places) * num_places)

    return max((tiles for tiles in _TILE_GAINS if tiles <= most), key=rate)


def _goes_by_runs(part: CudaPart, num_inputs: int) -> bool:
    row_nbytes = part.blocks.shape[1]
    aligned = row_nbytes % _PIECE == 0 and part.blocks.data.ptr % _PIECE == 0
    return part.type_name in ONE and num_inputs % _RUN == 0 and aligned


def _dots(
    part: CudaPart, x: DeviceArray, bias: DeviceArray, accumulate: bool, out: DeviceArray
) -> None:
    count = 1 if len(x) == 1 else GROUP_TOKENS
    kernel = get_kernel("few.cu", f"few_dots<{part.type_name}, {count}>")
    for first in range(0, len(x), GROUP_TOKENS):
        tokens = slice(first, first + GROUP_TOKENS)
        kernel(
            (blocks_for(part.num_outputs, 4),),
            (128,),
            (
                np.int32(len(x[tokens])),
                np.int32(part.num_outputs),
                np.int32(x.shape[1]),
                np.int64(part.blocks.shape[1]),
                np.int32(out.strides[0] // 4),
                part.blocks,
                x[tokens],
                bias,
                np.int32(accumulate),
                out[tokens],
            ),
        )


def _num_groups(num_tokens: int) -> int:
    return blocks_for(num_tokens, GROUP_TOKENS)
