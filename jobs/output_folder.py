"""Where a job may put its results: never over its input, nor over what this tool did not write."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from jobs.files import is_file, names_in, remove_file
from jobs.publish import part_owner
from jobs.records import FINAL_STATES, JobNotFoundError, Manifest, OutputError
from jobs.remote import each
from jobs.store import JobStore
from jobs.uris import child, is_uri, is_within, parse_uri


@dataclass(frozen=True, slots=True)
class OwnFile:
    """A part in a results folder. job_id: whose it is, maybe of another state folder"""

    path: str
    job_id: str


def refuse_input_place(output: str, manifest: Manifest, input_path: str) -> None:
    """Raise OutputError where results would be written over the input or read as input."""
    if is_uri(output) or is_uri(input_path):
        if is_uri(output) and is_uri(input_path):
            _refuse_same_store(output, manifest, input_path)
        return
    folder = Path(output).resolve()
    for file in manifest.files:
        source = Path(file.path).resolve()
        if source == folder:
            raise OutputError(f"results folder {output} is the input file {file.path}")
        if source.is_relative_to(folder):
            raise OutputError(
                f"results folder {output} holds the input file {file.path}; name another with -o"
            )
    if _is_below_input(folder, Path(input_path)):
        raise OutputError(
            f"results folder {output} is inside the input {input_path}: results would be read as "
            "prompts the next time; name another with -o"
        )


def _refuse_same_store(output: str, manifest: Manifest, input_path: str) -> None:
    for file in manifest.files:
        if is_within(file.path, output):
            raise OutputError(
                f"results folder {output} is or holds the input file {file.path}; name another "
                "with -o"
            )
    folder, source = parse_uri(output), parse_uri(input_path)
    # A pattern begins in its bucket, whatever folders it names.
    same_bucket = is_within(output, str(source.at("")))
    place = PurePosixPath("/", folder.path)
    if is_within(output, input_path) or (same_bucket and _matches_pattern(place, source.parts)):
        raise OutputError(
            f"results folder {output} is inside the input {input_path}: results would be read as "
            "prompts the next time; name another with -o"
        )


def _matches_pattern(folder: PurePosixPath, parts: tuple[str, ...]) -> bool:
    """Whether what is written into a folder would match a pattern, or lie below what does.

    A folder that matches is read with all below it; `**` reaches any depth.
    """
    if not glob.has_magic("/".join(parts)):
        return False
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    if not folder.is_relative_to(PurePosixPath("/", *parts[:fixed])):
        return False
    pattern = str(PurePosixPath("/", *parts))
    below = [folder / "part.parquet", folder, *folder.parents]
    return "**" in parts or any(path.match(pattern) for path in below)


def _is_below_input(folder: Path, source: Path) -> bool:
    if source.is_dir():
        return folder.is_relative_to(source.resolve())
    if source.exists() or not glob.has_magic(str(source)):
        return False
    fixed = next(number for number, part in enumerate(source.parts) if glob.has_magic(part))
    root = Path(*source.parts[:fixed]).resolve()
    return _matches_pattern(PurePosixPath(folder), root.joinpath(*source.parts[fixed:]).parts[1:])


def find_own_files(folder: str) -> list[OwnFile]:
    """What --overwrite may remove.

    Raises OutputError: something is there that is no part of a job of this tool.
    """
    if is_file(folder):
        raise OutputError(f"results folder {folder} is a file; name a folder")
    names = names_in(folder)
    paths = [child(folder, name) for name in names]
    owners = each(_owner, paths) if is_uri(folder) else list(map(_owner, paths))
    found = []
    for name, path, job_id in zip(names, paths, owners, strict=True):
        if job_id is None:
            raise OutputError(
                f"results folder {folder} has {name}, which is no part of a job's results: "
                "--overwrite removes nothing else; move it away or name another folder with -o"
            )
        found.append(OwnFile(path, job_id))
    return found


def _owner(path: str) -> str | None:
    return part_owner(path) if is_file(path) else None


def remove_own_files(store: JobStore, files: Iterable[OwnFile]) -> int:
    """Remove the files found; returns how many.

    Raises OutputError: one is of a job that is not over; then none is removed.
    """
    files = list(files)
    for job_id in {file.job_id for file in files}:
        try:
            state = store.job(job_id).state
        except JobNotFoundError:
            continue
        if state not in FINAL_STATES:
            raise OutputError(
                f"{files[0].path} is of job {job_id}, which is {state}: cancel it first, or name "
                "another folder with -o"
            )
    for file in files:
        remove_file(file.path)
    return len(files)
