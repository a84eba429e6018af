"""Matrix products in half precision, in tiles of 256 tokens that are always computed whole.

    out = (out) + bias + 2**e · (halves of x·2**-e) · weightᵀ        summed in float32

A token whose largest input is not well inside what halves hold has an exponent e that brings it
near their top, so nothing overflows. A product of a weight always has the same shape and goes by
the same algorithm, whatever the number of tokens; that a token's place in the tile does not matter
either is checked once for each shape, on random data, and where the library fails it a kernel of
our own takes over. Up to eight tiles go together where that, too, gives the bytes of one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import cupy as cp
import numpy as np

from kernels.cuda.library import Library, open_library
from kernels.cuda.matrix import CudaMatrix, DeviceArray, dequantize
from kernels.cuda.modules import MAX_GRID_Y, NULL, blocks_for, floats_together, get_kernel
from kernels.cuda.scratch import Scratch, free_unused
from kernels.ops import KernelError

TILE_TOKENS = 256
TILES_AT_ONCE = (8, 4, 2)
SLAB_NBYTES = 1 << 28  # halves of a weight that are decoded at once
SLAB_STEP = 256
ALIGNMENT = 512  # of what CuPy allocates
_THREADS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """tokens: of a product of `count` rows, some of them perhaps padding; in_place: see matmul"""

    tokens: slice
    count: int
    in_place: bool


class Products:
    """Products of one device, with the scratch they need; it grows to the largest of them.

    library: use the vendor's product where it passes the check
    """

    def __init__(self, scratch: Scratch, *, library: bool = True) -> None:
        self._library = open_library() if library else None
        self._by_library: dict[tuple[int, int], bool] = {}
        self._goes_at_once: dict[tuple[tuple[int, int], int], bool] = {}
        self._in_place: dict[tuple[tuple[int, int], int, int], bool] = {}
        self._scratch = scratch

    def close(self) -> None:
        if self._library is not None:
            self._library.close()

    def paths(self) -> dict[tuple[int, int], tuple[str, int]]:
        """What served each shape (num_outputs, num_inputs) so far, and its most tiles at once."""
        most = dict.fromkeys(self._by_library, 1)
        for (shape, tiles), passed in self._goes_at_once.items():
            most[shape] = max(most[shape], tiles if passed else 1)
        return {
            shape: ("library" if by_library else "own", most[shape])
            for shape, by_library in self._by_library.items()
        }

    def buffers(self, shapes: Sequence[tuple[int, int]], num_tokens: int) -> dict[str, int]:
        """Bytes of scratch, by name, that products of such weights take at most.

        shapes: (num_outputs, num_inputs) of each
        """
        padded = blocks_for(num_tokens, TILE_TOKENS) * TILE_TOKENS
        at_once = min(padded, TILE_TOKENS * TILES_AT_ONCE[0])
        slabs = [(min(n, _slab(n, m)), m) for n, m in shapes]
        outputs = max(num_outputs for num_outputs, _ in slabs)
        return {
            "x": padded * 2 * max(num_inputs for _, num_inputs in slabs),
            "exponents": padded * 4,
            "weight": max(num_outputs * num_inputs for num_outputs, num_inputs in slabs) * 2,
            "sums": at_once * outputs * 4,
            "checks": TILE_TOKENS * outputs * 5,
        }

    def matmul(
        self,
        x: DeviceArray,
        weight: CudaMatrix,
        out: DeviceArray,
        bias: DeviceArray | None,
        accumulate: bool,
    ) -> None:
        """out (num_tokens, num_outputs) = or += x · weightᵀ (+ bias)."""
        num_tokens, num_inputs = x.shape
        if num_tokens == 0:
            return
        step = _slab(weight.num_outputs, num_inputs)
        slabs = [slice(at, at + step) for at in range(0, weight.num_outputs, step)]
        # What was not checked yet is checked now, while scratch holds nothing.
        steps = [
            list(self._steps(_columns(out, slab), num_inputs, bias is None and not accumulate))
            for slab in slabs
        ]
        halves, exponents = self._operand(x)
        for slab, chunks in zip(slabs, steps, strict=True):
            outputs = self._outputs(weight, slab)
            part_bias = None if bias is None else _rows(bias, slab)
            for chunk in chunks:
                tokens, target = chunk.tokens, _rows(out, chunk.tokens)
                operand = _rows(halves, slice(tokens.start, tokens.start + chunk.count))
                scales = exponents[tokens.start :] if tokens.start else exponents
                if chunk.in_place:
                    columns = _columns(target, slab)
                    self._multiply(operand, outputs, columns)
                    _rescale(columns, scales)
                else:
                    sums = self._scratch.take("sums", (chunk.count, len(outputs)), cp.float32)
                    self._multiply(operand, outputs, sums)
                    _finish(sums, scales, part_bias, accumulate, target, slab.start)

    def _steps(self, out: DeviceArray, num_inputs: int, whole: bool) -> Iterator[_Step]:
        """The products of a weight's slab, which come to `out`.

        whole: nothing is added, so that they may be written there at once
        """
        num_tokens, shape = len(out), (out.shape[1], num_inputs)
        first = 0
        while first < num_tokens:
            left = num_tokens - first
            most = max(1, left // TILE_TOKENS) if whole else blocks_for(left, TILE_TOKENS)
            count = TILE_TOKENS * self._tiles(shape, most)
            tokens = slice(first, min(first + count, num_tokens))
            fits = whole and count <= left
            in_place = fits and self._goes_in_place(shape, _rows(out, tokens))
            yield _Step(tokens=tokens, count=count, in_place=in_place)
            first += count

    def _operand(self, x: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
        num_tokens, num_inputs = x.shape
        padded = blocks_for(num_tokens, TILE_TOKENS) * TILE_TOKENS
        halves = self._operand_room(padded, num_inputs)
        exponents = self._scratch.take("exponents", (padded,), cp.int32)
        get_kernel("pointwise.cu", "to_halves")(
            (num_tokens,), (_THREADS,), (np.int32(num_inputs), x, halves, exponents)
        )
        return halves, exponents

    def _outputs(self, weight: CudaMatrix, slab: slice) -> DeviceArray:
        if weight.halves is not None:
            return _rows(weight.halves, slab)
        num_outputs = min(slab.stop, weight.num_outputs) - slab.start
        halves = self._scratch.take("weight", (num_outputs, weight.num_inputs), cp.float16)
        dequantize(weight, slab.start, halves)
        return halves

    def _multiply(self, x: DeviceArray, outputs: DeviceArray, sums: DeviceArray) -> None:
        if self._goes_by_library(outputs.shape):
            assert self._library is not None
            self._library.product(x, outputs, sums)
        else:
            _own_product(x, outputs, sums)

    def _goes_by_library(self, shape: tuple[int, int]) -> bool:
        if shape not in self._by_library:
            library = self._library
            self._by_library[shape] = library is not None and self._is_uniform(library, shape)
            free_unused()
        return self._by_library[shape]

    def _tiles(self, shape: tuple[int, int], most: int) -> int:
        """How many tiles of at most `most` go together."""
        library = self._library
        if not self._goes_by_library(shape) or library is None or most == 1:
            return 1
        for tiles in TILES_AT_ONCE:
            if tiles > most:
                continue
            if (shape, tiles) not in self._goes_at_once:
                self._goes_at_once[shape, tiles] = self._is_same_at_once(library, shape, tiles)
                free_unused()
            if self._goes_at_once[shape, tiles]:
                return tiles
        return 1

    def _is_uniform(self, library: Library, shape: tuple[int, int]) -> bool:
        """Whether the library gives the same bytes at all places of the tile, and right ones."""
        num_outputs, num_inputs = shape
        rng = np.random.default_rng(num_outputs)
        x = _repeated_rows(rng, 1, self._operand_room(TILE_TOKENS, num_inputs))
        outputs = self._scratch.take("weight", shape, cp.float16)
        _repeated_rows(rng, min(num_outputs, 64), outputs)
        sums = self._scratch.take("sums", (TILE_TOKENS, num_outputs), cp.float32)
        sums[...] = cp.nan
        library.product(x, outputs, sums)
        if not all(_same_bytes(sums[token], sums[0]) for token in range(1, TILE_TOKENS)):
            return False
        some = cp.asnumpy(outputs[:64]).astype(np.float64)
        expected = some @ cp.asnumpy(x[0]).astype(np.float64)
        error = np.abs(cp.asnumpy(sums[0, : len(some)]) - expected).max()
        if not error <= 1e-3 * num_inputs**0.5:
            raise KernelError(
                f"the library's product of {num_outputs} x {num_inputs} halves is off by {error} "
                f"on this GPU; expected at most {1e-3 * num_inputs**0.5:.3g}; check the driver"
            )
        return True

    def _is_same_at_once(self, library: Library, shape: tuple[int, int], tiles: int) -> bool:
        """Whether tiles at once give the same bytes as one by one."""
        num_outputs, num_inputs = shape
        num_tokens = tiles * TILE_TOKENS
        rng = np.random.default_rng(num_inputs)
        x = _repeated_rows(rng, 61, self._operand_room(num_tokens, num_inputs))
        outputs = _repeated_rows(rng, 67, self._scratch.take("weight", shape, cp.float16))
        sums = self._scratch.take("sums", (num_tokens, num_outputs), cp.float32)
        tile = cp.full((TILE_TOKENS, num_outputs), cp.nan, cp.float32)
        library.product(x, outputs, sums)
        for first in range(0, num_tokens, TILE_TOKENS):
            rows = slice(first, first + TILE_TOKENS)
            library.product(x[rows], outputs, tile)
            if not _same_bytes(tile, sums[rows]):
                return False
        return True

    def _goes_in_place(self, shape: tuple[int, int], target: DeviceArray) -> bool:
        """Whether a product may be written where it belongs, columns of rows that are longer.

        Where they are, the library must give the bytes that it gives in scratch.
        """
        if target.data.ptr % ALIGNMENT:  # scratch is: the library may choose its kernel by that
            return False
        key = (shape, target.strides[0], len(target))
        if key not in self._in_place:
            by_itself = target.flags.c_contiguous or not self._goes_by_library(shape)
            self._in_place[key] = by_itself or self._is_same_there(shape, target)
            free_unused()
        return self._in_place[key]

    def _is_same_there(self, shape: tuple[int, int], target: DeviceArray) -> bool:
        """Writes anything into `target`."""
        count, rng = len(target), np.random.default_rng(len(target))
        x = _repeated_rows(rng, 61, self._operand_room(count, shape[1]))
        outputs = _repeated_rows(rng, 67, self._scratch.take("weight", shape, cp.float16))
        sums = self._scratch.take("sums", target.shape, cp.float32)
        self._multiply(x, outputs, sums)
        self._multiply(x, outputs, target)
        tiles = (slice(first, first + TILE_TOKENS) for first in range(0, count, TILE_TOKENS))
        return all(_same_bytes(sums[tile], target[tile]) for tile in tiles)

    def _operand_room(self, num_tokens: int, num_inputs: int) -> DeviceArray:
        return self._scratch.take("x", (num_tokens, num_inputs), cp.float16)


def _slab(num_outputs: int, num_inputs: int) -> int:
    """Outputs of a weight that are decoded at once: parts of one size, whole tiles of products."""
    count = blocks_for(2 * num_outputs * num_inputs, SLAB_NBYTES)
    return blocks_for(blocks_for(num_outputs, count), SLAB_STEP) * SLAB_STEP


def _rows(array: DeviceArray, rows: slice) -> DeviceArray:
    """array[rows]; the array itself where it has no others, since a view costs time."""
    return array if rows.start == 0 and rows.stop >= len(array) else array[rows]


def _columns(array: DeviceArray, columns: slice) -> DeviceArray:
    whole = columns.start == 0 and columns.stop >= array.shape[1]
    return array if whole else array[:, columns]


def _repeated_rows(rng: np.random.Generator, count: int, out: DeviceArray) -> DeviceArray:
    """Fill `out` with `count` rows of random halves, over and over."""
    rows = rng.standard_normal((count, out.shape[1]), dtype=np.float32).astype(np.float16)
    return cp.take(cp.asarray(rows), cp.arange(len(out)) % count, axis=0, out=out)


def _same_bytes(one: DeviceArray, other: DeviceArray) -> bool:
    return bool((one.view(cp.int32) == other.view(cp.int32)).all())


def _own_product(x: DeviceArray, outputs: DeviceArray, sums: DeviceArray) -> None:
    num_outputs, num_inputs = outputs.shape
    get_kernel("product.cu", "tile_product")(
        (blocks_for(num_outputs, 32), len(x) // TILE_TOKENS),
        (128,),
        (
            np.int32(num_outputs),
            np.int32(num_inputs),
            np.int64(sums.strides[0] // 4),
            x,
            outputs,
            sums,
        ),
    )


def _rescale(out: DeviceArray, exponents: DeviceArray) -> None:
    get_kernel("pointwise.cu", "rescale")(
        (min(len(out), MAX_GRID_Y),),
        (_THREADS,),
        (
            np.int32(len(out)),
            np.int32(out.shape[1]),
            np.int64(out.strides[0] // 4),
            exponents,
            out,
        ),
    )


def _finish(
    sums: DeviceArray,
    exponents: DeviceArray,
    bias: DeviceArray | None,
    accumulate: bool,
    out: DeviceArray,
    first_output: int,
) -> None:
    num_tokens, width = len(out), sums.shape[1]
    count = floats_together(width, out.shape[1], first_output)
    get_kernel("pointwise.cu", f"finish_product<{count}>")(
        (blocks_for(width, count * _THREADS), min(num_tokens, MAX_GRID_Y)),
        (_THREADS,),
        (
            np.int32(num_tokens),
            np.int32(width),
            np.int32(out.shape[1]),
            sums,
            exponents,
            NULL if bias is None else bias,
            np.int32(accumulate),
            out if first_output == 0 else out[:, first_output:],
        ),
    )
