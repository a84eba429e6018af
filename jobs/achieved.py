"""What a job's sweeps achieved, in the words of what was predicted for them."""

from __future__ import annotations

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


def _per(amount: float, of: float) -> float | None:
    return float(f"{amount / of:.5g}") if of else None
