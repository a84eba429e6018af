"""Which columns of the input a job uses for what."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Literal

import jinja2
import jinja2.meta
import pyarrow as pa
from jinja2.defaults import DEFAULT_NAMESPACE
from pyarrow import types

from engine import SamplingParams
from jobs.records import RESULT_COLUMNS, Binding, JobSpec, SpecError

JSON_MARK = {b"ntx_batch.json": b"1"}  # of a text column whose rows hold nested values
PARAMS_COLUMN = "sampling_params"
_PARAM_NAMES = (*(field.name for field in fields(SamplingParams)), PARAMS_COLUMN)
# Names that a prompt template may use and that are not columns.
_TEMPLATE_NAMES = {*DEFAULT_NAMESPACE, "raise_exception", "strftime_now"}


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
        _check_params_struct(schema.field(PARAMS_COLUMN))
    return spec.param_columns


def _check_params_struct(field: pa.Field) -> None:
    data_type = field.type
    if types.is_null(data_type) or is_json(field):
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
        # Results have columns of our names already, whose place is taken by this job's.
        ours = _own_names(spec) if spec.after is not None else ()
        return tuple(name for name in schema.names if name != column and name not in ours)
    for name in spec.keep:
        _must_have(schema, name, "keep")
    return tuple(name for name in schema.names if name in spec.keep)


def _refuse_clashes(spec: JobSpec, carried: Iterable[str]) -> None:
    clashes = [name for name in carried if name in _own_names(spec)]
    if clashes:
        raise SpecError(
            f"input columns {', '.join(clashes)} have names of result columns; name ours "
            "otherwise with --output-prefix, or leave them out with --keep"
        )


def _own_names(spec: JobSpec) -> set[str]:
    return {spec.output_prefix + name for name in RESULT_COLUMNS}


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


def is_json(field: pa.Field) -> bool:
    return (field.metadata or {}).get(b"ntx_batch.json") is not None


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
