"""Columns of the input: one schema for all files, and which columns a job uses for what."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Literal

import jinja2
import jinja2.meta
import pyarrow as pa
from jinja2.defaults import DEFAULT_NAMESPACE
from pyarrow import types

from engine import SamplingParams
from jobs.records import RESULT_COLUMNS, Binding, DatasetError, JobSpec, SpecError

PARAMS_COLUMN = "sampling_params"
_PARAM_NAMES = (*(field.name for field in fields(SamplingParams)), PARAMS_COLUMN)
# Names that a prompt template may use and that are not columns.
_TEMPLATE_NAMES = {*DEFAULT_NAMESPACE, "raise_exception", "strftime_now"}


# ---- binding -----------------------------------------------------------------------------


def bind_columns(spec: JobSpec, schema: pa.Schema) -> Binding:
    """Decide which columns hold prompts and parameters and which are carried to the results.

    Raises SpecError: a named column is not there or has a type that cannot serve; `prompt` and
        `messages` are both there and the spec does not choose; a carried column has the name of
        one of ours.
    """
    source, column = _prompt_source(spec, schema)
    binding = Binding(
        source=source,
        column=column,
        template_columns=_template_columns(spec, schema) if source == "template" else (),
        params=_param_columns(spec, schema),
        carried=_carried_columns(spec, schema, column),
    )
    _refuse_clashes(spec, binding.carried)
    return binding


def _prompt_source(
    spec: JobSpec, schema: pa.Schema
) -> tuple[Literal["prompt", "messages", "template"], str]:
    if spec.prompt_template is not None:
        return "template", ""
    if spec.prompt_column is not None:
        _must_have(schema, spec.prompt_column, "prompt_column")
        return "prompt", _must_be_text(schema, spec.prompt_column)
    if spec.messages_column is not None:
        _must_have(schema, spec.messages_column, "messages_column")
        return "messages", _must_be_messages(schema, spec.messages_column)
    if "prompt" in schema.names and "messages" in schema.names:
        raise SpecError(
            f"{spec.input} has a prompt and a messages column; choose one with --prompt-column "
            "or --messages-column"
        )
    if "prompt" in schema.names:
        return "prompt", _must_be_text(schema, "prompt")
    if "messages" in schema.names:
        return "messages", _must_be_messages(schema, "messages")
    raise SpecError(
        f"{spec.input} has no prompt or messages column, only {', '.join(schema.names)}; name one "
        "with --prompt-column or --messages-column, or build prompts with --prompt-template"
    )


def _template_columns(spec: JobSpec, schema: pa.Schema) -> tuple[str, ...]:
    assert spec.prompt_template is not None
    parser = jinja2.Environment(autoescape=False, extensions=["jinja2.ext.loopcontrols"])
    try:
        used = jinja2.meta.find_undeclared_variables(parser.parse(spec.prompt_template))
    except jinja2.TemplateSyntaxError as error:
        raise SpecError(f"prompt_template, line {error.lineno}: {error.message}") from error
    for name in sorted(used - _TEMPLATE_NAMES):
        _must_have(schema, name, "prompt_template")
    return tuple(name for name in schema.names if name in used)


def _param_columns(spec: JobSpec, schema: pa.Schema) -> tuple[str, ...]:
    for name in spec.param_columns:
        _must_have(schema, name, "param_columns")
        if name not in _PARAM_NAMES:
            raise SpecError(
                f"param_columns: {name} is not a sampling parameter{_nearest(name, _PARAM_NAMES)}"
            )
    if PARAMS_COLUMN in spec.param_columns:
        _check_params_struct(schema.field(PARAMS_COLUMN).type)
    return spec.param_columns


def _check_params_struct(data_type: pa.DataType) -> None:
    if types.is_null(data_type):
        return
    if not types.is_struct(data_type):
        raise SpecError(
            f"column {PARAMS_COLUMN} is {data_type}; it must be a struct with a field for each "
            "sampling parameter"
        )
    for idx in range(data_type.num_fields):
        name = data_type.field(idx).name
        if name not in _PARAM_NAMES or name == PARAMS_COLUMN:
            raise SpecError(
                f"column {PARAMS_COLUMN} has a field {name}, which is not a sampling parameter"
                f"{_nearest(name, _PARAM_NAMES)}"
            )


def _carried_columns(spec: JobSpec, schema: pa.Schema, column: str) -> tuple[str, ...]:
    if spec.keep is None:
        return tuple(name for name in schema.names if name != column)
    for name in spec.keep:
        _must_have(schema, name, "keep")
    return tuple(name for name in schema.names if name in spec.keep)


def _refuse_clashes(spec: JobSpec, carried: Iterable[str]) -> None:
    ours = {spec.output_prefix + name for name in RESULT_COLUMNS}
    clashes = [name for name in carried if name in ours]
    if clashes:
        raise SpecError(
            f"input columns {', '.join(clashes)} have names of result columns; name ours "
            "otherwise with --output-prefix, or leave them out with --keep"
        )


def _must_have(schema: pa.Schema, name: str, option: str) -> None:
    if name not in schema.names:
        raise SpecError(
            f"{option}: the input has no column {name}{_nearest(name, schema.names)}; it has "
            f"{', '.join(schema.names)}"
        )


def _must_be_text(schema: pa.Schema, name: str) -> str:
    data_type = schema.field(name).type
    if not _is_text(data_type):
        hint = "--messages-column" if _is_messages(data_type) else "--prompt-column"
        raise SpecError(f"column {name} is {data_type}, a prompt is text; see {hint}")
    return name


def _must_be_messages(schema: pa.Schema, name: str) -> str:
    data_type = schema.field(name).type
    if not (_is_messages(data_type) or _is_text(data_type)):
        raise SpecError(
            f"column {name} is {data_type}; messages are lists of structs with role and content, "
            "or JSON text of such a list"
        )
    return name


def _is_text(data_type: pa.DataType) -> bool:
    if types.is_dictionary(data_type):
        return _is_text(data_type.value_type)
    checks = (
        types.is_null,
        types.is_string,
        types.is_large_string,
        types.is_string_view,
        types.is_binary,
        types.is_large_binary,
        types.is_binary_view,
    )
    return any(check(data_type) for check in checks)


def _is_messages(data_type: pa.DataType) -> bool:
    if not (
        types.is_list(data_type)
        or types.is_large_list(data_type)
        or types.is_fixed_size_list(data_type)
    ):
        return False
    item = data_type.value_type
    return any(check(item) for check in (types.is_struct, types.is_map, types.is_null))


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


# ---- one schema for all files ------------------------------------------------------------


def merge_schemas(known: pa.Schema | None, new: pa.Schema, path: Path) -> pa.Schema:
    """`known` with what is nullable in `new`, the schema of the file `path`, made nullable.

    Raises DatasetError: a column is missing, additional, double, or of another type.
    """
    _refuse_double_names(new, path)
    if known is None:
        return new
    merged = [_merge_fields(field, new, path) for field in known]
    more = [name for name in new.names if name not in known.names]
    if more:
        raise DatasetError(f"input file {path} has column {more[0]!r}, the files before do not")
    return pa.schema(merged)


def _refuse_double_names(schema: pa.Schema, path: Path) -> None:
    if len(set(schema.names)) < len(schema.names):
        double = next(name for name in schema.names if schema.names.count(name) > 1)
        raise DatasetError(f"input file {path} has more than one column named {double!r}")


def _merge_fields(field: pa.Field, schema: pa.Schema, path: Path) -> pa.Field:
    if field.name not in schema.names:
        raise DatasetError(f"input file {path} lacks column {field.name!r} of the files before")
    other = schema.field(field.name)
    merged = _merge_types(field.type, other.type)
    if merged is None:
        raise DatasetError(
            f"input file {path}: column {field.name!r} is {other.type}, in the files before it is "
            f"{field.type}; write them with one type"
        )
    return field.with_type(merged).with_nullable(field.nullable or other.nullable)


def _merge_types(known: pa.DataType, new: pa.DataType) -> pa.DataType | None:
    """The type that holds both, where they differ in nullability of nested fields; else None."""
    if known.equals(new):
        return known
    if known.id != new.id or not known.num_fields or known.num_fields != new.num_fields:
        return None
    if types.is_fixed_size_list(known) and known.list_size != new.list_size:
        return None
    merged = []
    for mine, other in zip(_child_fields(known), _child_fields(new), strict=True):
        child = _merge_types(mine.type, other.type)
        if child is None or (types.is_struct(known) and mine.name != other.name):
            return None
        merged.append(mine.with_type(child).with_nullable(mine.nullable or other.nullable))
    return _rebuild(known, merged)


def _child_fields(data_type: pa.DataType) -> list[pa.Field]:
    if types.is_map(data_type):
        return [data_type.key_field, data_type.item_field]
    return [data_type.field(idx) for idx in range(data_type.num_fields)]


def _rebuild(data_type: pa.DataType, children: list[pa.Field]) -> pa.DataType | None:
    if types.is_struct(data_type):
        return pa.struct(children)
    if types.is_map(data_type):
        return pa.map_(children[0], children[1], keys_sorted=data_type.keys_sorted)
    if types.is_fixed_size_list(data_type):
        return pa.list_(children[0], data_type.list_size)
    if types.is_list(data_type):
        return pa.list_(children[0])
    if types.is_large_list(data_type):
        return pa.large_list(children[0])
    return None
