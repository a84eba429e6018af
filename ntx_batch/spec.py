"""Keyword options, as people give them, to a JobSpec; every contradiction among them by name."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from typing import Any

from engine import EngineConfig, RowError, SamplingParams
from engine.params import params_from_mapping
from jobs.records import JobSpec, SpecError
from jobs.uris import absolute, is_uri, mask

SAMPLING_OPTIONS = tuple(f.name for f in fields(SamplingParams) if f.name != "seed")
ENGINE_OPTIONS = {
    "device": "device",
    "kv_type": "kv_type",
    "memory": "memory_nbytes",
    "host_memory": "host_memory_nbytes",
    "host_kv": "host_kv",
    "ring_memory": "ring_nbytes",
    "reader": "reader",
    "kv_memory": "kv_memory_nbytes",
    "sweep_tokens": "sweep_tokens",
    "expand": "expand",
    "threads": "num_threads",
    "pre_tokenizer": "pre_tokenizer",
    "reuse": "reuse_prefixes",
}
JOB_OPTIONS = (
    "after",
    "after_errors",
    "output",
    "prompt_column",
    "messages_column",
    "prompt_template",
    "chat",
    "system",
    "chat_template",
    "template_kwargs",
    "encoding",
    "delimiter",
    "on_bad_utf8",
    "param_columns",
    "keep",
    "output_prefix",
    "limit",
    "samples",
    "dedupe",
    "truncate",
    "seed",
    "max_errors",
    "row_timeout",
    "verify",
    "engines",
)
KNOWN_OPTIONS = (*JOB_OPTIONS, *ENGINE_OPTIONS, *SAMPLING_OPTIONS)

CHOICES = {
    "after_errors": ("skip", "fail", "pass"),
    "truncate": ("left", "right"),
    "on_bad_utf8": ("error", "replace"),
    "device": ("auto", "cpu", "gpu"),
    "kv_type": ("f32", "f16", "int8"),
    "host_kv": ("auto", "never"),
    "expand": ("auto", "never", "always"),
    "reader": ("auto", "direct", "mmap"),
}
MAX_SAMPLES = 10_000
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b|b|)\s*", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def build_spec(input: str | Path | None, *, model: str | Path, **options: Any) -> JobSpec:
    """Build the spec of a job from the options of `ntx-batch submit`, dashes as underscores.

    input, model: paths, or a URI for the input; the spec holds them absolute; no input is for
        `after`, whose job says where it is
    options: any of KNOWN_OPTIONS; None is the same as leaving it out

    Raises SpecError: an unknown option, a value of the wrong kind, or two that exclude each other.
    """
    _refuse_unknown(options)
    given = {name: _parse(name, value) for name, value in options.items() if value is not None}
    engine = {ENGINE_OPTIONS[name]: given.pop(name) for name in ENGINE_OPTIONS if name in given}
    params = {name: given.pop(name) for name in SAMPLING_OPTIONS if name in given}
    if "row_timeout" in given:
        given["row_timeout_s"] = given.pop("row_timeout")
    spec = JobSpec(
        input="" if input is None else absolute(input),
        model=_model(model),
        params=_params(params),
        engine=EngineConfig(**engine),
        **given,
    )
    _refuse_contradictions(spec)
    return spec


def _params(values: Mapping[str, Any]) -> SamplingParams:
    try:
        return params_from_mapping(SamplingParams(), values)
    except RowError as error:
        raise SpecError(str(error)) from None


def parse_size(text: str | int) -> int:
    """Bytes of "8GiB", "500MB" or "4096"; KiB to TiB are powers of 1024, KB to TB of 1000."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise SpecError(f"{text!r} is not a size; write it like 8GiB, 500MB or 4096 (bytes)")
    number, unit = match.groups()
    return int(float(number) * _UNITS[unit.lower()])


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint to append: the known name that is close to `name`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in KNOWN_OPTIONS:
            raise SpecError(f"there is no option {name}{nearest(name, KNOWN_OPTIONS)}")


def _parse(name: str, value: Any) -> Any:
    if name in CHOICES:
        return _choice(name, value)
    if name in _PARSERS:
        return _PARSERS[name](name, value)
    return value


