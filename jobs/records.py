"""The job layer's contract: jobs, shards, batches of finished rows, parts, and the error tree.

JobError
├── JobNotFoundError       no job, or several, match an id prefix
│   └── ScheduleNotFoundError  no schedule has this name
├── SpecError              a job's spec contradicts itself, its model or its input
├── KeyTakenError          a job was submitted with this key before
├── ChangedError           input, model or program are not those that a job was submitted with
├── DatasetError           the input cannot be read as rows
│   └── NoInputError       no file is where the input should be
├── StorageError           a store that a URI names refuses
│   └── UnreachableError   it does not answer; that may pass
├── ResultsError           the results folder cannot be used, or a part is not ours
│   └── OutputError        a folder or file that was named to write to is not one to write to
├── RunnerError            the runner cannot start or is not the one asked for
└── StoreError             the state database refuses, is damaged, or is of a later version
    └── DiskFullError      there is no room for what it has to write
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from engine import EngineConfig, SamplingParams

JobState = Literal["queued", "running", "paused", "interrupted", "completed", "failed", "cancelled"]
JobRequest = Literal["pause", "cancel"]
HookEvent = Literal["finish", "failure"]
HookState = Literal["idle", "due", "running", "delivered", "failed"]
RESULT_COLUMNS = (
    "row_index",
    "sample_index",
    "status",
    "generated_text",
    "finish_reason",
    "stop_reason",
    "prompt_tokens",
    "completion_tokens",
    "reused_tokens",
    "truncated",
    "original_prompt_tokens",
    "sampling_params",
    "logprobs",
    "duplicate_of",
    "json_valid",
    "warnings",
    "error_code",
    "error_message",
)
FINAL_STATES: tuple[JobState, ...] = ("completed", "failed", "cancelled")
# A row with one of these fails again, however often it runs with the same options.
INPUT_ERROR_CODES = frozenset(
    {
        "invalid_row",
        "invalid_prompt",
        "empty_prompt",
        "invalid_utf8",
        "unsupported_content",
        "template_error",
        "invalid_parameter",
        "context_length_exceeded",
    }
)


class JobError(Exception):
    """Base of the job layer's own errors."""


class JobNotFoundError(JobError):
    """No job, or more than one, matches an id prefix."""


class ScheduleNotFoundError(JobNotFoundError):
    """No schedule has this name."""


class SpecError(JobError):
    """A spec contradicts itself, its model or its input."""


class KeyTakenError(JobError):
    """A job was submitted with this key before: `job_id`."""

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(f"job {job_id} was submitted with the key {key!r} before")
        self.job_id = job_id


class ChangedError(JobError):
    """A job cannot go on: its input, its model or the program has changed."""


class DatasetError(JobError):
    """The input cannot be read as rows."""


class NoInputError(DatasetError):
    """No file is where the input should be; what is there may come later."""


class StorageError(JobError):
    """A store refuses: no such bucket, no access; says which URI and what to do."""


class UnreachableError(StorageError):
    """A store does not answer, or says that it cannot now. Later it may."""


class ResultsError(JobError):
    """The results folder cannot be used, or a part in it is not this job's."""


class OutputError(ResultsError):
    """The folder or file that was named to write to cannot be used; nothing was written."""


class RunnerError(JobError):
    """The runner cannot start, stop, or be reached."""


class StoreError(JobError):
    """The state database cannot do what was asked; says which database and why."""


