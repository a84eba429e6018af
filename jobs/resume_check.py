"""May a job go on? Only on the input, the model and the program that it was submitted with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.requests import GgufError
from jobs.dataset import file_changes
from jobs.files import names_in
from jobs.fingerprint import OnProgress, fingerprint_differences, read_full_fingerprint
from jobs.input_files import find_files
from jobs.records import ChangedError, DatasetError, Fingerprint, Job, Part, StorageError
from jobs.uris import child

MAX_LISTED = 20


def check_unchanged_job(
    job: Job, parts: Iterable[Part] = (), on_progress: OnProgress = lambda _: None
) -> Fingerprint:
    """The job's fingerprint, complete, if the job may go on.

    parts: of the job; the committed ones must be there
    on_progress: called while the model is read; may raise to stop it

    Raises ChangedError: lists what differs from the submit, with both values.
    Raises StorageError: a store refuses or does not answer, so that nobody can tell.
    """
    differences = [*_input_differences(job), *_part_differences(job, parts)]
    model = job.spec.model
    try:
        now = read_full_fingerprint(model, verify=job.spec.verify, on_progress=on_progress)
    except (GgufError, OSError) as error:
        raise ChangedError(_refusal(job, [*differences, str(error)])) from error
    if job.fingerprint is not None:
        changed = fingerprint_differences(job.fingerprint, now)
        differences += [f"model {model}: {line}" for line in changed]
    if differences:
        raise ChangedError(_refusal(job, differences))
    return now


def new_input_files(job: Job) -> list[str]:
    """Files of the input that came after the submit; the job does not read them.

    Those of a schedule's input are for other runs; the results of an earlier job were copied.
    """
    if job.schedule is not None or job.spec.after is not None:
        return []
    known = {file.path for file in job.manifest.files}
    try:
        found = find_files(job.spec.input).files
    except (DatasetError, StorageError):
        return []
    return [file.path for file in found if file.path not in known]


def _input_differences(job: Job) -> Iterator[str]:
    for file, change in zip(job.manifest.files, file_changes(job.manifest), strict=True):
        if change is not None:
            yield f"input file {file.path} {change}"


def _part_differences(job: Job, parts: Iterable[Part]) -> Iterator[str]:
    committed = [part for part in parts if part.state == "committed"]
    there = set(names_in(job.results_dir)) if committed else set()
    for part in committed:
        if part.name not in there:
            path = child(job.results_dir, part.name)
            yield f"{path} with {part.num_rows} finished rows was there, is gone"


def _refusal(job: Job, differences: list[str]) -> str:
    count = "one thing" if len(differences) == 1 else f"{len(differences)} things"
    listed = differences[:MAX_LISTED]
    if len(differences) > MAX_LISTED:
        listed.append(f"… and {len(differences) - MAX_LISTED} more")
    lines = "".join(f"\n  {line}" for line in listed)
    return (
        f"job {job.id} cannot go on, {count} changed since it was submitted:{lines}\n"
        "put back what it was, or submit a new job"
    )
