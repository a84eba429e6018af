"""From the words of a submit to a job in the queue."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs import control
from jobs.hooks import parse_hook
from jobs.output_folder import remove_own_files
from jobs.records import HookEvent, HookTarget, Job, JobSpec, KeyTakenError, SpecError
from jobs.specs import spec_to_json
from jobs.store import JobStore
from jobs.uris import names_store
from ntx_batch.chaining import check_chained, resolve_after
from ntx_batch.job_file import HOOK_OPTIONS, JOB_FILE_SUFFIX, read_job_file
from ntx_batch.preflight import check_job
from ntx_batch.spec import build_spec

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A job as asked for. key, overwrite, priority: as `submit` takes them

    spec: its `after` is as it was given, maybe the beginning of an id
    hooks: whom to tell of its end
    """

    spec: JobSpec
    key: str | None
    overwrite: bool
    priority: int = 0
    hooks: Mapping[HookEvent, HookTarget] = field(default_factory=dict)


def read_submission(input_path: str | Path | None, given: Mapping[str, Any]) -> Submission:
    """Build what is asked for; with a job file as input, `given` comes before what the file says.

    input_path: None, or the id of a job, where that is given as `after`
    given: options of `submit`; None is the same as leaving one out

    Raises SpecError: unknown or contradicting options, no input or no model.
    """
    options: dict[str, Any] = {} if input_path is None else {"input": input_path}
    if str(input_path).lower().endswith(JOB_FILE_SUFFIX):
        assert input_path is not None
        options = read_job_file(input_path)
    options |= {name: value for name, value in given.items() if value is not None}
    _refuse_second_input(options)
    for name in ("input", "model"):
        if name not in options:
            raise SpecError(f"no {name} is named: {_HINTS[name]}")
    values = {name: parse(options.pop(name)) for name, parse in _OWN.items() if name in options}
    hooks: dict[HookEvent, HookTarget] = {
        event: _hook(name, options.pop(name))
        for name, event in HOOK_OPTIONS.items()
        if name in options
    }
    spec = build_spec(options.pop("input"), model=options.pop("model"), **options)
    return Submission(spec=spec, hooks=hooks, **{"key": None, "overwrite": False} | values)


def _refuse_second_input(options: dict[str, Any]) -> None:
    """With `after`, an input may be named only if it is that job; it is set to None."""
    after, named = options.get("after"), options.get("input")
    if after is None:
        if "after_errors" in options:
            raise SpecError(
                "after_errors says what to do with failed rows of another job: add after"
            )
        return
    texts = sorted((str(after).lower(), str(after if named is None else named).lower()), key=len)
    if not texts[1].startswith(texts[0]):
        raise SpecError(
            f"after {after} makes the results of that job the input: drop the input {named}"
        )
    options["input"] = None


def _key(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise SpecError(f"key is a text that is not empty, not {value!r}")
    return value


def _overwrite(value: Any) -> bool:
    if not isinstance(value, bool):
        raise SpecError(f"overwrite is true or false, not {value!r}")
    return value


def parse_priority(value: Any) -> int:
    """A job's priority. Raises SpecError: it is no whole number, or a very large one."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_PRIORITY:
        raise SpecError(
            f"priority is a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {value!r}"
        )
    return value


def _hook(name: str, value: Any) -> HookTarget:
    return value if isinstance(value, HookTarget) else parse_hook(name, value)


MAX_PRIORITY = 1_000_000
_OWN: dict[str, Callable[[Any], Any]] = {
    "key": _key,
    "overwrite": _overwrite,
    "priority": parse_priority,
}
_HINTS = {
    "input": "write `input = ...` into the job file, name a file or folder, or give --after JOB",
    "model": "give a GGUF file with --model, or `model = ...` in a job file",
}


def queue_job(store: JobStore, submission: Submission, say: Say) -> Job:
    """Check the job and queue it; where its key is taken, the job that has it.

    say: gets each note about what was bound or is worth knowing

    Raises SpecError, DatasetError, OutputError, EngineError: the job cannot run as asked.
    Raises JobNotFoundError: the job that it is to come after is not there.
    """
    spec, key = resolve_after(store, submission.spec), submission.key
    if key is not None and (first := store.job_by_key(key)) is not None:
        return _first_of_key(first, spec, say)
    check = check_job if spec.after is None else functools.partial(check_chained, store)
    checked = check(spec, overwrite=submission.overwrite)
    for note in checked.notes:
        say(note)
    remove_own_files(store, checked.overwrites)
    try:
        job = store.create_job(
            spec,
            checked.manifest,
            control.environment_of(os.environ, stores=names_store(spec.input, spec.output)),
            key=key,
            fingerprint=checked.fingerprint,
            overwrite=submission.overwrite,
            priority=submission.priority,
            hooks=submission.hooks,
        )
    except KeyTakenError as error:
        return _first_of_key(store.job(error.job_id), spec, say)
    if job.waits:
        say(str(job.reason))
    return job


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
