"""Which files an input names: a file, a folder with all below it, or a pattern; and partitions.

A folder named like `date=2025-09-17` below the input is a partition: its rows have a text column
`date` of that value, URL-decoded; `__HIVE_DEFAULT_PARTITION__` is null.
"""

from __future__ import annotations

import glob
import urllib.parse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from jobs import remote
from jobs.files import FileState, file_state
from jobs.records import DatasetError, NoInputError
from jobs.remote import RemoteEntry, each
from jobs.uris import Uri, absolute, child, is_uri, parse_uri

Format = Literal["parquet", "jsonl", "csv"]
FORMATS: dict[str, Format] = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
}
Kind = Literal["file", "folder", "other"]
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class FoundFile:
    """path: absolute, or a URI; folders: those between the input's root and the file"""

    path: str
    folders: tuple[str, ...]
    state: FileState


@dataclass(slots=True)
class InputFiles:
    """files: sorted; skipped: other names there, relative to the root; folders end in a slash"""

    format: Format
    files: list[FoundFile] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Entry:
    """What an input names. parts: its path below the input's root; kind: other is a dead link"""

    path: str
    parts: tuple[str, ...]
    kind: Kind
    mtime_ns: int = 0

    @property
    def name(self) -> str:
        return self.parts[-1]

    @property
    def is_hidden(self) -> bool:
        return self.name[0] in "._"


@dataclass(frozen=True, slots=True)
class _Tree:
    """What an input names. root: the folder, or that above the first part with a wildcard"""

    kind: Literal["file", "folder", "pattern"]
    root: str
    entries: Iterable[_Entry]


def find_files(input_path: str | Path) -> InputFiles:
    """The files of an input, none of them empty.

    A single file of an ending that is not known counts as Parquet.

    Raises NoInputError: there is none.
    Raises DatasetError: one has no bytes, or they are of several formats.
    Raises StorageError: a store refuses or does not answer.
    """
    place = absolute(input_path)
    tree = _remote_tree(parse_uri(place)) if is_uri(place) else _local_tree(Path(place))
    if tree is None:
        raise NoInputError(f"there is no input {place}")
    found, entries = _split(tree)
    if not entries:
        raise NoInputError(_nothing_found(place, tree, found))
    found.files = each(_look_at, entries) if is_uri(place) else list(map(_look_at, entries))
    for file in found.files:
        if file.state.nbytes == 0:
            raise DatasetError(f"input file {file.path} is empty (0 bytes): write it again")
    return found


def _look_at(entry: _Entry) -> FoundFile:
    state = file_state(entry.path)
    # What a store was asked for its bytes by does not say when they were written.
    state = replace(state, mtime_ns=state.mtime_ns or entry.mtime_ns)
    return FoundFile(entry.path, entry.parts[:-1], state)


def _format_of(name: str) -> Format | None:
    return FORMATS.get(PurePosixPath(name).suffix.lower())


def _nothing_found(place: str, tree: _Tree, found: InputFiles) -> str:
    endings = ", ".join(FORMATS)
    if tree.kind == "folder":
        what = f"folder {place} has no files that end in {endings}"
    else:
        what = f"pattern {place} matches no files that end in {endings}"
    others = ", ".join(found.skipped[:5])
    return f"{what}; it has {others}" if others else what


def _split(tree: _Tree) -> tuple[InputFiles, list[_Entry]]:
    """What to read of a tree, sorted, and what to say of it."""
    by_format: dict[Format, list[_Entry]] = {}
    skipped: list[str] = []
    for entry in tree.entries:
        kind = _format_of(entry.name)
        if tree.kind == "file":
            kind = kind or "parquet"
        elif entry.kind != "file" or entry.is_hidden:
            kind = None
        if kind is not None:
            by_format.setdefault(kind, []).append(entry)
        else:
            skipped.append("/".join(entry.parts) + ("/" if entry.kind == "folder" else ""))
    if len(by_format) > 1:
        some = ", ".join("/".join(entries[0].parts) for entries in by_format.values())
        ending = PurePosixPath(next(iter(by_format.values()))[0].name).suffix
        raise DatasetError(
            f"the input under {tree.root} is of several formats ({some}); name one of them with a "
            f"pattern, for instance '{child(tree.root, '**')}/*{ending}'"
        )
    form, entries = next(iter(by_format.items()), ("parquet", []))
    entries.sort(key=lambda entry: entry.parts)
    return InputFiles(form, skipped=sorted(skipped)), entries


