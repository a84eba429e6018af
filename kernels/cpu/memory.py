"""Typed reads and writes through pointers, without Numba's checks for negative indices."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.vector import prefetch_line

FLOATS = types.CPointer(types.float32)
BYTES = types.CPointer(types.uint8)


def _reader(result: Any, source: Any, decode: Any) -> Any:
    """An intrinsic (pointer, byte offset) -> number, read from unaligned memory."""
    signature = result(BYTES, types.int64)

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.bitcast(builder.gep(args[0], [args[1]]), source.as_pointer())
        value = builder.load(pointer)
        value.align = 1
        return decode(builder, value)

    def read(_typing: Any, pointer: Any, offset: Any) -> Any:
        return signature, generate

    return intrinsic(read)


def _from_half(builder: Any, bits: Any) -> Any:
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())


def _from_bfloat(builder: Any, bits: Any) -> Any:
    wide = builder.shl(builder.zext(bits, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
    return builder.bitcast(wide, ir.FloatType())


_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
half_at = _reader(types.float32, _I16, _from_half)
bfloat_at = _reader(types.float32, _I16, _from_bfloat)
float_at = _reader(types.float32, ir.FloatType(), lambda _builder, value: value)


def _get(_typing: Any, pointer: Any, index: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(builder.gep(args[0], [args[1]]))

    return pointer.dtype(pointer, types.int64), generate


def _put(_typing: Any, pointer: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store(args[2], builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(pointer, types.int64, pointer.dtype), generate


def _advance(_typing: Any, pointer: Any, count: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.int64), generate


def _pointer(_typing: Any, array: Any, offset: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.gep(view.data, [args[1]])

    return types.CPointer(array.dtype)(array, types.int64), generate


def _bytes_of(_typing: Any, pointer: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I8.as_pointer())

    return BYTES(pointer), generate


def _prefetch_to_write(_typing: Any, pointer: Any, index: Any) -> Any:
    """Ask for the cache line of pointer[index], which will be written."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        element = builder.gep(args[0], [args[1]])
        prefetch_line(builder, builder.bitcast(element, _I8.as_pointer()), write=True)
        return context.get_dummy_value()

    return types.void(pointer, types.int64), generate


def _pointer_to(kind: Any) -> Any:
    def convert(_typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return kind(types.int64), generate

    return intrinsic(convert)


get = intrinsic(_get)  # (pointer, index) -> pointer[index]
put = intrinsic(_put)  # (pointer, index, value): pointer[index] = value
advance = intrinsic(_advance)  # (pointer, count) -> pointer + count
pointer = intrinsic(_pointer)  # (array, flat index) -> pointer to that element
bytes_of = intrinsic(_bytes_of)  # (pointer) -> byte pointer
prefetch_to_write = intrinsic(_prefetch_to_write)  # (pointer, index)
floats_at = _pointer_to(FLOATS)  # (address) -> float32 pointer
bytes_at = _pointer_to(BYTES)  # (address) -> byte pointer


def _bits_to_float(_typing: Any, bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


bits_to_float = intrinsic(_bits_to_float)


def _store_value(_typing: Any, pointer: Any, index: Any, value: Any) -> Any:
    """pointer[index] = value, as float32 or, through a uint16 pointer, as a rounded half."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = args[2]
        if signature.args[0].dtype == types.uint16:
            element = builder.bitcast(builder.fptrunc(element, ir.HalfType()), _I16)
        builder.store(element, builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.float32), generate


def _load_value(_typing: Any, pointer: Any, index: Any) -> Any:
    def generate(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = builder.load(builder.gep(args[0], [args[1]]))
        return _from_half(builder, element) if signature.args[0].dtype == types.uint16 else element

    return types.float32(pointer, types.int64), generate


store_value = intrinsic(_store_value)
load_value = intrinsic(_load_value)
