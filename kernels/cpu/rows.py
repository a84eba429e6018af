"""Eight rows of packed bytes in the lanes of LLVM vectors: what decoders of columns are made of.

Four words of eight rows become four vectors; from then on a row's scales are a lane of a vector
too, and a decoded vector is eight neighbours in a tile (k, 32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kernels.cpu.vector import PANEL, emit_fma

ROWS = 8  # rows of one call

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_WORDS, FLOATS = ir.VectorType(_I32, ROWS), ir.VectorType(_F32, ROWS)
_SHORTS, _BYTES = ir.VectorType(_I16, 2 * ROWS), ir.VectorType(_I8, 4 * ROWS)
_DOWN = 2.0**-24  # takes a byte at the top of a word back to its value


def int_constant(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def words_constant(value: int) -> ir.Constant:
    return ir.Constant(_WORDS, [value] * ROWS)


def _mask(lanes: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I32, len(lanes)), lanes)


def _zip_masks(num_lanes: int) -> tuple[ir.Constant, ir.Constant]:
    """Interleave the low, or the high, halves of each 128-bit part of two vectors of 256 bits."""
    half = num_lanes // 4
    low, high = (
        [
            at + source
            for part in (0, 2 * half)
            for at in range(part + begin, part + begin + half)
            for source in (0, num_lanes)
        ]
        for begin in (0, half)
    )
    return _mask(low), _mask(high)


@dataclass(frozen=True, slots=True)
class Rows:
    """Eight rows at the first byte of a block, and where its values go in the tile."""

    builder: Any
    rows: list[Any]  # byte pointers
    target: Any  # float pointer to (first input, first row)

    # ---- reads: offsets in bytes from the block's begin ------------------------------------

    def _read(self, row: int, offset: Any, kind: Any) -> Any:
        at = int_constant(offset) if isinstance(offset, int) else offset
        pointer = self.builder.gep(self.rows[row], [at])
        value = self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()))
        value.align = 1
        return value

    def _transposed(self, rows: list[Any]) -> list[Any]:
        """In each 128-bit part of `rows`, the columns of the square that they are."""
        masks = _zip_masks(rows[0].type.count)
        half = len(rows) // 2
        for _ in range(len(rows).bit_length() - 1):
            rows = [
                self.builder.shuffle_vector(a, b, mask)
                for a, b in zip(rows[:half], rows[half:], strict=True)
                for mask in masks
            ]
        return rows

    def words(self, offset: Any) -> list[Any]:
        """The 16 bytes at offset: four vectors of a word of each row."""
        kind = ir.VectorType(_I32, 4)
        joined = _mask(list(range(8)))
        return self._transposed(
            [
                self.builder.shuffle_vector(
                    self._read(row, offset, kind), self._read(row + 4, offset, kind), joined
                )
                for row in range(4)
            ]
        )

    def shorts(self, offset: int) -> list[Any]:
        """The 32 bytes at offset: sixteen vectors of a short of each row."""
        columns = self._transposed([self._read(row, offset, _SHORTS) for row in range(ROWS)])
        masks = [_mask(list(range(begin, begin + ROWS))) for begin in (0, ROWS)]
        return [
            self.builder.shuffle_vector(column, column, mask)
            for mask in masks
            for column in columns
        ]

    def _gather(self, offset: int, kind: Any) -> Any:
        result = ir.Constant(ir.VectorType(kind, ROWS), ir.Undefined)
        for row in range(ROWS):
            value = self._read(row, offset, kind)
            result = self.builder.insert_element(result, value, ir.Constant(_I32, row))
        return result

    def word(self, offset: int) -> Any:
        return self._gather(offset, _I32)

    def half(self, offset: int) -> Any:
        """A float16 of each row, as floats."""
        return self.from_half(self._gather(offset, _I16))

    # ---- arithmetic ------------------------------------------------------------------------

    def from_half(self, shorts: Any) -> Any:
        halves = self.builder.bitcast(shorts, ir.VectorType(ir.HalfType(), ROWS))
        return self.builder.fpext(halves, FLOATS)

    def low_half(self, words: Any) -> Any:
        return self.from_half(self.builder.trunc(words, ir.VectorType(_I16, ROWS)))

    def high_half(self, words: Any) -> Any:
        return self.low_half(self.builder.lshr(words, words_constant(16)))

    def field(self, words: Any, shift: Any, mask: int, up: int = 0) -> Any:
        """((words >> shift) & mask) << up; shift: a number, or a vector."""
        down = words_constant(shift) if isinstance(shift, int) else shift
        kept = self.builder.and_(self.builder.lshr(words, down), words_constant(mask))
        return self.builder.shl(kept, words_constant(up)) if up else kept

    def less(self, words: Any, amount: int) -> Any:
        """Each byte less `amount`."""
        amounts = ir.Constant(_BYTES, [amount] * 4 * ROWS)
        return self.builder.bitcast(
            self.builder.sub(self.builder.bitcast(words, _BYTES), amounts), _WORDS
        )

    def byte(self, words: Any, index: int) -> Any:
        """Byte `index`, signed, of each word, times 2^24, as floats."""
        zeros = ir.Constant(_BYTES, [0] * 4 * ROWS)
        lanes = [4 * ROWS] * 4 * ROWS
        for row in range(ROWS):
            lanes[4 * row + 3] = 4 * row + index
        top = self.builder.shuffle_vector(self.builder.bitcast(words, _BYTES), zeros, _mask(lanes))
        return self.builder.sitofp(self.builder.bitcast(top, _WORDS), FLOATS)

    def scaled_down(self, scale: Any) -> Any:
        return self.builder.fmul(scale, ir.Constant(FLOATS, [_DOWN] * ROWS))

    def scaled_bytes(self, words: list[Any], scale: Any) -> list[Any]:
        """scale · 2^24 · byte, for each byte of each word."""
        return [
            self.builder.fmul(self.byte(column, index), scale)
            for column in words
            for index in range(4)
        ]

    # ---- writes ----------------------------------------------------------------------------

    def put(self, at: int, floats: Any) -> None:
        """Store the values of input `at`."""
        pointer = self.builder.gep(self.target, [int_constant(at * PANEL)])
        self.builder.store(floats, self.builder.bitcast(pointer, FLOATS.as_pointer())).align = 4

    def put_bytes(self, at: int, words: Any, scale: Any, offset: Any = None) -> None:
        """Store the bytes of a word, inputs at to at + 3, as scale · 2^24 · byte + offset."""
        for index in range(4):
            value = self.byte(words, index)
            if offset is None:
                value = self.builder.fmul(value, scale)
            else:
                value = emit_fma(self.builder, value, scale, offset)
            self.put(at + index, value)

    # ---- values picked at run time ---------------------------------------------------------

    def kept(self, vectors: list[Any]) -> Any:
        """Put vectors on the stack, to be read by `from_kept` under an index known at run time."""
        memory = cgutils.alloca_once(self.builder, vectors[0].type, len(vectors))
        for index, vector in enumerate(vectors):
            self.builder.store(vector, self.builder.gep(memory, [int_constant(index)]))
        return memory

    def from_kept(self, memory: Any, index: Any) -> Any:
        at = int_constant(index) if isinstance(index, int) else index
        return self.builder.load(self.builder.gep(memory, [at]))

    def linear(self, index: Any, factor: int, offset: int) -> Any:
        product = self.builder.mul(index, int_constant(factor))
        return self.builder.add(product, int_constant(offset))

    def splat(self, value: Any) -> Any:
        first = self.builder.insert_element(
            ir.Constant(_WORDS, ir.Undefined), self.builder.trunc(value, _I32), ir.Constant(_I32, 0)
        )
        return self.builder.shuffle_vector(first, first, _mask([0] * ROWS))