class DiskFullError(StoreError):
    """The disk of the state database is full; nothing was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """Everything a job needs, frozen at submit. Paths are absolute; input and output may be URIs.

    input: Parquet, JSON lines or CSV file, a folder of them, or a pattern such as in/**/*.csv;
        with `after`, the results folder of that job
    after: the job whose results are the input; this one runs when that one has completed
    after_errors: rows of that job that are not ok are left out, fail this job, or are passed on
    model: GGUF file (first shard of a split one)
    output: results folder; None is the job's own under the state folder
    prompt_column, messages_column, prompt_template: where the prompt comes from; None of them
        takes a column named `prompt` or `messages`
    chat: wrap `prompt` in the model's chat template, with `system` before it where given
    chat_template: template text that replaces the model's
    template_kwargs: extra variables of the chat template
    encoding, delimiter: of CSV files; None takes UTF-8 and what the header suggests
    on_bad_utf8: a row whose text is not UTF-8 is an error, or runs with what is bad replaced
    param_columns: columns that set a sampling parameter of their name per row; the struct
        column `sampling_params` may be among them
    keep: input columns carried to the results; None is all but the prompt
    output_prefix: put before the names of our own result columns
    limit: run only the first rows
    samples: outputs of each row
    dedupe: compute equal outputs once
    truncate: cut over-long prompts at this end instead of failing the row
    params: values for rows that set none
    seed: the job's seed, for rows without their own
    max_errors: the job pauses when more rows than this have failed: "10", or "5%" of all
    row_timeout_s: a row that is longer on board than this ends as an error row
    verify: know the model again by all its bytes, not by samples of each tensor
    part_nbytes, part_interval_s: a results part is cut at this size or age
    shard_rows: rows of one dispatch
    engines: engines that share the job; None is one for each GPU, on CPUs one on each machine
    """

    input: str
    model: str
    after: str | None = None
    after_errors: Literal["skip", "fail", "pass"] = "skip"
    output: str | None = None
    prompt_column: str | None = None
    messages_column: str | None = None
    prompt_template: str | None = None
    chat: bool = False
    system: str | None = None
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    encoding: str | None = None
    delimiter: str | None = None
    on_bad_utf8: Literal["error", "replace"] = "error"
    param_columns: tuple[str, ...] = ()
    keep: tuple[str, ...] | None = None
    output_prefix: str = ""
    limit: int | None = None
    samples: int = 1
    dedupe: bool = True
    truncate: Literal["left", "right"] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    max_errors: str | None = None
    row_timeout_s: float | None = None
    verify: bool = False
    engine: EngineConfig = field(default_factory=EngineConfig)
    part_nbytes: int = 64 << 20
    part_interval_s: float = 600.0
    shard_rows: int = 1024
    engines: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One file of the frozen manifest: rows [first_row, first_row + num_rows) of the job.

    num_rows, first_row: None until counted, which submit does not do for long text files
    path: absolute, or a URI
    partition: values of the manifest's partition columns, from the folders that it lies in
    etag: how a store knows these bytes; None for a file of this machine
    """

    path: str
    nbytes: int
    mtime_ns: int
    num_rows: int | None
    first_row: int | None
    partition: tuple[str | None, ...] = ()
    etag: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TextColumn:
    """A column of text files. type: an Arrow type by name; is_json: values are JSON text"""

    name: str
    type: str = "string"
    is_json: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The job's input, frozen at submit: files sorted by path; names that were skipped.

    encoding, delimiter: of CSV files
    partitions: columns that come from folders named like `date=2025-09-17`
    columns: of text files; those of the first rows until the rows are counted
    index: file of the places where reading can begin, which text files need; None until made
    """

    files: tuple[InputFile, ...]
    skipped: tuple[str, ...] = ()
    format: Literal["parquet", "jsonl", "csv"] = "parquet"
    encoding: str = "utf-8"
    delimiter: str = ","
    partitions: tuple[str, ...] = ()
    columns: tuple[TextColumn, ...] = ()
    index: str | None = None

    @property
    def num_rows(self) -> int | None:
        """Rows of all files; None until counted."""
        total = 0
        for file in self.files:
            if file.num_rows is None:
                return None
            total += file.num_rows
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """What the texts of a job depend on besides its spec and its input.

    model_nbytes: sizes of the model's files
    header_sha256: of the bytes before the first tensor, over all files
    samples_sha256: of the first 64 KiB of each tensor; None until the job first starts
    full_sha256: of all bytes; None where the spec does not ask for it, or until the first start
    numerics_revision: as in engine/revision.py
    """

    model_nbytes: tuple[int, ...]
    header_sha256: str
    numerics_revision: int
    samples_sha256: str | None = None
    full_sha256: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HookTarget:
    """Whom to tell of a job's end: a URL, or a command.

    argv: the program by its absolute path, and its arguments
    cwd: the folder that the command runs in
    """

    url: str | None = None
    argv: tuple[str, ...] = ()
    cwd: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Hook:
    """Who is told of a job's end, and how far that is.

    event: `finish` is each end, `failure` the state `failed`
    num_attempts: made for the end at hand
    exit_status: of the last attempt: the command's, or the HTTP status
    error: why that attempt was no delivery
    tried_at: Unix seconds
    """

    id: int
    event: HookEvent
    target: HookTarget
    state: HookState = "idle"
    num_attempts: int = 0
    exit_status: int | None = None
    error: str | None = None
    tried_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job as the store knows it. Times are Unix seconds.

    key: of `submit --key`
    retry_of: the job whose failed rows it runs again
    schedule, run: the name of the schedule that made it, and which of its runs it is
    fingerprint: as of the submit; more is added when the job first starts
    after: the job whose results it has yet to read
    waits: for that job, or for a retry of it; of a failed job: it failed with that one
    priority: jobs of a higher one run first
    hooks: who is told of its end

    request: what a client asks of the runner that runs the job
    total: output rows of the job, one for each sample of an input row; None until known
    num_ok, num_error: output rows finished so far
    num_copied: of these, copies of others
    prompt_tokens, completion_tokens: read and generated by rows that are ok and no copies
    reused_tokens: of these prompt tokens, those that had been computed for another row
    record: what the engine reported: device, threads, layouts, rates, predicted and achieved
    """

    id: str
    state: JobState
    spec: JobSpec
    manifest: Manifest
    results_dir: str
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    reason: str | None = None
    request: JobRequest | None = None
    total: int | None = None
    num_ok: int = 0
    num_error: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0
    num_copied: int = 0
    attempt: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    retry_of: str | None = None
    schedule: str | None = None
    run: int | None = None
    fingerprint: Fingerprint | None = None
    after: str | None = None
    waits: bool = False
    priority: int = 0
    hooks: tuple[Hook, ...] = ()

    @property
    def num_cancelled(self) -> int:
        """Rows that a cancelled job will never finish."""
        if self.state != "cancelled" or self.total is None:
            return 0
        return self.total - self.num_ok - self.num_error

    @property
    def num_remaining(self) -> int | None:
        if self.total is None:
            return None
        return self.total - self.num_ok - self.num_error - self.num_cancelled

    @property
    def exit_code(self) -> int | None:
        """What a waiting command exits with; None while the job is not over."""
        match self.state:
            case "completed":
                return 3 if self.num_error else 0
            case "failed":
                return 1
            case "cancelled":
                return 4
            case "paused":
                return 5
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Rows [begin, end) of a job as one dispatch, less outputs that are not to run.

    done: those outputs, ascending, each as row index * samples of a row + sample index
    """

    number: int
    begin: int
    end: int
    done: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBatch:
    """Finished rows on their way to the spool. Counts are as in `Job`.

    row_indices, sample_indices: parallel to the rows of `ipc`
    ipc: Arrow IPC stream of one table with the job's result schema
    """

    row_indices: tuple[int, ...]
    sample_indices: tuple[int, ...]
    num_ok: int
    num_error: int
    prompt_tokens: int
    completion_tokens: int
    ipc: bytes
    reused_tokens: int = 0
    num_copied: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One published Parquet file. state: `publishing`, then `committed`."""

    number: int
    name: str
    state: Literal["publishing", "committed"]
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SpoolSize:
    """What is finished and in no part yet. oldest_at: Unix seconds; None where there is nothing"""

    nbytes: int
    num_rows: int
    oldest_at: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRows:
    """Where a job's finished rows are at one instant: each is in one part or in one blob.

    parts: committed ones
    blobs: Arrow IPC streams of the rows in no committed part
    selection: (n, 2) keys of the job's output rows, row and sample index, ascending, where it does
        not run its whole input
    retries: of the job, and theirs, in the order of submission, as far as they have begun; those
        hold no retries of their own
    """

    job: Job
    parts: tuple[Part, ...]
    blobs: tuple[bytes, ...]
    selection: npt.NDArray[np.int64] | None = None
    retries: tuple[FinishedRows, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerInfo:
    """The process that last said it is the runner. It informs; the lock on runner.lock decides.

    pid_start_time: as in processes.ProcessId
    environment: variables that jobs of this runner run under
    started_at, heartbeat_at: Unix seconds
    """

    pid: int
    pid_start_time: float
    boot_id: str
    host: str
    state: Literal["running", "stopping"]
    environment: Mapping[str, str]
    started_at: float
    heartbeat_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """Which input columns a job uses, and for what.

    source, column: where prompts come from; column is "" for a prompt template
    template_columns: columns that the prompt template names
    params: columns that set sampling parameters per row
    carried: columns that go to the results, in the input's order
    """

    source: Literal["prompt", "messages", "template"]
    column: str
    template_columns: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()

    @property
    def values(self) -> tuple[str, ...]:
        """Columns whose values are needed to run a row."""
        named = (self.column,) if self.column else self.template_columns
        return tuple(dict.fromkeys((*named, *self.params)))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns to read."""
        return tuple(dict.fromkeys((*self.values, *self.carried)))
