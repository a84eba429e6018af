"""How a job went from point to point: rates of each span, and where it stood still."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jobs.progress_log import ProgressPoint

PAUSE_S = 5.0  # less is the time between two attempts, or a slow commit


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """From one point to the next, in seconds of work since the job's first row.

    pause_s: the job stood still for so long before it
    tokens_per_s, prompt_tokens_per_s: generated and read
    wait_share: of the time of sweeps, computing stood still for weights
    streamed_nbytes_per_s: of weights
    watts: None where energy was not counted
    """

    begin_s: float
    end_s: float
    pause_s: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    wait_share: float
    streamed_nbytes_per_s: float
    watts: float | None


def spans_of(points: Sequence[ProgressPoint]) -> list[Span]:
    """points: of one job, in the order of time"""
    if not points:
        return []
    first = points[0]
    energy_j = None if first.energy_j is None else 0.0
    start = ProgressPoint(at=first.at - first.work_s, energy_j=energy_j)
    pairs = itertools.pairwise([start, *points])
    return [_span(before, after) for before, after in pairs if after.work_s > before.work_s]


def _span(before: ProgressPoint, after: ProgressPoint) -> Span:
    work_s, sweep_s = after.work_s - before.work_s, after.sweep_s - before.sweep_s
    pause_s = after.at - before.at - work_s
    watts = None
    if before.energy_j is not None and after.energy_j is not None:
        watts = (after.energy_j - before.energy_j) / work_s
    return Span(
        begin_s=before.work_s,
        end_s=after.work_s,
        pause_s=pause_s if pause_s > PAUSE_S else 0.0,
        tokens_per_s=(after.completion_tokens - before.completion_tokens) / work_s,
        prompt_tokens_per_s=(after.prompt_tokens - before.prompt_tokens) / work_s,
        wait_share=(after.wait_s - before.wait_s) / sweep_s if sweep_s > 0 else 0.0,
        streamed_nbytes_per_s=(after.streamed_nbytes - before.streamed_nbytes) / work_s,
        watts=watts,
    )
