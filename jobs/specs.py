"""Job specs and manifests as JSON text, there and back without loss."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from jobs.records import Fingerprint, HookTarget, JobSpec, Manifest, SpecError


def spec_to_json(spec: JobSpec) -> str:
    """Every field, defaults too, so that a later version's other defaults change nothing.

    Raises SpecError: a value has no JSON form.
    """
    return _dump(spec)


def spec_from_json(text: str) -> JobSpec:
    """The spec that `spec_to_json` of this version or an earlier one wrote.

    Fields that it lacks take their defaults.

    Raises SpecError: it holds a field that this version does not know.
    """
    values = json.loads(text)
    if "device" in values:  # before it was the engine's
        values["engine"] = {"device": values.pop("device"), **values.get("engine", {})}
    spec: JobSpec = _build(JobSpec, values)
    return spec


def manifest_to_json(manifest: Manifest) -> str:
    return _dump(manifest)


def manifest_from_json(text: str) -> Manifest:
    manifest: Manifest = _build(Manifest, json.loads(text))
    return manifest


def fingerprint_to_json(fingerprint: Fingerprint) -> str:
    return _dump(fingerprint)


def fingerprint_from_json(text: str) -> Fingerprint:
    fingerprint: Fingerprint = _build(Fingerprint, json.loads(text))
    return fingerprint


def hook_target_to_json(target: HookTarget) -> str:
    return _dump(target)


def hook_target_from_json(text: str) -> HookTarget:
    target: HookTarget = _build(HookTarget, json.loads(text))
    return target


def _dump(record: Any) -> str:
    try:
        return json.dumps(_plain(record), sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise SpecError(f"{type(record).__name__} cannot be kept as JSON: {error}") from error


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _build(record_type: Any, values: Mapping[str, Any]) -> Any:
    hints = _hints(record_type)
    for name in values:
        if name not in hints:
            close = difflib.get_close_matches(name, list(hints), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SpecError(f"{record_type.__name__} has no field {name}{hint}")
    return record_type(**{name: _restore(hints[name], value) for name, value in values.items()})


@cache
def _hints(record_type: Any) -> dict[str, Any]:
    return get_type_hints(record_type)


def _restore(hint: Any, value: Any) -> Any:
    """Give a JSON value the type of its field where JSON has none: tuples and dataclasses."""
    if value is None:
        return None
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        inner = [arg for arg in args if arg is not type(None)]
        return _restore(inner[0], value) if len(inner) == 1 else value
    if origin is tuple:
        items = [args[0]] * len(value) if args[1:] == (Ellipsis,) else args
        return tuple(_restore(item, piece) for item, piece in zip(items, value, strict=True))
    if isinstance(hint, type) and is_dataclass(hint):
        return _build(hint, value)
    return value
