"""Results as one file for other programs: Parquet, JSON lines or CSV, in input order.

Text formats keep every value exact: integers in full, decimals, times, uuids and nested values in
one canonical form, binary as base64, NaN and infinities by name. CSV writes null as nothing and
an empty text as "".
"""

from __future__ import annotations

import base64
import json
import math
import os
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from mmap import ACCESS_READ, mmap
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from jobs.records import FinishedRows, Job, OutputError
from jobs.remote import put
from jobs.results import Results, Schema, Table
from jobs.uris import absolute, base_name, is_uri, is_within, parse_uri

Writer = Callable[[Path, Schema, Iterable[Table]], None]


def export_results(
    finished: FinishedRows, path: str | Path, *, head: int | None = None, errors: bool = False
) -> int:
    """Write the rows finished so far to a file that ends in .parquet, .jsonl or .csv.

    finished: as the store gives it
    head: the first rows only
    errors: failed rows only
    Returns the number of rows. The file appears when it is complete; one of that name is replaced.

    Raises OutputError: another ending, a folder that is not there, the job's own input or
    results folder.
    Raises ResultsError: a part is gone.
    """
    check_target(path, finished.job)
    results = Results(finished)
    num_rows = 0

    def tables() -> Iterator[Table]:
        nonlocal num_rows
        for table in results.tables(errors=errors):
            kept = table if head is None else table.slice(0, head - num_rows)
            num_rows += kept.num_rows
            yield kept
            if num_rows == head:
                return

    export_tables(finished.job, path, results.schema, tables())
    return num_rows


def export_tables(job: Job, path: str | Path, schema: Schema, tables: Iterable[Table]) -> None:
    """Write tables that come of a job's results to one file. Raises OutputError: as above."""
    place = check_target(path, job)
    write = WRITERS[PurePosixPath(base_name(place)).suffix.lower()]
    if is_uri(place):
        _upload(place, lambda temporary: write(temporary, schema, tables))
        return
    target = Path(place)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write(temporary, schema, tables)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _upload(place: str, write: Callable[[Path], None]) -> None:
    """Write a file here, and then all of it there."""
    with tempfile.TemporaryDirectory(prefix="ntx-export-") as folder:
        temporary = Path(folder) / "export"
        write(temporary)
        with open(temporary, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            put(parse_uri(place), content)


def check_target(path: str | Path, job: Job) -> str:
    """The file to write what comes of a job to, whole. Raises OutputError: as above."""
    target = absolute(path)
    if PurePosixPath(base_name(target)).suffix.lower() not in WRITERS:
        raise OutputError(f"{path} does not say its format: end it in {', '.join(WRITERS)}")
    if is_uri(target):
        _refuse_own_uris(target, job)
    else:
        refuse_own_files(Path(target), job)
    return target


def _refuse_own_uris(target: str, job: Job) -> None:
    for place in (job.results_dir, *(file.path for file in job.manifest.files)):
        if is_within(target, place):
            raise OutputError(
                f"{target} is in the results or input of job {job.id}: write elsewhere"
            )


def refuse_own_files(target: Path, job: Job) -> None:
    """Raises OutputError: the folder is not there, or the file is one of the job's own."""
    if target.resolve().is_relative_to(job.results_dir):
        raise OutputError(f"{target} is in the results folder of job {job.id}: write elsewhere")
    for file in job.manifest.files:
        if not is_uri(file.path) and target.resolve() == Path(file.path).resolve():
            raise OutputError(f"{target} is an input file of job {job.id}: write elsewhere")
    if not target.parent.is_dir():
        raise OutputError(f"{target} cannot be written: make the folder {target.parent} first")


# ---- formats -----------------------------------------------------------------------------


def write_parquet_file(path: Path, schema: Schema, tables: Iterable[Table]) -> None:
    _refuse_types(schema)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table)


def _refuse_types(schema: Schema) -> None:
    """Raises OutputError: a column of a type that Parquet has not."""
    for field in schema:
        try:
            pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])).close()
        except pa.ArrowNotImplementedError as error:
            raise OutputError(
                f"column {field.name!r} has type {field.type}, which Parquet has not: cast it to "
                "another, or write .jsonl or .csv"
            ) from error


def write_jsonl(path: Path, schema: Schema, tables: Iterable[Table]) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as sink:
        for table in tables:
            for row in plain_rows(table):
                sink.write(_json(dict(zip(schema.names, row, strict=True))) + "\n")


def write_csv(path: Path, schema: Schema, tables: Iterable[Table]) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as sink:
        sink.write(",".join(map(_csv_cell, schema.names)) + "\n")
        for table in tables:
            for row in plain_rows(table):
                sink.write(",".join(map(_csv_cell, row)) + "\n")


