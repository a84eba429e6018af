"""Bounds on what a template may cost: steps, characters made, size of a value, time.

Nothing here needs a signal or another process. Each step of a template that can repeat or grow
something asks first, so a hostile template is stopped from inside, in whatever thread it runs.
"""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jinja2.utils import Namespace

MAX_WIDTH = 10_000
MAX_INT_BITS = 1 << 14
WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-#0 +]*(\*|\d{5,}|\d*\.(\*|\d{5,}))")
WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\{|\d{5,})")


class LimitError(Exception):
    """A template passes one of its limits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateLimits:
    """What compiling or rendering a template once may use.

    max_source_chars: of the template itself
    max_steps: loop rounds, calls, filters, and elements of values that are measured
    max_chars: characters of all strings made on the way
    max_value_size: characters and elements of any one value, the output included
    timeout_s: seconds
    """

    max_source_chars: int = 1 << 18
    max_steps: int = 2_000_000
    max_chars: int = 1 << 27
    max_value_size: int = 1 << 23
    timeout_s: float = 5.0


class Budget:
    """What is left of a template's limits."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._steps = limits.max_steps
        self._chars = limits.max_chars
        self._deadline = time.monotonic() + limits.timeout_s

    def tick(self) -> None:
        """Pay for one step. Raises LimitError."""
        self._steps -= 1
        if self._steps < 0:
            raise LimitError(f"it takes more than {self._limits.max_steps} steps")
        if time.monotonic() > self._deadline:
            raise LimitError(f"it runs for more than {self._limits.timeout_s} s")

    def spend(self, num_chars: int) -> None:
        """Pay for a string before it is made. Raises LimitError."""
        self.tick()
        self.check_size(num_chars)
        self._chars -= num_chars
        if self._chars < 0:
            raise LimitError(f"it makes more than {self._limits.max_chars} characters")

    def check_size(self, size: int) -> None:
        if size > self._limits.max_value_size:
            raise LimitError(
                f"a value of {size} characters or elements, more than {self._limits.max_value_size}"
            )

    def weigh(self, value: Any) -> int:
        """Characters and elements of a value, shared parts counted each time. Raises LimitError."""
        size = 0
        pending = [value]
        while pending:
            self.tick()
            item = pending.pop()
            size += 1
            if isinstance(item, str | bytes):
                size += len(item)
            elif isinstance(item, int):
                size += item.bit_length() // 3
            elif isinstance(item, Mapping):
                pending += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple | set | frozenset | KeysView | ValuesView):
                pending += item
            elif isinstance(item, ItemsView):
                pending += [part for pair in item for part in pair]
            elif isinstance(item, Namespace):
                raise LimitError("a namespace is printed or put in a list; use its attributes")
            self.check_size(size + len(pending))
        return size

    def measured(self, value: Any) -> Any:
        """The value, paid for."""
        if isinstance(value, str):
            self.spend(len(value))
        elif not isinstance(value, Namespace):
            self.weigh(value)
        return value

    def ticking(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items; each one is a step."""
        for item in items:
            self.tick()
            yield item


_BUDGET: ContextVar[Budget] = ContextVar("template budget")


def budget() -> Budget:
    """Of the template that runs in this thread."""
    return _BUDGET.get()


@contextmanager
def limited(limits: TemplateLimits) -> Iterator[None]:
    token = _BUDGET.set(Budget(limits))
    try:
        yield
    finally:
        _BUDGET.reset(token)


# ---- what would grow beyond a limit at one stroke ------------------------------------------


def check_width(*values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise LimitError(f"a width or count of {value}, more than {MAX_WIDTH}")


def check_add(left: Any, right: Any) -> None:
    if isinstance(left, str) and isinstance(right, str):
        budget().spend(len(left) + len(right))
    elif isinstance(left, list | tuple):
        budget().check_size(budget().weigh(left) + budget().weigh(right))


def check_multiply(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
            budget().spend(budget().weigh(value) * max(times, 0))
            return
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int):
        _check_bits(base.bit_length() * exponent)


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_INT_BITS:
        raise LimitError(f"a number of {num_bits} bits, more than {MAX_INT_BITS}")


def check_percent(text: Any, values: Any) -> None:
    """For `text % values`."""
    if isinstance(text, str):
        if WIDE_PERCENT.search(text):
            raise LimitError(f"a field width in {text[:80]!r} that is too large or not literal")
        budget().spend(len(text) + text.count("%") * budget().weigh(values))


def check_braces(text: str, values: Any) -> None:
    """For `text.format(values)`."""
    if WIDE_BRACES.search(text):
        raise LimitError(f"a field width in {text[:80]!r} that is too large or not literal")
    budget().spend(len(text) + text.count("{") * budget().weigh(values))


def check_replace(text: str, old: Any, new: Any) -> None:
    budget().spend(len(text) + (text.count(str(old)) if old else len(text) + 1) * len(str(new)))


def check_join(separator: Any, items: list[Any]) -> None:
    budget().spend(len(str(separator)) * len(items) + budget().weigh(items))


def check_str_method(text: str, name: str, values: tuple[Any, ...]) -> None:
    """Pay for the result of a method of str before it is called with these values."""
    if name in ("center", "ljust", "rjust", "zfill"):
        check_width(*values)
    elif name == "expandtabs":
        check_width(*values)
        budget().spend(len(text) + text.count("\t") * max([8, *values]))
    elif name == "replace" and len(values) >= 2:
        check_replace(text, values[0], values[1])
    elif name == "join" and values:
        check_join(text, values[0])
