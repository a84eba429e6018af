"""Round numbers for axes."""

from __future__ import annotations

import math

_STEPS = (1.0, 2.0, 5.0, 10.0)


def nice_step(span: float, most: int) -> float:
    """The least of 1, 2, 5 times a power of ten that `span` holds at most `most` times."""
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(step for step in _STEPS if step * power >= raw * (1 - 1e-9))
    return float(step * power)


def ticks(highest: float, most: int = 5) -> list[float]:
    """Round values from 0 on, the last of them at or above `highest`."""
    if highest <= 0:
        return [0.0, 1.0]
    step = nice_step(highest, most)
    return [step * n for n in range(math.ceil(highest / step - 1e-9) + 1)]


def time_unit(span_s: float) -> tuple[str, float]:
    """The unit in which a span of time is told, and its seconds."""
    for name, seconds in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if span_s >= 3 * seconds:
            return name, seconds
    return "seconds", 1.0
