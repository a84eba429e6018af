"""What of its input a schedule has not done yet: whole files, or rows by the values of a column."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine import RowError
from jobs.dataset import RowReader, count_rows, read_schema
from jobs.formats.base import OnBadUtf8
from jobs.input_files import find_files
from jobs.records import Manifest, SpecError

# Those of some items that are new.
FindNew = Callable[[list[str]], set[str]]
BLOCK_ROWS = 10_000


def file_item(path: str, nbytes: int, mtime_ns: int, etag: str | None = None) -> str:
    """How a schedule knows a file again; one that was written anew is another."""
    return json.dumps([path, nbytes, mtime_ns] if etag is None else [path, nbytes, etag])


def file_items(input_path: str) -> dict[str, str]:
    """The items of an input's files, each with its path. Raises NoInputError: there are none."""
    items = {}
    for file in find_files(input_path).files:
        state = file.state
        items[file_item(file.path, state.nbytes, state.mtime_ns, state.etag)] = file.path
    return items


def manifest_items(manifest: Manifest) -> list[str]:
    """The items of a manifest's files."""
    return [file_item(file.path, file.nbytes, file.mtime_ns, file.etag) for file in manifest.files]


@dataclass(slots=True)
class NewRows:
    """Rows of an input whose id is new, and those ids as items. Rows without an id are always new.

    num_rows: of the whole input
    """

    rows: list[int] = field(default_factory=list)
    items: dict[str, None] = field(default_factory=dict)
    num_rows: int = 0

    def keys(self, num_samples: int) -> npt.NDArray[np.int64]:
        """(n, 2) keys of the rows' outputs, ascending."""
        rows = np.repeat(np.array(self.rows, np.int64), num_samples)
        return np.stack([rows, np.tile(np.arange(num_samples), len(self.rows))], axis=1)


def find_new_rows(
    manifest: Manifest,
    column: str,
    find_new: FindNew,
    *,
    on_bad_utf8: OnBadUtf8 = "error",
    limit: int | None = None,
) -> NewRows:
    """Read the ids of a whole input, and find the first `limit` rows that are new.

    Raises SpecError: the input has no such column. Raises DatasetError: it cannot be read.
    """
    found = NewRows()
    with tempfile.TemporaryDirectory(prefix="ntx-ids-") as folder:
        # The job makes its own index of text files, where it keeps it.
        counted = count_rows(manifest, Path(folder), on_bad_utf8)
        names = read_schema(counted).names
        if column not in names:
            raise SpecError(
                f"--id-column {column}: the input has no such column; it has {', '.join(names)}"
            )
        found.num_rows = counted.num_rows or 0
        for begin in range(0, found.num_rows, BLOCK_ROWS):
            end = min(begin + BLOCK_ROWS, found.num_rows)
            ids = dict(enumerate(_ids(counted, column, begin, end, on_bad_utf8), begin))
            new = find_new([item for item in ids.values() if item is not None])
            for row, item in ids.items():
                if item is None or item in new:
                    found.rows.append(row)
                    if item is not None:
                        found.items[item] = None
                if len(found.rows) == limit:
                    return found
    return found


def _ids(
    manifest: Manifest, column: str, begin: int, end: int, on_bad_utf8: OnBadUtf8
) -> Iterator[str | None]:
    """The ids of rows as items; None for a row that has none or cannot be read."""
    with RowReader(manifest, [], values=[column], on_bad_utf8=on_bad_utf8) as reader:
        for _, batch in reader.read(begin, end):
            for values in batch.values:
                value = None if isinstance(values, RowError) else values.get(column)
                yield None if value is None else json.dumps(value, default=str, sort_keys=True)
