"""Counting the rows of text files, and the places in them where reading can begin.

The index is a NumPy file: (n, 2) int64, byte offset and line of every INDEX_ROWS-th row of each
file, one file after the other. It is made once, when the job starts; 16 bytes for 512 rows.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from jobs.files import open_file
from jobs.formats import jsonl_file
from jobs.formats.base import OnBadUtf8
from jobs.formats.column_types import SeenColumns
from jobs.formats.csv_file import CsvFormat
from jobs.formats.records import FILE_START, Place, Record
from jobs.formats.text_file import INDEX_ROWS, ReadRecords
from jobs.id_counts import IdCounter, id_column
from jobs.records import DatasetError, InputFile, Manifest, TextColumn

PROGRESS_ROWS = 4096
INDEX_NAME = "input-index.npy"

OnProgress = Callable[[int], None]


def record_reader(manifest: Manifest, path: str, on_bad_utf8: OnBadUtf8) -> ReadRecords:
    """What cuts a text file of a manifest into records.

    Raises DatasetError: a CSV file has no header.
    """
    if manifest.format == "jsonl":
        return jsonl_file.read_records
    form = CsvFormat(manifest.encoding, manifest.delimiter, on_bad_utf8)
    with open_file(path) as source:
        names, first = form.read_header(source, path)

    def read(source: BinaryIO, start: Place) -> Iterator[Record]:
        return form.read_records(source, path, names, max(start, first))

    return read


# ---- submit: the first rows --------------------------------------------------------------


def sample_rows(manifest: Manifest, on_bad_utf8: OnBadUtf8, max_nbytes: int | None) -> Manifest:
    """The manifest with the columns of its first rows; with all counts where that was all of it.

    max_nbytes: read about so much; None reads everything

    Raises DatasetError: a CSV file has no header or another encoding.
    """
    seen = _header_columns(manifest, on_bad_utf8)
    counts: list[int] = []
    nbytes = 0
    for file in manifest.files:
        num_rows = 0
        for record in _records(manifest, file, on_bad_utf8):
            seen.add(record.values)
            num_rows += 1
            nbytes += record.nbytes
            if max_nbytes is not None and nbytes > max_nbytes:
                return replace(manifest, columns=_columns(seen, manifest))
        counts.append(num_rows)
    return with_counts(manifest, counts, seen)


def _header_columns(manifest: Manifest, on_bad_utf8: OnBadUtf8) -> SeenColumns:
    """Those known beforehand: of CSV files all that their headers name, and partitions."""
    names: dict[str, None] = {}
    if manifest.format == "csv":
        form = CsvFormat(manifest.encoding, manifest.delimiter, on_bad_utf8)
        for file in manifest.files:
            with open_file(file.path) as source:
                names |= dict.fromkeys(form.read_header(source, file.path)[0])
    return SeenColumns((*names, *manifest.partitions))


def _records(manifest: Manifest, file: InputFile, on_bad_utf8: OnBadUtf8) -> Iterator[Record]:
    read = record_reader(manifest, file.path, on_bad_utf8)
    partition = dict(zip(manifest.partitions, file.partition, strict=True))
    with open_file(file.path) as source:
        for record in read(source, FILE_START):
            yield replace(record, values=partition | record.values) if partition else record


def _columns(seen: SeenColumns, manifest: Manifest) -> tuple[TextColumn, ...]:
    """Those seen, those of partitions last."""
    columns = seen.columns()
    return tuple(sorted(columns, key=lambda column: column.name in manifest.partitions))


def with_counts(manifest: Manifest, counts: list[int], seen: SeenColumns) -> Manifest:
    firsts = accumulate(counts, initial=0)
    files = tuple(
        replace(file, num_rows=count, first_row=first)
        for file, count, first in zip(manifest.files, counts, firsts, strict=False)
    )
    return replace(manifest, files=files, columns=_columns(seen, manifest))


# ---- the whole index ---------------------------------------------------------------------


def index_rows(
    manifest: Manifest,
    folder: Path,
    on_bad_utf8: OnBadUtf8,
    ids: IdCounter,
    on_progress: OnProgress,
) -> Manifest:
    """Read all text files once: count rows, settle the columns' types, write the index.

    folder: where the index goes
    ids: gets the ids of the rows
    on_progress: called with the rows so far every PROGRESS_ROWS rows; may raise to stop

    Raises DatasetError: as `sample_rows`.
    """
    seen = _header_columns(manifest, on_bad_utf8)
    counts: list[int] = []
    places = array("q")
    total = 0
    for file in manifest.files:
        num_rows = 0
        for record in _records(manifest, file, on_bad_utf8):
            _take_id(ids, record)
            seen.add(record.values)
            if num_rows % INDEX_ROWS == 0:
                places.extend(record.place)
            num_rows += 1
            total += 1
            if total % PROGRESS_ROWS == 0:
                on_progress(total)
        counts.append(num_rows)
    path = folder / INDEX_NAME
    _write(path, np.frombuffer(places, np.int64).reshape(-1, 2))
    return replace(with_counts(manifest, counts, seen), index=str(path))


def _take_id(ids: IdCounter, record: Record) -> None:
    column = id_column(record.values)
    if column is not None:
        ids.add([record.values[column]])


def _write(path: Path, places: npt.NDArray[np.int64]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as sink:
        np.save(sink, places)
        sink.flush()
        os.fsync(sink.fileno())
    temporary.replace(path)


def is_indexed(manifest: Manifest) -> bool:
    return manifest.index is not None and os.path.exists(manifest.index)


def places_by_file(manifest: Manifest) -> list[npt.NDArray[np.int64]]:
    """Each file's part of the index.

    Raises DatasetError: there is no index, or it is not this manifest's.
    """
    if manifest.index is None:
        raise DatasetError("the rows of the input are not counted yet: the job has not started")
    sizes = [-(-(file.num_rows or 0) // INDEX_ROWS) for file in manifest.files]
    try:
        places = np.load(manifest.index, mmap_mode="r") if sum(sizes) else np.zeros((0, 2), int)
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"the index of the input, {manifest.index}, cannot be read: {error}; it is made anew "
            "when the job starts again"
        ) from error
    if places.shape != (sum(sizes), 2):
        raise DatasetError(
            f"the index of the input, {manifest.index}, has {len(places)} places, wanted are "
            f"{sum(sizes)}; delete it and start the job again"
        )
    return np.split(places, list(accumulate(sizes))[:-1])
