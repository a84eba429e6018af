"""Decoders of the 13 tensor types: blocks of eight rows into columns of a tile.

Packed integers are brought to bytes, a byte to the top of its lane, and the scale carries the
2^-24. A scale times a packed integer fits 24 bits in every type, so these products are exact,
and a fused operation gives the bits of two. Packing of the blocks: ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from numba import types
from numba.extending import intrinsic

from kernels.cpu.rows import FLOATS, ROWS, Rows, int_constant, words_constant
from kernels.cpu.vector import PANEL, emit_loop, prefetch_line

Part = Callable[[Rows, Any], None]  # decodes a part: its rows, and its number in the block

_NIBBLES = 0x0F0F0F0F
_LINE_NBYTES = 64


def _f32(r: Rows) -> None:
    for i, column in enumerate(r.words(0)):
        r.put(i, r.builder.bitcast(column, FLOATS))


def _f16(r: Rows) -> None:
    for i, column in enumerate(r.shorts(0)):
        r.put(i, r.from_half(column))


def _bf16(r: Rows) -> None:
    for i, column in enumerate(r.words(0)):
        low = r.builder.shl(column, words_constant(16))
        high = r.builder.and_(column, words_constant(-65536))
        r.put(2 * i, r.builder.bitcast(low, FLOATS))
        r.put(2 * i + 1, r.builder.bitcast(high, FLOATS))


def _q4_0(r: Rows) -> None:
    scale = r.scaled_down(r.half(0))
    columns = r.words(2)
    for half in range(2):
        for i, column in enumerate(columns):
            r.put_bytes(16 * half + 4 * i, r.less(r.field(column, 4 * half, _NIBBLES), 8), scale)


def _q4_1(r: Rows) -> None:
    head = r.word(0)
    scale, least = r.scaled_down(r.low_half(head)), r.high_half(head)
    columns = r.words(4)
    for half in range(2):
        for i, column in enumerate(columns):
            r.put_bytes(16 * half + 4 * i, r.field(column, 4 * half, _NIBBLES), scale, least)


def _fifth_bits(r: Rows, bits: Any, first: int) -> Any:
    """Bits first to first + 3, each as the bit of value 16 of a byte."""
    four = r.field(bits, first, 15)
    spread = r.builder.mul(four, words_constant(0x204081 << 4))
    return r.builder.and_(spread, words_constant(0x10101010))


def _q5(r: Rows, columns: list[Any], bits: Any, finish: Callable[[int, Any], None]) -> None:
    for half in range(2):
        for i, column in enumerate(columns):
            at = 16 * half + 4 * i
            low = r.field(column, 4 * half, _NIBBLES)
            finish(at, r.builder.or_(low, _fifth_bits(r, bits, at)))


def _q5_0(r: Rows) -> None:
    scale = r.scaled_down(r.half(0))
    _q5(r, r.words(6), r.word(2), lambda at, q: r.put_bytes(at, r.less(q, 16), scale))


def _q5_1(r: Rows) -> None:
    head = r.word(0)
    scale, least = r.scaled_down(r.low_half(head)), r.high_half(head)
    _q5(r, r.words(8), r.word(4), lambda at, q: r.put_bytes(at, q, scale, least))


def _q8_0(r: Rows) -> None:
    scale = r.scaled_down(r.half(0))
    for i, column in enumerate([*r.words(2), *r.words(18)]):
        r.put_bytes(4 * i, column, scale)


def _k_scales(r: Rows) -> tuple[Any, Any]:
    """Scales and negative minimums of the 8 groups of a Q4_K or Q5_K block, kept.

    Of 12 bytes, 0-3 hold scales 0-3 and 4-7 minimums 0-3 in 6 bits; 8-11 hold the low 4 bits of
    scales (low half) and minimums 4-7, whose high 2 bits sit on top of bytes 0-3 and 4-7.
    """
    halves, first, second, third = r.words(0)
    scales = [
        r.field(first, 0, 0x3F3F3F3F),
        r.builder.or_(r.field(third, 0, _NIBBLES), r.field(first, 2, 0x30303030)),
    ]
    minimums = [
        r.field(second, 0, 0x3F3F3F3F),
        r.builder.or_(r.field(third, 4, _NIBBLES), r.field(second, 2, 0x30303030)),
    ]
    scale = r.scaled_down(r.scaled_down(r.low_half(halves)))
    least = r.builder.fneg(r.scaled_down(r.high_half(halves)))
    return r.kept(r.scaled_bytes(scales, scale)), r.kept(r.scaled_bytes(minimums, least))


def _q4_k(r: Rows) -> Part:
    scales, offsets = _k_scales(r)

    def part(p: Rows, index: Any) -> None:
        columns = [*p.words(16), *p.words(32)]
        for half in range(2):
            group = p.linear(index, 2, half)
            scale, offset = p.from_kept(scales, group), p.from_kept(offsets, group)
            for i, column in enumerate(columns):
                p.put_bytes(32 * half + 4 * i, p.field(column, 4 * half, _NIBBLES), scale, offset)

    return part


def _q5_k(r: Rows) -> Part:
    scales, offsets = _k_scales(r)
    bits = r.kept([*r.words(16), *r.words(32)])

    def part(p: Rows, index: Any) -> None:
        columns = [*p.words(48), *p.words(64)]
        for half in range(2):
            group = p.linear(index, 2, half)
            scale, offset = p.from_kept(scales, group), p.from_kept(offsets, group)
            shift = p.splat(group)
            for i, column in enumerate(columns):
                low = p.field(column, 4 * half, _NIBBLES)
                high = p.field(p.from_kept(bits, i), shift, 0x01010101, up=4)
                p.put_bytes(32 * half + 4 * i, p.builder.or_(low, high), scale, offset)

    return part


def _q6_k(r: Rows) -> Part:
    scales = r.kept(r.scaled_bytes(r.words(192), r.scaled_down(r.scaled_down(r.half(208)))))

    def part(p: Rows, index: Any) -> None:
        lows = [column for at in range(0, 64, 16) for column in p.words(at)]
        # a part's rows have moved by 64 bytes, its high bits by 32
        highs = [*p.words(p.linear(index, -32, 128)), *p.words(p.linear(index, -32, 144))]
        for at in range(32):
            plane, i = at // 8, at % 8
            low = p.field(lows[at % 16], at // 16 * 4, _NIBBLES)
            high = p.field(highs[i], 2 * plane, 0x03030303, up=4)
            group = p.linear(index, 8, at // 4)
            q = p.less(p.builder.or_(low, high), 32)
            p.put_bytes(4 * at, q, p.from_kept(scales, group))

    return part


def _q2_k(r: Rows) -> Part:
    packed = r.words(0)
    scale = r.scaled_down(r.scaled_down(r.half(80)))
    least = r.builder.fneg(r.scaled_down(r.half(82)))
    scales = r.kept(r.scaled_bytes([r.field(word, 0, _NIBBLES) for word in packed], scale))
    offsets = r.kept(r.scaled_bytes([r.field(word, 4, _NIBBLES) for word in packed], least))

    def part(p: Rows, index: Any) -> None:
        columns = [*p.words(16), *p.words(32)]
        for at in range(32):
            group = p.linear(index, 8, at // 4)
            q = p.field(columns[at % 8], at // 8 * 2, 0x03030303)
            p.put_bytes(4 * at, q, p.from_kept(scales, group), p.from_kept(offsets, group))

    return part


def _q3_k_scales(r: Rows) -> Any:
    """The 16 scales, kept: low 4 bits in bytes 96-103, high 2 in 104-107; the half at 108."""
    words = r.words(94)
    first, second, third = (
        r.builder.or_(r.builder.lshr(a, words_constant(16)), r.builder.shl(b, words_constant(16)))
        for a, b in pairwise(words)
    )
    joined = [
        r.builder.or_(
            r.field((first, second)[i & 1], i // 2 * 4, _NIBBLES),
            r.field(third, 2 * i, 0x03030303, up=4),
        )
        for i in range(4)
    ]
    scale = r.scaled_down(r.scaled_down(r.high_half(words[3])))
    return r.kept(r.scaled_bytes([r.less(word, 32) for word in joined], scale))


def _q3_k(r: Rows) -> Part:
    scales = _q3_k_scales(r)
    bits = r.kept([*r.words(0), *r.words(16)])

    def part(p: Rows, index: Any) -> None:
        columns = [*p.words(32), *p.words(48)]
        for at in range(32):
            plane, i = at // 8, at % 8
            group = p.linear(index, 8, at // 4)
            shift = p.splat(p.linear(index, 4, plane))
            low = p.field(columns[i], 2 * plane, 0x03030303)
            high = p.field(p.from_kept(bits, i), shift, 0x01010101, up=2)
            q = p.less(p.builder.or_(low, high), 4)
            p.put_bytes(4 * at, q, p.from_kept(scales, group))

    return part


def _decoder(
    prepare: Callable[[Rows], Part], part_nbytes: int, part_size: int, share_nbytes: int
) -> Any:
    """An intrinsic; its arguments are those of `decode` below.

    share_nbytes: of a block's bytes, a part's share
    """
    bytes_, floats = types.CPointer(types.uint8), types.CPointer(types.float32)
    signature = types.void(bytes_, *[types.int64] * 4, floats, types.int64)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        source, row_nbytes, last_row, begin, end, tile, ahead = args
        rows = []
        for row in range(ROWS):
            inside = builder.icmp_signed("<", int_constant(row), last_row)
            index = builder.select(inside, int_constant(row), last_row)
            rows.append(builder.gep(source, [builder.mul(index, row_nbytes)]))
        part = prepare(Rows(builder, rows, tile))
        first = builder.sdiv(begin, int_constant(part_size))
        count = builder.sub(builder.sdiv(end, int_constant(part_size)), first)

        def step(number: Any, _values: list[Any]) -> list[Any]:
            index = builder.add(first, number)
            soon = builder.add(ahead, builder.mul(index, int_constant(share_nbytes)))
            for row in rows:
                for line in range(0, share_nbytes, _LINE_NBYTES):
                    at = builder.add(soon, int_constant(line))
                    prefetch_line(builder, builder.gep(row, [at]), write=False)
            moved_rows = [
                builder.gep(row, [builder.mul(index, int_constant(part_nbytes))]) for row in rows
            ]
            target = builder.gep(tile, [builder.mul(number, int_constant(part_size * PANEL))])
            part(Rows(builder, moved_rows, target), index)
            return []

        emit_loop(builder, count, [], step)
        return context.get_dummy_value()

    def decode(
        _typing: Any,
        source: Any,
        row_nbytes: Any,
        last_row: Any,
        begin: Any,
        end: Any,
        tile: Any,
        ahead: Any,
    ) -> Any:
        return signature, generate

    return intrinsic(decode)


def _block_decoder(emit: Callable[[Rows], None], block_nbytes: int, block_size: int) -> Any:
    """A decoder whose parts are blocks."""
    return _decoder(
        lambda _rows: lambda rows, _index: emit(rows), block_nbytes, block_size, block_nbytes
    )


# (source, row_nbytes, last_row, begin, end, tile, ahead): tile[k - begin, row] = value k of a
# row, for k in [begin, end) and 8 rows that are `row_nbytes` apart; rows after the last repeat
# it. A K type decodes within a block, whole parts of 64 or 128 values; the others whole blocks,
# of 4, 16 and 8 values in F32, F16 and BF16. The bytes `ahead` bytes later are asked for.
f32_columns = _block_decoder(_f32, 16, 4)
f16_columns = _block_decoder(_f16, 32, 16)
bf16_columns = _block_decoder(_bf16, 16, 8)
q4_0_columns = _block_decoder(_q4_0, 18, 32)
q4_1_columns = _block_decoder(_q4_1, 20, 32)
q5_0_columns = _block_decoder(_q5_0, 22, 32)
q5_1_columns = _block_decoder(_q5_1, 24, 32)
q8_0_columns = _block_decoder(_q8_0, 34, 32)
q2_k_columns = _decoder(_q2_k, 32, 128, 42)
q3_k_columns = _decoder(_q3_k, 32, 128, 55)
q4_k_columns = _decoder(_q4_k, 32, 64, 36)
q5_k_columns = _decoder(_q5_k, 32, 64, 44)
q6_k_columns = _decoder(_q6_k, 64, 128, 105)
