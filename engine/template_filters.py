"""Jinja's filters and tests, each of which asks the budget first and pays for its result."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from engine.template_limits import (
    LimitError,
    budget,
    check_join,
    check_percent,
    check_replace,
    check_width,
)

# Random, or dear to run and of no use in a prompt.
LEFT_OUT_FILTERS = ("random", "urlize", "xmlattr", "wordwrap", "pprint", "striptags")
# Names that no template can write, for the filters that the rewriting puts in.
TICKING, MEASURED, CONCAT = " ticking", " measured", " concat"


def paid_filters(filters: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Jinja's own filters, `tojson` as Hugging Face has it, and those of the rewriting."""
    kept = {name: f for name, f in filters.items() if name not in LEFT_OUT_FILTERS}
    kept["tojson"] = _to_json
    paid = {name: _paid_filter(name, function) for name, function in kept.items()}
    return paid | {TICKING: _ticking, MEASURED: _measured, CONCAT: _concat}


def paid_tests(tests: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _paid_test(function) for name, function in tests.items()}


def _ticking(items: Any) -> Any:
    return budget().ticking(items)


def _measured(value: Any) -> Any:
    return budget().measured(value)


def _concat(values: list[Any]) -> str:
    budget().spend(budget().weigh(values))
    return "".join(map(str, values))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in Hugging Face's templates: plain JSON, nothing escaped for HTML."""
    check_width(100 * (indent or 0))
    budget().weigh(value)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _paid_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that asks the budget first and pays for its result."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def paid(*args: Any, **kwargs: Any) -> Any:
        value = args[first]
        options = (*args[first + 1 :], *kwargs.values())
        if name == "join":
            value = list(budget().ticking(value))
        elif hasattr(value, "__next__"):
            value = budget().ticking(value)
        _check_filter(name, value, options)
        return budget().measured(function(*args[:first], value, *args[first + 1 :], **kwargs))

    return paid


def _check_filter(name: str, value: Any, options: tuple[Any, ...]) -> None:
    match name:
        case "center" | "batch" | "slice" | "round":
            check_width(*options)
        case "indent":
            check_width(*options)
            widths = [len(option) if isinstance(option, str) else option for option in options]
            budget().spend(len(str(value)) + (str(value).count("\n") + 1) * max([4, *widths]))
        case "replace" if len(options) >= 2:
            check_replace(str(value), options[0], options[1])
        case "format":
            check_percent(value, options)
        case "join":
            check_join(options[0] if options else "", value)
        case "string" | "e" | "escape" | "forceescape" | "safe":
            budget().weigh(value)
        case "sum" if any(isinstance(option, list | tuple | dict) for option in options):
            raise LimitError("sum adds up numbers only")


def _paid_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def paid(*args: Any, **kwargs: Any) -> Any:
        budget().tick()
        return function(*args, **kwargs)

    return paid
