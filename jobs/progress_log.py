"""What a job had done at some moments: points that can be thinned out, since each holds sums."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.messages import Progress

MAX_POINTS = 600  # of a job; where there are more, every second one goes
MIN_INTERVAL_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressPoint:
    """Sums over a job from its first row on, up to the Unix time `at`.

    work_s: seconds with rows in an engine; less than have passed where the job stood still
    num_ok, num_error: finished rows
    prompt_tokens, completion_tokens: computed, those of rows on board and lost ones among them
    sweep_s: of it in sweeps; wait_s: of that, computing stood still for weights
    streamed_nbytes: weights that came through the ring
    energy_j: as the engine's machine counted it; None where it could not at some time
    """

    at: float
    work_s: float = 0.0
    num_ok: int = 0
    num_error: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    sweep_s: float = 0.0
    wait_s: float = 0.0
    streamed_nbytes: int = 0
    energy_j: float | None = 0.0


class ProgressLog:
    """Makes points of what one attempt after the other tells of itself alone.

    last: the point kept last; None where there is none
    """

    def __init__(self, last: ProgressPoint | None) -> None:
        self._kept = self._base = self._latest = last or ProgressPoint(at=0.0)
        self._attempt: int | None = None

    def take(
        self, attempt: int, progress: Progress, *, num_ok: int, num_error: int, now: float
    ) -> None:
        """An attempt tells where it stands; counts of rows are of the whole job."""
        if attempt != self._attempt:
            self._attempt, self._base = attempt, self._latest
        base, achieved = self._base, progress.achieved
        self._latest = ProgressPoint(
            at=now,
            work_s=base.work_s + achieved.get("job_s", 0.0),
            num_ok=num_ok,
            num_error=num_error,
            prompt_tokens=base.prompt_tokens + progress.prompt_tokens,
            completion_tokens=base.completion_tokens + progress.completion_tokens,
            sweep_s=base.sweep_s + achieved.get("sweeps_s", 0.0),
            wait_s=base.wait_s + achieved.get("wait_s", 0.0),
            streamed_nbytes=base.streamed_nbytes + achieved.get("streamed_nbytes", 0),
            energy_j=_sum(base.energy_j, progress.energy_j),
        )

    def next_point(self, *, is_last: bool = False) -> ProgressPoint | None:
        """The point to keep now, if one is due; the longer a job, the rarer they are.

        is_last: nothing more comes soon, so what is known is due
        """
        latest, kept = self._latest, self._kept
        if latest is kept or (not is_last and latest.at - kept.at < _interval_s(latest)):
            return None
        self._kept = latest
        return latest


def _interval_s(point: ProgressPoint) -> float:
    return max(MIN_INTERVAL_S, 2 * point.work_s / MAX_POINTS)


def _sum(before_j: float | None, more_j: float | None) -> float | None:
    return None if before_j is None or more_j is None else before_j + more_j
