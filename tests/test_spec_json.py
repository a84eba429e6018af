"""Specs and manifests survive their way through the store."""

from __future__ import annotations

import ast
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import EngineConfig, SamplingParams
from jobs.records import InputFile, JobSpec, Manifest, SpecError, TextColumn
from jobs.specs import manifest_from_json, manifest_to_json, spec_from_json, spec_to_json
from tests.job_factories import make_spec

NUMBERS = st.floats(allow_nan=False)
NAMES = st.lists(st.text(max_size=8), max_size=3).map(tuple)
COUNTS = st.integers(-(2**70), 2**70)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | COUNTS | NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
BY_HINT: dict[str, st.SearchStrategy[Any]] = {
    "str": st.text(),
    "str | None": st.none() | st.text(),
    "bool": st.booleans(),
    "int": COUNTS,
    "int | None": st.none() | COUNTS,
    "float": NUMBERS,
    "float | None": st.none() | NUMBERS,
    "tuple[str, ...]": NAMES,
    "tuple[str | None, ...]": st.lists(st.none() | st.text(max_size=8), max_size=3).map(tuple),
    "tuple[str, ...] | None": st.none() | NAMES,
    "tuple[int, ...]": st.lists(COUNTS, max_size=3).map(tuple),
    "tuple[tuple[int, float], ...]": st.lists(st.tuples(COUNTS, NUMBERS), max_size=3).map(tuple),
    "Mapping[str, Any]": st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=3),
}


def values_of(hint: str, known: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    if not hint.startswith("Literal["):
        return known[hint]
    choices, _, optional = hint.removeprefix("Literal").partition(" | ")
    return st.sampled_from([*ast.literal_eval(choices), *([None] if optional else [])])


def records(record_type: type[Any], **nested: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Records of a type with every field set to something; `nested` has those of other types."""
    known = BY_HINT | nested
    values = {field.name: values_of(str(field.type), known) for field in fields(record_type)}
    return st.fixed_dictionaries(values).map(lambda chosen: record_type(**chosen))


SPECS = records(JobSpec, SamplingParams=records(SamplingParams), EngineConfig=records(EngineConfig))


def some(record_type: type[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(records(record_type), max_size=3).map(tuple)


MANIFESTS = records(
    Manifest,
    **{"tuple[InputFile, ...]": some(InputFile), "tuple[TextColumn, ...]": some(TextColumn)},
)


@given(SPECS)
def test_any_spec_comes_back_equal(spec: JobSpec) -> None:
    again = spec_from_json(spec_to_json(spec))
    assert again == spec
    assert spec_to_json(again) == spec_to_json(spec)


@given(MANIFESTS)
def test_any_manifest_comes_back_equal(manifest: Manifest) -> None:
    assert manifest_from_json(manifest_to_json(manifest)) == manifest


def test_fields_that_an_older_version_did_not_write_take_their_defaults() -> None:
    spec = spec_from_json('{"input": "/a", "model": "/b", "params": {"top_k": 4}}')
    assert spec == JobSpec(input="/a", model="/b", params=SamplingParams(top_k=4))


def test_the_device_of_an_older_spec_is_now_the_engines() -> None:
    text = '{"input": "/a", "model": "/b", "device": "cpu", "engine": {"sweep_tokens": 9}}'
    engine = EngineConfig(device="cpu", sweep_tokens=9)
    assert spec_from_json(text) == JobSpec(input="/a", model="/b", engine=engine)


def test_unknown_field_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(SpecError, match=r"SamplingParams has no field temprature.*temperature"):
        spec_from_json('{"input": "/a", "model": "/b", "params": {"temprature": 1}}')


def test_value_without_json_form_is_refused() -> None:
    with pytest.raises(SpecError, match="JobSpec cannot be kept as JSON"):
        spec_to_json(make_spec(template_kwargs={"when": object()}))
