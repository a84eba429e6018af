"""ntx-batch: run a dataset of prompts through a GGUF model and lose no row."""

from engine import EngineError
from jobs.records import (
    ChangedError,
    DatasetError,
    Job,
    JobError,
    JobNotFoundError,
    OutputError,
    ResultsError,
    RunnerError,
    SpecError,
    StorageError,
    StoreError,
    UnreachableError,
)
from ntx_batch import schedules
from ntx_batch.client import JobHandle, inspect, job, list_jobs, run, submit

__version__ = "0.1.0"

__all__ = [
    "ChangedError",
    "DatasetError",
    "EngineError",
    "Job",
    "JobError",
    "JobHandle",
    "JobNotFoundError",
    "OutputError",
    "ResultsError",
    "RunnerError",
    "SpecError",
    "StorageError",
    "StoreError",
    "UnreachableError",
    "__version__",
    "inspect",
    "job",
    "list_jobs",
    "run",
    "schedules",
    "submit",
]
