"""ntx-batch: run a dataset of prompts through a GGUF model and lose no row."""

from jobs.records import (
    DatasetError,
    Job,
    JobError,
    JobNotFoundError,
    ResultsError,
    RunnerError,
    SpecError,
)
from ntx_batch.client import JobHandle, inspect, job, list_jobs, run, submit

__version__ = "0.1.0"

__all__ = [
    "DatasetError",
    "Job",
    "JobError",
    "JobHandle",
    "JobNotFoundError",
    "ResultsError",
    "RunnerError",
    "SpecError",
    "__version__",
    "inspect",
    "job",
    "list_jobs",
    "run",
    "submit",
]
