"""The arithmetic core as LLVM vectors of 16 floats: chains of fused multiply-adds, reductions.

A panel is 32 columns wide. One call of a panel product takes 1 to `MAX_ROWS` rows `a`, and a
weight panel `w` of shape (length, 32); per row and column it computes one chain

    s = 0 (or out);  s = fma(a[row, k], w[k, column], s) for k = 0, 1, ..., length - 1

so its bits do not depend on how many rows share the call, nor on the width of the machine's
registers. Rows are `a_stride` floats apart, panel rows `w_stride`, output rows `out_stride`.
At step k the 128 bytes at `ahead + k * ahead_stride` (bytes) are asked for: what is needed next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16
PANEL = 32  # columns of a panel

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_FLOATS = types.CPointer(types.float32)
_ZEROS = ir.Constant(_VECTOR, [0.0] * LANES)


def _has_avx512() -> bool:
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512f", False))


# 32 wide registers hold 8 rows of a whole panel; 16 of half the width, 2 rows, or 6 of half of it.
MAX_ROWS, _WHOLE_ROWS = (8, 8) if _has_avx512() else (6, 2)


def _int(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _function(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c of float vectors, rounded once."""
    name = f"llvm.fma.v{a.type.count}f32"
    return builder.call(_function(builder, name, a.type, [a.type] * 3), [a, b, c])


def _load(builder: Any, pointer: Any) -> Any:
    value = builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()))
    value.align = 4
    return value


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, _VECTOR.as_pointer())).align = 4


def _splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    mask = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, mask)


def emit_loop(
    builder: Any,
    count: Any,
    start: list[Any],
    body: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    """Emit `for i in range(count): values = body(i, values)`; returns the values after it."""
    entry = builder.block
    head = builder.append_basic_block("loop")
    inside = builder.append_basic_block("body")
    done = builder.append_basic_block("done")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_I64)
    index.add_incoming(_int(0), entry)
    values = [builder.phi(value.type) for value in start]
    for phi, value in zip(values, start, strict=True):
        phi.add_incoming(value, entry)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, done)
    builder.position_at_end(inside)
    after = body(index, values)
    index.add_incoming(builder.add(index, _int(1)), builder.block)
    for phi, value in zip(values, after, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(done)
    return values


def prefetch_line(builder: Any, pointer: Any, *, write: bool) -> None:
    """Ask for the cache line at a byte pointer, into all levels; any address may be asked for."""
    kind = [ir.IntType(8).as_pointer(), _I32, _I32, _I32]
    function = _function(builder, "llvm.prefetch.p0", ir.VoidType(), kind)
    options = [ir.Constant(_I32, value) for value in (int(write), 3, 1)]
    builder.call(function, [pointer, *options])


def _emit_chains(
    builder: Any, rows: int, column: int, end: int, mode: str, args: list[Any]
) -> None:
    """Chains of `rows` rows over columns [column, end)."""
    a, w, out, length, a_stride, w_stride, out_stride, ahead, ahead_stride = args
    a_rows = [builder.gep(a, [builder.mul(_int(row), a_stride)]) for row in range(rows)]
    targets = [
        builder.gep(out, [builder.add(builder.mul(_int(row), out_stride), _int(at))])
        for row in range(rows)
        for at in range(column, end, LANES)
    ]
    start = [_load(builder, p) for p in targets] if mode == "continue" else [_ZEROS] * len(targets)

    def step(k: Any, sums: list[Any]) -> list[Any]:
        base = builder.gep(w, [builder.mul(k, w_stride)])
        soon = builder.gep(ahead, [builder.mul(k, ahead_stride)])
        weights = []
        for lane in range(column, end, LANES):
            prefetch_line(builder, builder.gep(soon, [_int(4 * lane)]), write=False)
            weights.append(_load(builder, builder.gep(base, [_int(lane)])))
        values = [_splat(builder, builder.load(builder.gep(p, [k]))) for p in a_rows]
        pairs = [(value, weight) for value in values for weight in weights]
        return [emit_fma(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

    for total, target in zip(emit_loop(builder, length, start, step), targets, strict=True):
        if mode == "add":
            total = builder.fadd(_load(builder, target), total)
        _store(builder, total, target)


def _panel_product(mode: str) -> Any:
    """An intrinsic; its arguments are those of `panel` below."""
    strides = [types.int64] * 4
    signature = types.void(
        types.int64, _FLOATS, _FLOATS, _FLOATS, *strides, types.CPointer(types.uint8), types.int64
    )

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        rows, *rest = args
        done = builder.append_basic_block("rows_done")
        cases = [builder.append_basic_block(f"rows_{n + 1}") for n in range(MAX_ROWS)]
        switch = builder.switch(rows, done)
        for number, block in enumerate(cases, start=1):
            switch.add_case(_int(number), block)
            builder.position_at_end(block)
            width = PANEL if number <= _WHOLE_ROWS else LANES
            for column in range(0, PANEL, width):
                _emit_chains(builder, number, column, column + width, mode, rest)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    def panel(
        _typing: Any,
        rows: Any,
        a: Any,
        w: Any,
        out: Any,
        length: Any,
        a_stride: Any,
        w_stride: Any,
        out_stride: Any,
        ahead: Any,
        ahead_stride: Any,
    ) -> Any:
        return signature, generate

    return intrinsic(panel)


panel_add = _panel_product("add")  # chains from zero, added to out
panel_store = _panel_product("store")  # chains from zero, stored to out
panel_continue = _panel_product("continue")  # chains that go on from out


def _halves(builder: Any, value: Any, width: int) -> tuple[Any, Any]:
    undefined = ir.Constant(value.type, ir.Undefined)
    masks = (range(width // 2), range(width // 2, width))
    low, high = (
        builder.shuffle_vector(
            value, undefined, ir.Constant(ir.VectorType(_I32, width // 2), list(mask))
        )
        for mask in masks
    )
    return low, high


def _fold(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine the lanes of a vector by a fixed tree."""
    width = LANES
    while width > 1:
        value = combine(*_halves(builder, value, width))
        width //= 2
    return builder.extract_element(value, ir.Constant(_I32, 0))


def _reduction(kind: str) -> Any:
    """An intrinsic (x, num_vectors) -> float32 over 16 * num_vectors floats, in a fixed order."""
    signature = types.float32(_FLOATS, types.int64)

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, count = args

        def combine(a: Any, b: Any) -> Any:
            if kind == "max":
                return builder.select(builder.fcmp_ordered(">", a, b), a, b)
            return builder.fadd(a, b)

        def step(index: Any, totals: list[Any]) -> list[Any]:
            value = _load(builder, builder.gep(x, [builder.mul(index, _int(LANES))]))
            if kind == "squares":
                return [emit_fma(builder, value, value, totals[0])]
            return [combine(value, totals[0])]

        least = ir.Constant(_VECTOR, [float("-inf")] * LANES)
        totals = emit_loop(builder, count, [least if kind == "max" else _ZEROS], step)
        return _fold(builder, totals[0], combine)

    def reduce(_typing: Any, x: Any, num_vectors: Any) -> Any:
        return signature, generate

    return intrinsic(reduce)


vector_sum = _reduction("sum")
vector_max = _reduction("max")
sum_of_squares = _reduction("squares")