# ---- this machine's folders and patterns -------------------------------------------------


def _local_tree(path: Path) -> _Tree | None:
    if path.is_dir():
        return _Tree("folder", str(path), _local_entries(path, _walk(path)))
    if path.exists():
        return _Tree("file", str(path.parent), _local_entries(path.parent, [path]))
    if not glob.has_magic(str(path)):
        return None
    root = _fixed_prefix(path)
    return _Tree("pattern", str(root), _local_entries(root, _matches(path)))


def _local_entries(root: Path, paths: Iterable[Path]) -> Iterator[_Entry]:
    for path in paths:
        kind: Kind = "folder" if path.is_dir() else "file" if path.is_file() else "other"
        yield _Entry(str(path), path.relative_to(root).parts, kind)


def _walk(folder: Path, above: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    """Files below a folder, and folders that are passed over: hidden ones and those of `_`."""
    stat = folder.stat()
    me = (stat.st_dev, stat.st_ino)
    if me in above:
        return  # a link to a folder that it lies in
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and entry.name[0] not in "._":
            yield from _walk(entry, (*above, me))
        else:
            yield entry


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


# ---- a store's ---------------------------------------------------------------------------


def _remote_tree(uri: Uri) -> _Tree | None:
    entry = remote.look(uri)
    if entry is not None and entry.is_folder:
        return _Tree("folder", str(uri), _remote_entries(uri, _below(uri)))
    if entry is not None:
        return _Tree("file", str(_above(uri)), _remote_entries(_above(uri), [entry]))
    if not glob.has_magic(uri.path):
        return None
    parts = uri.parts
    first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    root = uri.at("/".join(parts[:first]))
    return _Tree("pattern", str(root), _remote_entries(root, _remote_matches(uri)))


def _above(uri: Uri) -> Uri:
    return uri.at("/".join(uri.parts[:-1]))


def _below(folder: Uri) -> list[RemoteEntry]:
    """Files below a folder, and folders that are passed over: hidden ones and those of `_`."""
    depth, found = len(folder.parts), []
    for entry in remote.list_folder(folder, recursive=True):
        parts = entry.uri.parts[depth:]
        if any(part[0] in "._" for part in parts[:-1]):
            continue
        if not entry.is_folder or parts[-1][0] in "._":
            found.append(entry)
    return found


def _remote_matches(pattern: Uri) -> Iterator[RemoteEntry]:
    """What a pattern matches, and all below where that is a folder; each file once."""
    seen: set[Uri] = set()
    for match in remote.expand(pattern):
        for entry in _below(match.uri) if match.is_folder else [match]:
            if entry.uri not in seen:
                seen.add(entry.uri)
                yield entry


def _remote_entries(root: Uri, entries: Iterable[RemoteEntry]) -> Iterator[_Entry]:
    for entry in entries:
        parts = entry.uri.parts[len(root.parts) :]
        kind: Kind = "folder" if entry.is_folder else "file"
        yield _Entry(str(entry.uri), parts, kind, entry.mtime_ns)


# ---- partitions --------------------------------------------------------------------------


def partition_of(folders: Iterable[str]) -> dict[str, str | None]:
    """Names and values of the partition that a file lies in, from the folders above it."""
    found: dict[str, str | None] = {}
    for part in folders:
        name, equals, value = part.partition("=")
        if name and equals:
            null = value == NULL_PARTITION
            found[urllib.parse.unquote(name)] = None if null else urllib.parse.unquote(value)
    return found
