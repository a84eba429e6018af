"""Which files an input names: a file, a folder with all below it, or a pattern; and partitions.

A folder named like `date=2025-09-17` below the input is a partition: its rows have a text column
`date` of that value, URL-decoded; `__HIVE_DEFAULT_PARTITION__` is null.
"""

from __future__ import annotations

import glob
import os
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jobs.records import DatasetError, NoInputError

Format = Literal["parquet", "jsonl", "csv"]
FORMATS: dict[str, Format] = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
}
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(slots=True)
class InputFiles:
    """paths: sorted; skipped: other names there, relative to `root`; folders end in a slash"""

    root: Path
    format: Format
    paths: list[Path] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def find_files(input_path: str | Path) -> InputFiles:
    """The files of an input, none of them empty.

    A single file of an ending that is not known counts as Parquet.

    Raises NoInputError: there is none.
    Raises DatasetError: one has no bytes, or they are of several formats.
    """
    path = Path(os.path.abspath(input_path))
    if path.is_dir():
        found = _split(path, _walk(path))
    elif path.exists():
        found = InputFiles(path.parent, _format_of(path) or "parquet", [path])
    elif glob.has_magic(str(path)):
        found = _split(_fixed_prefix(path), _matches(path))
    else:
        raise NoInputError(f"there is no input {path}")
    if not found.paths:
        raise NoInputError(_nothing_found(path, found))
    for file_path in found.paths:
        if file_path.stat().st_size == 0:
            raise DatasetError(f"input file {file_path} is empty (0 bytes): write it again")
    return found


def _format_of(path: Path) -> Format | None:
    return FORMATS.get(path.suffix.lower())


def _nothing_found(path: Path, found: InputFiles) -> str:
    endings = ", ".join(FORMATS)
    if path.is_dir():
        what = f"folder {path} has no files that end in {endings}"
    else:
        what = f"pattern {path} matches no files that end in {endings}"
    others = ", ".join(found.skipped[:5])
    return f"{what}; it has {others}" if others else what


# ---- folders and patterns ----------------------------------------------------------------


def _walk(folder: Path, above: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    """Files below a folder, and folders that are passed over: hidden ones and those of `_`."""
    stat = folder.stat()
    me = (stat.st_dev, stat.st_ino)
    if me in above:
        return  # a link to a folder that it lies in
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not _is_hidden(entry):
            yield from _walk(entry, (*above, me))
        else:
            yield entry


def _is_hidden(path: Path) -> bool:
    return path.name[0] in "._"


def _matches(pattern: Path) -> Iterator[Path]:
    """What a pattern matches, and all below where that is a folder; each file once."""
    seen: set[Path] = set()
    for match in map(Path, glob.iglob(str(pattern), recursive=True)):
        below = _walk(match) if match.is_dir() else iter([match])
        for path in below:
            if path not in seen:
                seen.add(path)
                yield path


def _fixed_prefix(pattern: Path) -> Path:
    """The folder above the first part with a wildcard."""
    parts = pattern.parts
    first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:first])


def _split(root: Path, entries: Iterator[Path]) -> InputFiles:
    by_format: dict[Format, list[Path]] = {}
    skipped: list[str] = []
    for entry in entries:
        kind = _format_of(entry)
        if kind is not None and not _is_hidden(entry) and entry.is_file():
            by_format.setdefault(kind, []).append(entry)
        else:
            name = entry.relative_to(root).as_posix()
            skipped.append(name + "/" if entry.is_dir() else name)
    if len(by_format) > 1:
        some = ", ".join(paths[0].relative_to(root).as_posix() for paths in by_format.values())
        raise DatasetError(
            f"the input under {root} is of several formats ({some}); name one of them with a "
            f"pattern, for instance '{root}/**/*{next(iter(by_format.values()))[0].suffix}'"
        )
    kind, paths = next(iter(by_format.items()), ("parquet", []))
    paths.sort(key=lambda path: path.parts)
    return InputFiles(root, kind, paths, sorted(skipped))


# ---- partitions --------------------------------------------------------------------------


def partition_of(path: Path, root: Path) -> dict[str, str | None]:
    """Names and values of the partition that a file lies in, from the folders below `root`."""
    found: dict[str, str | None] = {}
    for part in path.relative_to(root).parts[:-1]:
        name, equals, value = part.partition("=")
        if name and equals:
            null = value == NULL_PARTITION
            found[urllib.parse.unquote(name)] = None if null else urllib.parse.unquote(value)
    return found
