"""A job's report: one HTML page of how it went and what came of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from jobs.export import refuse_own_files
from jobs.home import Home
from jobs.results_dataset import open_dataset
from jobs.store import JobStore
from ntx_batch.report.page import Report, render
from ntx_batch.report.power import Price
from ntx_batch.report.rows import sum_rows

__all__ = ["Price", "make_report", "write_report"]


def make_report(home: Home, job_id: str, price: Price, version: str) -> str:
    """The page of a job as it is now, which may still run.

    Raises ResultsError: a part of its results is gone.
    """
    with JobStore(home.state_path) as store:
        finished = store.finished(job_id)
        points = store.progress_points(job_id)
    rows = sum_rows(open_dataset(finished), finished.job.spec.output_prefix)
    return render(
        Report(
            job=finished.job,
            rows=rows,
            points=points,
            price=price,
            version=version,
            made_at=time.time(),
        )
    )


def write_report(home: Home, job_id: str, path: Path, price: Price, version: str) -> None:
    """Write the page to a file, which appears when it is complete.

    Raises OutputError: the folder is not there, or the file is the job's own input or results.
    """
    with JobStore(home.state_path) as store:
        job = store.job(job_id)
    target = path.absolute()
    refuse_own_files(target, job)
    text = make_report(home, job_id, price, version)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
