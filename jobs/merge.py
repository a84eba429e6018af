"""One schema for all input files: the columns of all, each with a type that loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import types

from jobs.records import DatasetError

MAX_DECIMAL128_DIGITS, MAX_DECIMAL_DIGITS = 38, 76
_TIME_UNITS = ("s", "ms", "us")  # to ns the range shrinks


def merge_schemas(known: pa.Schema | None, new: pa.Schema, path: str | Path) -> pa.Schema:
    """`known` and the schema `new` of the file `path` as one; a column not in both is nullable.

    Types may differ where one type holds the values of both.

    Raises DatasetError: a name is there twice, or no type holds both.
    """
    _refuse_double_names(new, path)
    if known is None:
        return new
    merged = [_merge_field(field, new, path) for field in known]
    more = [field.with_nullable(True) for field in new if field.name not in known.names]
    return pa.schema([*merged, *more])


def _refuse_double_names(schema: pa.Schema, path: str | Path) -> None:
    if len(set(schema.names)) < len(schema.names):
        double = next(name for name in schema.names if schema.names.count(name) > 1)
        raise DatasetError(f"input file {path} has more than one column named {double!r}")


def _merge_field(field: pa.Field, schema: pa.Schema, path: str | Path) -> pa.Field:
    if field.name not in schema.names:
        return field.with_nullable(True)
    other = schema.field(field.name)
    merged = merge_types(field.type, other.type)
    if merged is None:
        raise DatasetError(
            f"input file {path}: column {field.name!r} is {other.type}, in the files before it is "
            f"{field.type}, and no type holds both without loss; write them with one type"
        )
    return field.with_type(merged).with_nullable(field.nullable or other.nullable)


def merge_types(known: pa.DataType, new: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both without loss; None where there is none."""
    if known.equals(new) or types.is_null(new):
        return known
    if types.is_null(known):
        return new
    if types.is_dictionary(known) or types.is_dictionary(new):
        return merge_types(_without_dictionary(known), _without_dictionary(new))
    for merge in (_merge_numbers, _merge_decimals, _merge_times, _merge_bytes, _merge_nested):
        merged = merge(known, new)
        if merged is not None:
            return merged
    return None


def _without_dictionary(data_type: pa.DataType) -> pa.DataType:
    return data_type.value_type if types.is_dictionary(data_type) else data_type


# ---- scalars -----------------------------------------------------------------------------


def _digits(data_type: pa.DataType) -> int:
    """Bits of the whole numbers that a number type holds exactly, without the sign."""
    if types.is_floating(data_type):
        return {16: 11, 32: 24, 64: 53}[int(data_type.bit_width)]
    return int(data_type.bit_width) - bool(types.is_signed_integer(data_type))


def _is_number(data_type: pa.DataType) -> bool:
    return bool(types.is_integer(data_type) or types.is_floating(data_type))


def _merge_numbers(known: pa.DataType, new: pa.DataType) -> pa.DataType | None:
    if not (_is_number(known) and _is_number(new)):
        return None
    digits = max(_digits(known), _digits(new))
    either = (known, new)
    if any(types.is_floating(kind) for kind in either):
        choices: Sequence[pa.DataType] = (pa.float16(), pa.float32(), pa.float64())
    elif all(types.is_unsigned_integer(kind) for kind in either):
        choices = (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
    else:
        choices = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
    return next((choice for choice in choices if _digits(choice) >= digits), None)


def _merge_decimals(known: pa.DataType, new: pa.DataType) -> pa.DataType | None:
    if not (types.is_decimal(known) and types.is_decimal(new)):
        return None
    scale = max(known.scale, new.scale)
    precision = scale + max(known.precision - known.scale, new.precision - new.scale)
    if precision > MAX_DECIMAL_DIGITS:
        return None
    make = pa.decimal128 if precision <= MAX_DECIMAL128_DIGITS else pa.decimal256
    return make(precision, scale)


def _merge_times(known: pa.DataType, new: pa.DataType) -> pa.DataType | None:
    if not (types.is_timestamp(known) and types.is_timestamp(new)) or known.tz != new.tz:
        return None
    if known.unit not in _TIME_UNITS or new.unit not in _TIME_UNITS:
        return None
    return pa.timestamp(max(known.unit, new.unit, key=_TIME_UNITS.index), known.tz)


def _merge_bytes(known: pa.DataType, new: pa.DataType) -> pa.DataType | None:
    text = (types.is_string, types.is_large_string, types.is_string_view)
    binary = (types.is_binary, types.is_large_binary, types.is_binary_view)
    for checks, merged in ((text, pa.large_string()), (binary, pa.large_binary())):
        if all(any(check(kind) for check in checks) for kind in (known, new)):
            return merged
    return None


# ---- nested types ------------------------------------------------------------------------


def _merge_nested(known: pa.DataType, new: pa.DataType) -> pa.DataType | None:
    if known.id != new.id:
        return None
    if types.is_struct(known):
        return _merge_structs(known, new)
    if types.is_map(known):
        key = merge_types(known.key_type, new.key_type)
        item = _merge_items(known.item_field, new.item_field)
        return None if key is None or item is None else pa.map_(key, item)
    if types.is_fixed_size_list(known) and known.list_size != new.list_size:
        return None
    if not (types.is_list(known) or types.is_large_list(known) or types.is_fixed_size_list(known)):
        return None
    item = _merge_items(known.value_field, new.value_field)
    if item is None:
        return None
    if types.is_fixed_size_list(known):
        return pa.list_(item, known.list_size)
    return pa.large_list(item) if types.is_large_list(known) else pa.list_(item)


def _merge_items(known: pa.Field, new: pa.Field) -> pa.Field | None:
    merged = merge_types(known.type, new.type)
    nullable = known.nullable or new.nullable
    return None if merged is None else known.with_type(merged).with_nullable(nullable)


def _merge_structs(known: pa.DataType, new: pa.DataType) -> pa.DataType | None:
    """Fields of either; one that only one of them has is nullable."""
    names = dict.fromkeys(field.name for field in (*known, *new))
    fields = []
    for name in names:
        mine, other = (kind.get_field_index(name) for kind in (known, new))
        if mine < 0 or other < 0:
            field = known.field(mine) if other < 0 else new.field(other)
            fields.append(field.with_nullable(True))
            continue
        merged = _merge_items(known.field(mine), new.field(other))
        if merged is None:
            return None
        fields.append(merged)
    return pa.struct(fields)
