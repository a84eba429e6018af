"""What a job took in energy and money, and who says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.progress_log import ProgressPoint

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """kwh: of one kilowatt hour; currency: its name; watts: what the machine draws, if told"""

    kwh: float | None = None
    currency: str = "EUR"
    watts: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Energy:
    """Energy of a job from its first row on.

    joules: None where nothing tells
    sources: who counted, or was told; left_out: what is not in it, with the reason
    begin_at, end_at: Unix seconds
    work_s, prompt_tokens, completion_tokens: what was done for it
    """

    joules: float | None
    sources: tuple[str, ...]
    left_out: tuple[str, ...]
    begin_at: float
    end_at: float
    work_s: float
    prompt_tokens: int
    completion_tokens: int

    @property
    def kwh(self) -> float | None:
        return None if self.joules is None else self.joules / JOULES_PER_KWH


def energy_of(
    record: Mapping[str, Any], points: Sequence[ProgressPoint], price: Price
) -> Energy | None:
    """None where no point was kept, so nothing is known of the job's course."""
    if not points:
        return None
    first, last = points[0], points[-1]
    facts = record.get("energy") or {}
    joules, sources = last.energy_j, tuple(facts.get("counted", ()))
    left_out = tuple(facts.get("left_out", ()))
    if price.watts is not None:
        joules, left_out = price.watts * last.work_s, ()
        sources = (f"{price.watts:g} W over the time of work, as told by a meter",)
    return Energy(
        joules=joules,
        sources=sources,
        left_out=left_out,
        begin_at=first.at - first.work_s,
        end_at=last.at,
        work_s=last.work_s,
        prompt_tokens=last.prompt_tokens,
        completion_tokens=last.completion_tokens,
    )


def per_million(amount: float, num_tokens: int) -> float | None:
    """An amount for each million tokens; None where there are no tokens."""
    return amount / num_tokens * 1e6 if num_tokens else None
