"""Text that is not UTF-8: finding it in Arrow columns and in strings, and replacing it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import types

_SURROGATES = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\ufffd"


def repaired_column(column: pa.Array) -> tuple[pa.Array, list[int]]:
    """The column with bad bytes of its text replaced by U+FFFD, and the rows that had any."""
    try:
        column.validate(full=True)
        return column, []
    except pa.ArrowInvalid:
        pass
    plain = column.dictionary_decode() if types.is_dictionary(column.type) else column
    bad = [row for row, scalar in enumerate(plain) if _is_bad(scalar)]
    repaired = pa.concat_arrays(list(_pieces(plain, bad))) if bad else plain
    # A dictionary is made anew: a bad entry may be in it for rows of another batch.
    if plain is not column:
        repaired = repaired.dictionary_encode().cast(column.type)
    return repaired, bad


def _is_bad(scalar: pa.Scalar) -> bool:
    try:
        scalar.as_py()
    except UnicodeDecodeError:
        return True
    except (ValueError, KeyError, ArithmeticError):
        pass  # another fault of the value, which whoever needs it will report
    return False


def _pieces(column: pa.Array, bad: list[int]) -> Iterator[pa.Array]:
    begin = 0
    for row in bad:
        yield column.slice(begin, row - begin)
        yield repaired_cell(column, row)
        begin = row + 1
    yield column.slice(begin)


def repaired_cell(column: pa.Array, row: int) -> pa.Array:
    """One row of a column that is no dictionary, with bad bytes of its text replaced."""
    cell = column.slice(row, 1)
    (value,) = cell.cast(_as_bytes(cell.type)).to_pylist()
    return pa.array([_decoded(value, cell.type)], cell.type)


def _is_text(data_type: pa.DataType) -> bool:
    checks = (types.is_string, types.is_large_string, types.is_string_view)
    return any(check(data_type) for check in checks)


def _as_bytes(data_type: pa.DataType) -> pa.DataType:
    """The type with binary in the place of text, at any depth."""
    if _is_text(data_type):
        return pa.large_binary()
    if types.is_struct(data_type):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in data_type])
    if types.is_map(data_type):
        return pa.map_(
            data_type.key_field.with_type(_as_bytes(data_type.key_type)),
            data_type.item_field.with_type(_as_bytes(data_type.item_type)),
        )
    if types.is_fixed_size_list(data_type):
        return pa.list_(_as_bytes(data_type.value_type), data_type.list_size)
    if types.is_list(data_type):
        return pa.list_(_as_bytes(data_type.value_type))
    if types.is_large_list(data_type):
        return pa.large_list(_as_bytes(data_type.value_type))
    return data_type


def _decoded(value: Any, data_type: pa.DataType) -> Any:
    if value is None:
        return None
    if _is_text(data_type):
        return value.decode("utf-8", "replace")
    if types.is_struct(data_type):
        return {field.name: _decoded(value[field.name], field.type) for field in data_type}
    if types.is_map(data_type):
        key, item = data_type.key_type, data_type.item_type
        return [(_decoded(k, key), _decoded(v, item)) for k, v in value]
    if isinstance(value, list):
        return [_decoded(item, data_type.value_type) for item in value]
    return value


# ---- strings -----------------------------------------------------------------------------


def repair_values(values: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A row with lone surrogates in its text replaced, and the columns that had any.

    Lone surrogates, which UTF-8 cannot write, come from JSON escapes and from bytes decoded with
    `surrogateescape`.
    """
    whole = {without_surrogates(name): without_surrogates(value) for name, value in values.items()}
    pairs = zip(values.items(), whole.items(), strict=False)
    return whole, tuple(after[0] for before, after in pairs if before != after)


def without_surrogates(value: Any) -> Any:
    """A JSON value with each lone surrogate in its text replaced."""
    if isinstance(value, str):
        return _SURROGATES.sub(REPLACEMENT, value)
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {without_surrogates(k): without_surrogates(v) for k, v in value.items()}
    return value
