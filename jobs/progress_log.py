"""What a job had done at some moments: points that can be thinned out, since each holds sums."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jobs.messages import Progress

MAX_POINTS = 600  # of a job; where there are more, every second one goes
MIN_INTERVAL_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressPoint:
    """Sums over a job from its first row on, up to the Unix time `at`.

    work_s: seconds with rows in an engine, or in several; less than have passed where the job stood
        still
    num_ok, num_error: finished rows
    prompt_tokens, completion_tokens: computed, those of rows on board and lost ones among them
    sweep_s: in sweeps, of all engines; wait_s: of that, computing stood still for weights
    streamed_nbytes: weights that came through the ring
    energy_j: as the engines' machines counted it; None where one could not at some time
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
    """Makes points of what each attempt of each engine tells of itself alone.

    last: the point kept last; None where there is none
    """

    def __init__(self, last: ProgressPoint | None) -> None:
        self._kept = self._base = self._latest = last or ProgressPoint(at=0.0)
        self._told: dict[int, tuple[int, Progress]] = {}
        self._worked_until = 0.0

    def take(
        self,
        attempt: int,
        progress: Progress,
        *,
        num_ok: int,
        num_error: int,
        now: float,
        engine: int = 0,
    ) -> None:
        """An attempt tells where it stands; counts of rows are of the whole job."""
        before = self._told.get(engine)
        if before is not None and before[0] != attempt:
            self._base = _added(self._base, before[1])
        self._told[engine] = attempt, progress
        point = self._base
        for _, each in self._told.values():
            point = _added(point, each)
        work_s = self._latest.work_s + self._more_work_s(progress)
        self._latest = replace(point, at=now, work_s=work_s, num_ok=num_ok, num_error=num_error)

    def _more_work_s(self, progress: Progress) -> float:
        """Seconds of an attempt's work in which no engine was known to work."""
        began_at = progress.first_admission_at
        if began_at is None:
            return 0.0
        until = began_at + float(progress.achieved.get("job_s", 0.0))
        more_s = max(0.0, until - max(began_at, self._worked_until))
        self._worked_until = max(self._worked_until, until)
        return more_s

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


def _added(point: ProgressPoint, progress: Progress) -> ProgressPoint:
    """A point with what an attempt has told; without its time of work, which others may share."""
    achieved = progress.achieved
    computed = progress.prompt_tokens - progress.reused_tokens
    return replace(
        point,
        prompt_tokens=point.prompt_tokens + computed,
        completion_tokens=point.completion_tokens + progress.completion_tokens,
        sweep_s=point.sweep_s + achieved.get("sweeps_s", 0.0),
        wait_s=point.wait_s + achieved.get("wait_s", 0.0),
        streamed_nbytes=point.streamed_nbytes + achieved.get("streamed_nbytes", 0),
        energy_j=_sum(point.energy_j, progress.energy_j),
    )


def _sum(before_j: float | None, more_j: float | None) -> float | None:
    return None if before_j is None or more_j is None else before_j + more_j
