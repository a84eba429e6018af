"""Matrix products of few tokens, from the quantised bytes, eight tokens at a time.

    out = (out) + bias + x · weightᵀ        float32; of x, 16 bits of each run of 256 inputs

A weight is read once for each eight tokens, near the rate of the memory. A token's sums are over
the same terms in the same order for any number of tokens, so its bytes depend on it alone; they
differ from those of `kernels.cuda.product`, so an engine keeps to one of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cupy as cp
import numpy as np

from kernels.cuda.matrix import CudaMatrix, CudaPart, DeviceArray
from kernels.cuda.modules import NULL, blocks_for, get_kernel
from kernels.cuda.scratch import Scratch

GROUP_TOKENS = 8
_RUN, _RUN_PARTS, _RUN_WARPS = 256, 9, 8
_PART_NBYTES = 16 * 32  # of a step of a run: 8 tokens, 4 quads
_TOTALS_NBYTES = 4 * _RUN_WARPS * GROUP_TOKENS  # of an output
_OWN_NBYTES = 16 * 4 * _RUN_PARTS + 4  # of a run of a token
_RESERVED_NBYTES = 1024  # of a block, by the system
_PIECE = 16  # bytes that are copied at once
STRIDES = {"Q4_K": 1168, "Q6_K": 1680, "Q8_0": 2192}  # Runs<Type>::kStride
# Most tiles of 8 outputs that a block takes, stages of its ring, and blocks that the compiler makes
# room for in a processor; bytes do not depend on them.
VARIANTS = {"Q4_K": (4, 2, 2), "Q6_K": (2, 2, 2), "Q8_0": (2, 2, 2)}
_TILE_GAINS = {4: 1.1, 2: 1.0, 1: 0.8}  # work per time of a block, where its processor is full


class FewProducts:
    """Products of one device, with the scratch they need."""

    def __init__(self, scratch: Scratch) -> None:
        self.variants = dict(VARIANTS)
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
        return {"x": runs * (_RUN_PARTS * _PART_NBYTES + 4 * GROUP_TOKENS) + 1024}

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
        launches = [
            self._launch(part, weight.num_inputs, min(len(x), GROUP_TOKENS)) if goes else None
            for part, goes in zip(weight.parts, fast, strict=True)
        ]
        split = None
        if any(launch is not None and not launch.own for launch in launches):
            split = self._split(x)
        for first in range(0, len(x), GROUP_TOKENS):
            tokens = slice(first, first + GROUP_TOKENS)
            for part, launch in zip(weight.parts, launches, strict=True):
                outputs = slice(part.first_output, part.first_output + part.num_outputs)
                part_bias = NULL if bias is None else bias[outputs]
                target = out[tokens, outputs]
                if launch is None:
                    _dots(part, x[tokens], part_bias, accumulate, target)
                    continue
                group = first // GROUP_TOKENS
                sides = (NULL, NULL) if split is None else (split[0][group], split[1][group])
                launch(part, x[tokens], sides, part_bias, accumulate, target)

    def _launch(self, part: CudaPart, num_inputs: int, num_tokens: int) -> _Launch:
        most_tiles, stages, blocks = self.variants[part.type_name]
        tiles = _best_tiles(part.num_outputs, most_tiles, blocks * self._num_processors)
        shared = tiles * 8 * (stages * STRIDES[part.type_name] + _TOTALS_NBYTES)
        own = num_tokens * (num_inputs // _RUN) * _OWN_NBYTES
        fits = blocks * (shared + own + _RESERVED_NBYTES) <= self._shared_nbytes
        name = f"few_product<{part.type_name}, {tiles}, {stages}, {blocks}, {str(fits).lower()}>"
        return _Launch(
            kernel=get_kernel("few.cu", name),
            num_blocks=min(blocks_for(part.num_outputs, tiles * 8), blocks * self._num_processors),
            shared_nbytes=shared + own if fits else shared,
            own=fits,
        )

    def _split(self, x: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
        num_tokens, num_inputs = x.shape
        groups, runs = _num_groups(num_tokens), num_inputs // _RUN
        parts, scales = self._scratch.take_all(
            "x",
            (
                ((groups, runs, _RUN_PARTS * _PART_NBYTES), cp.uint8),
                ((groups, runs, GROUP_TOKENS), cp.float32),
            ),
        )
        get_kernel("few.cu", "split_tokens")(
            (runs, groups),
            (GROUP_TOKENS * 32,),
            (np.int32(num_tokens), np.int32(num_inputs), x, parts, scales),
        )
        return parts, scales


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launch:
    """A product of up to 8 tokens. own: each block splits the tokens for itself."""

    kernel: Any
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
        if self.kernel.max_dynamic_shared_size_bytes < self.shared_nbytes:
            self.kernel.max_dynamic_shared_size_bytes = self.shared_nbytes
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
        blocks = blocks_for(num_outputs, tiles * 8)
        return _TILE_GAINS[tiles] * blocks / (blocks_for(blocks, num_places) * num_places)

    return max((tiles for tiles in _TILE_GAINS if tiles <= most), key=rate)


def _goes_by_runs(part: CudaPart, num_inputs: int) -> bool:
    row_nbytes = part.blocks.shape[1]
    aligned = row_nbytes % _PIECE == 0 and part.blocks.data.ptr % _PIECE == 0
    return part.type_name in VARIANTS and num_inputs % _RUN == 0 and aligned


def _dots(
    part: CudaPart, x: DeviceArray, bias: DeviceArray, accumulate: bool, out: DeviceArray
) -> None:
    count = 1 if len(x) == 1 else GROUP_TOKENS
    get_kernel("few.cu", f"few_dots<{part.type_name}, {count}>")(
        (blocks_for(part.num_outputs, 4),),
        (128,),
        (
            np.int32(len(x)),
            np.int32(part.num_outputs),
            np.int32(x.shape[1]),
            np.int64(part.blocks.shape[1]),
            np.int32(out.strides[0] // 4),
            part.blocks,
            x,
            bias,
            np.int32(accumulate),
            out,
        ),
    )


def _num_groups(num_tokens: int) -> int:
    return blocks_for(num_tokens, GROUP_TOKENS)
