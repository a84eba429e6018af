"""From the words of a submit to a job in the queue."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import control
from jobs.output_folder import remove_own_files
from jobs.records import Job, JobSpec, KeyTakenError, SpecError
from jobs.specs import spec_to_json
from jobs.store import JobStore
from ntx_batch.job_file import JOB_FILE_SUFFIX, read_job_file
from ntx_batch.preflight import check_job
from ntx_batch.spec import build_spec

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A job as asked for. key, overwrite: as `submit` takes them"""

    spec: JobSpec
    key: str | None
    overwrite: bool


def read_submission(input_path: str | Path, given: Mapping[str, Any]) -> Submission:
    """Build what is asked for; with a job file as input, `given` comes before what the file says.

    given: options of `submit`; None is the same as leaving one out

    Raises SpecError: unknown or contradicting options, no input or no model.
    """
    options: dict[str, Any] = {"input": input_path}
    if str(input_path).lower().endswith(JOB_FILE_SUFFIX):
        options = read_job_file(input_path)
    options |= {name: value for name, value in given.items() if value is not None}
    for name in ("input", "model"):
        if name not in options:
            raise SpecError(f"no {name} is named: {_HINTS[name]}")
    key, overwrite = options.pop("key", None), options.pop("overwrite", False)
    if key is not None and (not isinstance(key, str) or not key):
        raise SpecError(f"key is a text that is not empty, not {key!r}")
    if not isinstance(overwrite, bool):
        raise SpecError(f"overwrite is true or false, not {overwrite!r}")
    spec = build_spec(options.pop("input"), model=options.pop("model"), **options)
    return Submission(spec=spec, key=key, overwrite=overwrite)


_HINTS = {
    "input": "write `input = ...` into the job file",
    "model": "give a GGUF file with --model, or `model = ...` in a job file",
}


def queue_job(store: JobStore, submission: Submission, say: Say) -> Job:
    """Check the job and queue it; where its key is taken, the job that has it.

    say: gets each note about what was bound or is worth knowing

    Raises SpecError, DatasetError, OutputError, EngineError: the job cannot run as asked.
    """
    spec, key = submission.spec, submission.key
    if key is not None and (first := store.job_by_key(key)) is not None:
        return _first_of_key(first, spec, say)
    checked = check_job(spec, overwrite=submission.overwrite)
    for note in checked.notes:
        say(note)
    remove_own_files(store, checked.overwrites)
    try:
        return store.create_job(
            spec,
            checked.manifest,
            control.environment_of(os.environ),
            key=key,
            fingerprint=checked.fingerprint,
            overwrite=submission.overwrite,
        )
    except KeyTakenError as error:
        return _first_of_key(store.job(error.job_id), spec, say)


def _first_of_key(first: Job, spec: JobSpec, say: Say) -> Job:
    say(f"job {first.id} has the key {first.key} and is {first.state}; no other was queued")
    for line in spec_differences(first.spec, spec):
        say(f"not as in job {first.id}: {line}")
    return first


def spec_differences(first: JobSpec, second: JobSpec) -> Iterator[str]:
    """One line for each value that differs, with both."""
    before, after = _flat(first), _flat(second)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"{name} is {after.get(name)!r} here, {before.get(name)!r} there"


def _flat(spec: JobSpec) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(spec_to_json(spec))
    params, engine = values.pop("params"), values.pop("engine")
    return {**params, **engine, **values}