WRITERS: dict[str, Writer] = {
    ".parquet": write_parquet_file,
    ".jsonl": write_jsonl,
    ".csv": write_csv,
}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else _json(value)
    if text and not any(mark in text for mark in ',"\r\n'):
        return text
    return '"' + text.replace('"', '""') + '"'


# ---- values ------------------------------------------------------------------------------


def plain_rows(table: Table) -> Iterator[tuple[Any, ...]]:
    """The table's rows, each value as one that JSON has."""
    for batch in table.to_batches():
        yield from zip(*(plain_values(column) for column in batch.columns), strict=True)


def plain_values(array: pa.Array) -> list[Any]:
    """The values of an Arrow array of any type as those that JSON has, without loss."""
    for matches, convert in _CONVERSIONS:
        if matches(array.type):
            return convert(array)
    return [None if scalar.as_py() is None else str(scalar) for scalar in array]


def _from_extension(array: pa.ExtensionArray) -> list[Any]:
    if array.type.extension_name != "arrow.uuid":
        return plain_values(array.storage)
    storage = array.storage.to_pylist()
    return [None if value is None else str(uuid.UUID(bytes=value)) for value in storage]


def _from_text(array: pa.Array) -> list[Any]:
    return [
        None if value is None else value.decode("utf-8", "replace")
        for value in array.cast(pa.large_binary()).to_pylist()
    ]


def _from_binary(array: pa.Array) -> list[Any]:
    return [
        None if value is None else base64.b64encode(value).decode() for value in array.to_pylist()
    ]


def _from_float(array: pa.Array) -> list[Any]:
    return [
        value if value is None or math.isfinite(value) else _NAMES_OF_FLOATS[str(value)]
        for value in array.to_pylist()
    ]


_NAMES_OF_FLOATS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _from_decimal(array: pa.Array) -> list[Any]:
    return [None if value is None else format(value, "f") for value in array.to_pylist()]


def _from_time(array: pa.Array) -> list[Any]:
    texts = array.cast(pa.string()).to_pylist()
    return [None if text is None else text.replace(" ", "T", 1) for text in texts]


def _from_duration(array: pa.Array) -> list[Any]:
    counts = array.cast(pa.int64()).to_pylist()
    return [None if count is None else f"{count}{array.type.unit}" for count in counts]


def _from_list(array: pa.Array) -> list[Any]:
    items = iter(plain_values(array.flatten()))
    lengths = array.value_lengths().to_pylist()
    return [None if n is None else [next(items) for _ in range(n)] for n in lengths]


def _from_fixed_size_list(array: pa.Array) -> list[Any]:
    return _from_list(array.cast(pa.list_(array.type.value_field)))


def _from_map(array: pa.Array) -> list[Any]:
    key, item = array.type.key_field, array.type.item_field
    pairs = plain_values(array.cast(pa.list_(pa.struct([key, item]))))
    return [
        None if row is None else {_key(pair[key.name]): pair[item.name] for pair in row}
        for row in pairs
    ]


def _key(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _from_struct(array: pa.StructArray) -> list[Any]:
    names = [field.name for field in array.type]
    columns = [plain_values(column) for column in array.flatten()]
    rows = zip(*columns, strict=True) if columns else [()] * len(array)
    valid = array.is_valid().to_pylist()
    return [
        dict(zip(names, row, strict=True)) if there else None
        for row, there in zip(rows, valid, strict=True)
    ]


def _is_text(data_type: pa.DataType) -> bool:
    return bool(
        types.is_string(data_type)
        or types.is_large_string(data_type)
        or types.is_string_view(data_type)
    )


def _is_binary(data_type: pa.DataType) -> bool:
    return bool(
        types.is_binary(data_type)
        or types.is_large_binary(data_type)
        or types.is_fixed_size_binary(data_type)
        or types.is_binary_view(data_type)
    )


def _is_exact(data_type: pa.DataType) -> bool:
    return bool(
        types.is_integer(data_type) or types.is_boolean(data_type) or types.is_null(data_type)
    )


def _is_time(data_type: pa.DataType) -> bool:
    return bool(
        types.is_timestamp(data_type) or types.is_date(data_type) or types.is_time(data_type)
    )


def _is_extension(data_type: pa.DataType) -> bool:
    return isinstance(data_type, pa.BaseExtensionType)


_CONVERSIONS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any], list[Any]]], ...] = (
    (_is_extension, _from_extension),
    (types.is_dictionary, lambda array: plain_values(array.dictionary_decode())),
    (_is_exact, lambda array: array.to_pylist()),
    (_is_text, _from_text),
    (types.is_floating, _from_float),
    (types.is_list, _from_list),
    (types.is_large_list, _from_list),
    (types.is_fixed_size_list, _from_fixed_size_list),
    (types.is_struct, _from_struct),
    (types.is_map, _from_map),
    (_is_binary, _from_binary),
    (types.is_decimal, _from_decimal),
    (_is_time, _from_time),
    (types.is_duration, _from_duration),
)
