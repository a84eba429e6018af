"""Rows in, rows out: jobs that survive crashes, the one runner of a state folder, and Ray."""

from jobs.control import ensure_runner, runner_status, stop_runner
from jobs.home import Home
from jobs.records import (
    DatasetError,
    Job,
    JobError,
    JobNotFoundError,
    JobSpec,
    OutputError,
    ResultsError,
    RunnerError,
    SpecError,
    StoreError,
)
from jobs.store import JobStore

__all__ = [
    "DatasetError",
    "Home",
    "Job",
    "JobError",
    "JobNotFoundError",
    "JobSpec",
    "JobStore",
    "OutputError",
    "ResultsError",
    "RunnerError",
    "SpecError",
    "StoreError",
    "ensure_runner",
    "runner_status",
    "stop_runner",
]