def _choice(name: str, value: Any) -> str:
    if value not in CHOICES[name]:
        raise SpecError(f"{name} is one of {', '.join(CHOICES[name])}, not {value!r}")
    return str(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SpecError(f"{name} is a text, not {value!r}")
    return value


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise SpecError(f"{name} is a whole number, not {value!r}")
    return int(value)


def _count(name: str, value: Any) -> int:
    number = _integer(name, value)
    if number < 1:
        raise SpecError(f"{name} is at least 1, not {number}")
    return number


def _samples(name: str, value: Any) -> int:
    number = _count(name, value)
    if number > MAX_SAMPLES:
        raise SpecError(f"{name} is at most {MAX_SAMPLES}, not {number}")
    return number


def _seed(name: str, value: Any) -> int:
    number = _integer(name, value)
    if not -(2**63) <= number < 2**63:
        raise SpecError(f"{name} is an integer of 64 bits, not {number}")
    return number


def _max_errors(name: str, value: Any) -> str:
    """A number of rows, or a share of them such as 5%."""
    text = str(value).strip()
    if re.fullmatch(r"\d+", text):
        return text
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    if share is None or float(share[1]) > 100:
        raise SpecError(f"{name} is a number of rows like 10, or a share like 5%, not {value!r}")
    return f"{share[1]}%"


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SpecError(f"{name} is more than 0 seconds, not {value!r}")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SpecError(f"{name} is true or false, not {value!r}")
    return value


def _path(name: str, value: Any) -> str:
    return absolute(value)


def _model(path: str | Path) -> str:
    place = absolute(path)
    if is_uri(place):
        raise SpecError(
            f"model {mask(place)} is in a store: weights are read again and again from a local "
            "disk; copy the file there and name that"
        )
    return place


def _nbytes(name: str, value: Any) -> int:
    try:
        nbytes = parse_size(value)
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from None
    if nbytes < 1:
        raise SpecError(f"{name} is more than 0 bytes, not {value!r}")
    return nbytes


def _budget(name: str, value: Any) -> int | None:
    """Bytes; None for "auto", which is what is free."""
    return None if value == "auto" else _nbytes(name, value)


def _engines(name: str, value: Any) -> int | None:
    """A number; None for "auto"."""
    if value == "auto":
        return None
    return _count(name, int(value) if isinstance(value, str) and value.isdecimal() else value)


def _names(name: str, value: Any) -> tuple[str, ...]:
    """Column names, from a list or from "a,b"."""
    names = value.split(",") if isinstance(value, str) else value
    return tuple(str(column).strip() for column in names if str(column).strip())


def _token_ids(name: str, value: Any) -> Any:
    """A list of ids out of "2,5"; anything else is left to the parameter's own rules."""
    if not isinstance(value, str):
        return value
    try:
        return [int(item) for item in value.split(",")]
    except ValueError:
        raise SpecError(f"{name} is a list of token ids such as 2,5, not {value!r}") from None


def _logit_bias(name: str, value: Any) -> Any:
    return _json_object(name, value) if isinstance(value, str) else value


def _json_object(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    try:
        parsed = json.loads(value)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{name} is not JSON: {error}; given was {value!r}") from None
    if not isinstance(parsed, dict):
        raise SpecError(f'{name} is a JSON object like {{"key": 1}}, not {value!r}')
    return parsed


def _template(name: str, value: Any) -> str:
    """Template text: a path object or "@FILE" is read, anything else is the text itself."""
    if isinstance(value, str) and not value.startswith("@"):
        return value
    path = Path(value[1:] if isinstance(value, str) else value)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{name}: cannot read {path}: {error}") from None


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "after": _text,
    "output": _path,
    "prompt_column": _text,
    "messages_column": _text,
    "prompt_template": _template,
    "chat": _flag,
    "system": _text,
    "chat_template": _template,
    "template_kwargs": _json_object,
    "encoding": _text,
    "delimiter": _text,
    "param_columns": _names,
    "keep": _names,
    "output_prefix": _text,
    "limit": _count,
    "samples": _samples,
    "dedupe": _flag,
    "seed": _seed,
    "max_errors": _max_errors,
    "row_timeout": _seconds,
    "verify": _flag,
    "memory": _budget,
    "host_memory": _budget,
    "ring_memory": _nbytes,
    "kv_memory": _nbytes,
    "sweep_tokens": _count,
    "threads": _count,
    "engines": _engines,
    "pre_tokenizer": _text,
    "reuse": _flag,
    "stop_token_ids": _token_ids,
    "logit_bias": _logit_bias,
}


def _refuse_contradictions(spec: JobSpec) -> None:
    sources = ("prompt_column", "messages_column", "prompt_template")
    chosen = [name for name in sources if getattr(spec, name) is not None]
    if len(chosen) > 1:
        raise SpecError(f"{' and '.join(chosen)} exclude each other: give the one to use")
    if spec.messages_column is not None and spec.chat:
        raise SpecError(
            "chat wraps plain prompts; messages use the chat template anyway: drop chat"
        )
    if spec.system is not None and not spec.chat:
        raise SpecError("system is the system message that chat puts before a prompt: add chat")
    rows_differ = {"temperature", "sampling_params"} & set(spec.param_columns)
    if spec.samples > 1 and spec.params.temperature == 0 and not rows_differ:
        raise SpecError(
            f"{spec.samples} samples of a row would all be the same, since temperature 0 takes the "
            "most likely token each time: give a temperature, such as 0.8, or drop samples"
        )
    if spec.after is not None and (spec.encoding is not None or spec.delimiter is not None):
        raise SpecError(
            "encoding and delimiter are for CSV files; with after, the input is a job's results"
        )
    if spec.engine.device == "cpu" and spec.engine.host_memory_nbytes is not None:
        raise SpecError(
            "host_memory is memory beside a GPU; on a CPU, memory bounds all: drop host_memory"
        )
