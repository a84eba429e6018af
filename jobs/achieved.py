"""What a job's sweeps achieved, in the words of what was predicted for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from engine.sweep_fit import fit
from engine.sweep_log import SweepTotals


def achieved(
    totals: SweepTotals, *, job_s: float, completion_tokens: int, probed_nbytes_per_s: float | None
) -> dict[str, Any]:
    """Figures of one attempt at a job so far, as plain JSON values.

    totals: of its sweeps
    job_s: seconds since its first row was admitted
    probed_nbytes_per_s: rate of the disk that the plan counted on; None where not measured

    sweeps_s: of all sweeps; sweep_s, sweep_tokens, sweep_rows: means; disk_nbytes_per_s: streamed
    over the time of sweeps, probe_share: that over the probed rate; read_nbytes_per_s,
    copy_nbytes_per_s: of the disk and of the link while they were at work; wait_s: the computing
    stood still for them; costs: of a sweep's computing, as `engine.sweep_fit` estimates them, None
    of few sweeps
    """
    costs = fit(totals.moments)
    found: dict[str, Any] = {
        "num_sweeps": totals.num_sweeps,
        "sweeps_s": round(totals.seconds, 3),
        "sweep_s": _per(totals.seconds, totals.num_sweeps),
        "sweep_tokens": _per(totals.num_tokens, totals.num_sweeps),
        "sweep_rows": _per(totals.num_rows, totals.num_sweeps),
        "tokens_per_s": _per(completion_tokens, job_s),
        "job_s": round(job_s, 3),
        "costs": costs and asdict(costs),
    }
    if totals.streamed_nbytes:
        rate = _per(totals.streamed_nbytes, totals.seconds)
        found |= {
            "streamed_nbytes": totals.streamed_nbytes,
            "direct_nbytes": totals.direct_nbytes,
            "buffered_nbytes": totals.buffered_nbytes,
            "disk_nbytes_per_s": rate,
            "probe_share": _per(rate, probed_nbytes_per_s)
            if rate and probed_nbytes_per_s
            else None,
            "read_busy_s": round(totals.read_busy_s, 3),
            "read_nbytes_per_s": _per(
                totals.direct_nbytes + totals.buffered_nbytes, totals.read_busy_s
            ),
            "copy_nbytes_per_s": _per(totals.copied_nbytes, totals.copy_busy_s),
            "wait_s": round(totals.wait_s, 3),
        }
    return found


# Figures of several engines: sums, rates that add up, and means over sweeps.
_SUMS = (
    "num_sweeps",
    "sweeps_s",
    "streamed_nbytes",
    "direct_nbytes",
    "buffered_nbytes",
    "read_busy_s",
    "wait_s",
)
_RATES = (
    "tokens_per_s",
    "disk_nbytes_per_s",
    "probe_share",
    "read_nbytes_per_s",
    "copy_nbytes_per_s",
)
_MEANS = ("sweep_s", "sweep_tokens", "sweep_rows")


def together(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What engines that work side by side have achieved, in the same words; `parts`: at least one.

    job_s: of the one that has worked for longest; costs: of one engine's sweeps
    """
    first, *others = parts
    if not others:
        return dict(first)
    num_sweeps = sum(part["num_sweeps"] for part in parts)
    found = dict(first)
    for key in {key for part in parts for key in part}:
        values = [part[key] for part in parts if part.get(key) is not None]
        if key in _SUMS:
            found[key] = round(sum(values), 3)
        elif key in _RATES:
            found[key] = float(f"{sum(values):.5g}") if values else None
        elif key in _MEANS:
            pairs = [(part[key], part["num_sweeps"]) for part in parts if part[key] is not None]
            found[key] = _per(sum(value * count for value, count in pairs), num_sweeps)
        elif key == "job_s":
            found[key] = max(values)
        elif key == "costs":
            found[key] = next(iter(values), None)
    return found


def of_all_engines(predicted: Mapping[str, Any], num_engines: int) -> dict[str, Any]:
    """What is predicted of engines that work side by side, where each is to do an equal part."""
    factors = {key: num_engines for key in ("tokens_per_s", "num_sweeps") if key in predicted}
    return {**predicted, **{key: predicted[key] * factor for key, factor in factors.items()}}


def _per(amount: float, of: float) -> float | None:
    return float(f"{amount / of:.5g}") if of else None
