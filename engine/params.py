"""Sampling parameters: per-row values by name, and their types and ranges.

RowError("invalid_parameter")   names the parameter, its value and what is allowed
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from engine.requests import RowError, SamplingParams

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a parameter is read, which values of it are allowed, and that in words."""

    read: Callable[[Any], Any]
    allowed: str
    check: Callable[[Any], bool] = lambda _: True


def validate_params(params: SamplingParams, num_tokens: int) -> None:
    """Check types and ranges, for a vocabulary of `num_tokens` tokens.

    Raises RowError("invalid_parameter").
    """
    for name, rule in _RULES.items():
        value = getattr(params, name)
        if value is None and name in _OPTIONAL:
            continue
        _check(name, value, _read(name, value), rule)
    if params.min_tokens > params.max_tokens:
        raise _refusal(
            "min_tokens", params.min_tokens, f"an integer from 0 to max_tokens, {params.max_tokens}"
        )
    biased = tuple(token_id for token_id, _ in params.logit_bias)
    for name, token_ids in (("logit_bias", biased), ("stop_token_ids", params.stop_token_ids)):
        for token_id in token_ids:
            if not 0 <= token_id < num_tokens:
                raise _refusal(name, token_id, f"token ids from 0 to {num_tokens - 1}")


def params_from_mapping(base: SamplingParams, values: Mapping[str, Any]) -> SamplingParams:
    """`base` with the values of a row by parameter name; None keeps the base's value.

    Numbers are not read from text and booleans are no numbers; 40.0 is the integer 40. `stop` is
    a text or a list of them, `logit_bias` a mapping of token id (int or decimal text) to value,
    where None means absent, or a list of such pairs.

    Raises RowError("invalid_parameter") for an unknown name or a value of the wrong type or
    range. What depends on the vocabulary is left to `validate_params`.
    """
    changes = {}
    for name, value in values.items():
        if name not in _RULES:
            raise RowError("invalid_parameter", _unknown(name))
        if value is not None:
            changes[name] = _read(name, value)
            _check(name, value, changes[name], _RULES[name])
    return replace(base, **changes)


def _read(name: str, value: Any) -> Any:
    try:
        return _RULES[name].read(value)
    except (TypeError, ValueError, OverflowError, UnicodeEncodeError) as error:
        raise _refusal(name, value, _RULES[name].allowed) from error


def _check(name: str, value: Any, read: Any, rule: _Rule) -> None:
    if not rule.check(read):
        raise _refusal(name, value, rule.allowed)


def _refusal(name: str, value: Any, allowed: str) -> RowError:
    shown = repr(value)
    shown = shown if len(shown) <= 100 else shown[:97] + "..."
    return RowError("invalid_parameter", f"{name} is {shown}; it must be {allowed}")


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, _RULES, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_RULES)}"
    return f"unknown sampling parameter {name!r}; {hint}"


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(value)
    if isinstance(value, Integral):
        return int(value)
    if not float(value).is_integer():
        raise ValueError(value)
    return int(float(value))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(value)
    return value


def _texts(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(text)
        text.encode()
    return texts


def _integers(value: Any) -> tuple[int, ...]:
    if isinstance(value, Mapping | str | bytes):
        raise TypeError(value)
    return tuple(_integer(item) for item in value)


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    if isinstance(value, str | bytes):
        raise TypeError(value)
    pairs = value.items() if isinstance(value, Mapping) else value
    present = [(token_id, bias) for token_id, bias in pairs if bias is not None]
    return tuple((_token_id(token_id), _number(bias)) for token_id, bias in present)


def _token_id(value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    return _integer(value)


_COUNT = _Rule(_integer, "an integer from 0 up", lambda n: n >= 0)
_FINITE = _Rule(_number, "a finite number")
_FLAG = _Rule(_flag, "true or false")

_RULES: dict[str, _Rule] = {
    "max_tokens": _Rule(_integer, "an integer from 1 up", lambda n: n >= 1),
    "min_tokens": _COUNT,
    "temperature": _Rule(_number, "a number from 0 (greedy) to 1000", lambda t: 0 <= t <= 1000),
    "top_k": _Rule(_integer, "an integer from 0 (keeps all) up", lambda k: 0 <= k < 2**31),
    "top_p": _Rule(_number, "a number above 0, up to 1 (keeps all)", lambda p: 0 < p <= 1),
    "min_p": _Rule(_number, "a number from 0 (keeps all) to 1", lambda p: 0 <= p <= 1),
    "repetition_penalty": _Rule(_number, "a number above 0 (1 is none)", lambda p: p > 0),
    "presence_penalty": _FINITE,
    "frequency_penalty": _FINITE,
    "stop": _Rule(_texts, "a text or a list of texts, none of them empty", lambda s: "" not in s),
    "stop_token_ids": _Rule(_integers, "a list of token ids"),
    "include_stop": _FLAG,
    "ignore_eos": _FLAG,
    "seed": _Rule(_integer, "an integer of 64 bits", lambda n: -(2**63) <= n < 2**63),
    "logit_bias": _Rule(_bias, "finite numbers by token id"),
    "logprobs": _Rule(
        _integer, f"an integer from 0 to {MAX_LOGPROBS}", lambda n: 0 <= n <= MAX_LOGPROBS
    ),
}
_OPTIONAL = ("seed", "logprobs")
assert set(_RULES) == {field.name for field in fields(SamplingParams)}
