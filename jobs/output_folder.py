"""Where a job may put its results: never over its input, nor over what this tool did not write."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from jobs.publish import part_owner
from jobs.records import FINAL_STATES, JobNotFoundError, Manifest, OutputError
from jobs.store import JobStore


@dataclass(frozen=True, slots=True)
class OwnFile:
    """A part in a results folder. job_id: whose it is, maybe of another state folder"""

    path: Path
    job_id: str


def refuse_input_place(output: str, manifest: Manifest, input_path: str) -> None:
    """Raise OutputError where results would be written over the input or read as input."""
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


def _is_below_input(folder: Path, source: Path) -> bool:
    if source.is_dir():
        return folder.is_relative_to(source.resolve())
    if source.exists() or not glob.has_magic(str(source)):
        return False
    fixed = next(number for number, part in enumerate(source.parts) if glob.has_magic(part))
    root = Path(*source.parts[:fixed]).resolve()
    if not folder.is_relative_to(root):
        return False
    pattern = root.joinpath(*source.parts[fixed:])
    # A folder that matches is read with all below it; `**` reaches any depth.
    below = [PurePath(folder, "part.parquet"), folder, *folder.parents]
    return "**" in source.parts or any(path.match(str(pattern)) for path in below)


def find_own_files(folder: str) -> list[OwnFile]:
    """What --overwrite may remove.

    Raises OutputError: something is there that is no part of a job of this tool.
    """
    path = Path(folder)
    if not path.exists():
        return []
    if not path.is_dir():
        raise OutputError(f"results folder {folder} is a file; name a folder")
    found = []
    for name in sorted(os.listdir(path)):
        job_id = part_owner(path / name) if (path / name).is_file() else None
        if job_id is None:
            raise OutputError(
                f"results folder {folder} has {name}, which is no part of a job's results: "
                "--overwrite removes nothing else; move it away or name another folder with -o"
            )
        found.append(OwnFile(path / name, job_id))
    return found


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
                f"{files[0].path.parent} has results of job {job_id}, which is {state}: cancel it "
                "first, or name another folder with -o"
            )
    for file in files:
        file.path.unlink()
    return len(files)
