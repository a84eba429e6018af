"""Rows out: the schema of results, batches for the spool, and reading what is finished.

A part holds rows from all over the input; everything read here is in input order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from engine import FinishedRow, TokenLogprob
from jobs.columns import is_json
from jobs.dataset import RowReader, bind_columns, read_schema
from jobs.prepare import RowFacts
from jobs.records import (
    RESULT_COLUMNS,
    Binding,
    DatasetError,
    FinishedRows,
    Job,
    JobSpec,
    Part,
    ResultsError,
    RowBatch,
    StorageError,
)
from jobs.remote import each, open_remote
from jobs.uris import child, is_uri

Table: TypeAlias = pa.Table
Schema: TypeAlias = pa.Schema
RecordBatch: TypeAlias = pa.RecordBatch

WINDOW_ROWS = 8192


def _list_of(item: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", item))  # the name that Parquet gives it


LOGPROB_TYPE = pa.struct(
    [
        ("token_id", pa.int32()),
        ("logprob", pa.float32()),
        ("top", _list_of(pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())]))),
    ]
)
_TYPES = (
    pa.int64(),  # row_index
    pa.int32(),  # sample_index
    pa.string(),  # status: ok, error; cancelled only where results are read
    pa.string(),  # generated_text
    pa.string(),  # finish_reason: stop, length
    pa.string(),  # stop_reason: which stop text or token id
    pa.int32(),  # prompt_tokens
    pa.int32(),  # completion_tokens
    pa.int32(),  # reused_tokens
    pa.bool_(),  # truncated
    pa.int32(),  # original_prompt_tokens: before the cut
    pa.string(),  # sampling_params: JSON, as used
    _list_of(LOGPROB_TYPE),  # logprobs: one for each generated token
    pa.int64(),  # duplicate_of
    pa.bool_(),  # json_valid
    pa.string(),  # warnings: JSON
    pa.string(),  # error_code
    pa.string(),  # error_message
)
RESULT_FIELDS = tuple(
    pa.field(name, data_type) for name, data_type in zip(RESULT_COLUMNS, _TYPES, strict=True)
)


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One finished row with all that goes into its result.

    carried: its carried input columns as a batch of one row
    replaced: input columns in which bytes that are not UTF-8 were replaced
    duplicate_of: index of the row that was computed, where this one is a copy
    """

    finished: FinishedRow
    facts: RowFacts
    carried: RecordBatch
    replaced: tuple[str, ...] = ()
    duplicate_of: int | None = None

    @property
    def is_computed(self) -> bool:
        """Whether its tokens are work that was done for it."""
        return self.duplicate_of is None and self.finished.status == "ok"


# ---- the schema --------------------------------------------------------------------------


def result_schema(input_schema: Schema, binding: Binding, spec: JobSpec) -> Schema:
    """Carried input columns with their types, then our own columns, with the spec's prefix."""
    carried = [_carried_field(input_schema.field(name)) for name in binding.carried]
    own = [field.with_name(spec.output_prefix + field.name) for field in RESULT_FIELDS]
    return pa.schema([*carried, *own])


def _carried_field(field: pa.Field) -> pa.Field:
    return (field.remove_metadata() if is_json(field) else field).with_nullable(True)


def job_schema(job: Job) -> Schema:
    """The result schema of a job, from its input.

    Of a job that has yet to get its input it has our own columns alone.

    Raises DatasetError, SpecError: the input is gone or has changed.
    """
    if not job.manifest.files:
        return result_schema(pa.schema([]), Binding(source="template", column=""), job.spec)
    input_schema = read_schema(job.manifest)
    return result_schema(input_schema, bind_columns(job.spec, input_schema), job.spec)


# ---- batches for the spool ---------------------------------------------------------------


def build_row_batch(schema: Schema, rows: Sequence[ResultRow]) -> RowBatch:
    """Finished rows as a batch for the spool.

    schema: the job's result schema; what a row carries must be its first columns
    """
    num_carried = len(schema) - len(RESULT_FIELDS)
    carried = _carried_columns(pa.schema(list(schema)[:num_carried]), rows)
    values = zip(*(_own_values(row) for row in rows), strict=True) if rows else [()] * len(_TYPES)
    own = [pa.array(column, kind) for column, kind in zip(values, _TYPES, strict=True)]
    table = pa.Table.from_arrays([*carried, *own], schema=schema)
    finished = [row.finished for row in rows]
    computed = [row.finished for row in rows if row.is_computed]
    return RowBatch(
        row_indices=tuple(row.row_index for row in finished),
        sample_indices=tuple(row.sample_index for row in finished),
        num_ok=sum(row.status == "ok" for row in finished),
        num_error=sum(row.status == "error" for row in finished),
        prompt_tokens=sum(row.prompt_tokens for row in computed),
        completion_tokens=sum(row.completion_tokens for row in computed),
        reused_tokens=sum(row.reused_tokens for row in computed),
        num_copied=sum(row.duplicate_of is not None for row in rows),
        ipc=_to_ipc(table),
    )


def _carried_columns(schema: Schema, rows: Sequence[ResultRow]) -> list[pa.ChunkedArray]:
    if not len(schema):
        return []
    batches = [pa.record_batch(row.carried.columns, schema=schema) for row in rows]
    table = pa.Table.from_batches(batches, schema=schema)
    columns: list[pa.ChunkedArray] = table.unify_dictionaries().combine_chunks().columns
    return columns


def _own_values(row: ResultRow) -> tuple[Any, ...]:
    """Values of RESULT_COLUMNS in their order. What an error row never had is null, not 0."""
    finished, facts = row.finished, row.facts
    ok = finished.status == "ok"
    return (
        finished.row_index,
        finished.sample_index,
        finished.status,
        _utf8(finished.text) if ok or finished.text else None,
        finished.finish_reason,
        _utf8(finished.stop_reason),
        finished.prompt_tokens if ok else finished.prompt_tokens or None,
        finished.completion_tokens if ok else finished.completion_tokens or None,
        finished.reused_tokens if ok else finished.reused_tokens or None,
        facts.truncated,
        facts.original_prompt_tokens,
        facts.sampling_params,
        _logprob_values(finished.logprobs),
        row.duplicate_of,
        None,
        _warnings_json(row),
        finished.error_code,
        _utf8(finished.error_message),
    )


def _warnings_json(row: ResultRow) -> str | None:
    warnings = dict(row.finished.warnings)
    if row.replaced:
        warnings["replaced_utf8"] = list(row.replaced)
    if row.facts.lost_prompt_bytes:
        warnings["lost_prompt_bytes"] = row.facts.lost_prompt_bytes
    return json.dumps(warnings, sort_keys=True) if warnings else None


def _utf8(text: str | None) -> str | None:
    """Text that Arrow can hold: a lone surrogate, as from JSON input, becomes `?`."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def _logprob_values(logprobs: Sequence[TokenLogprob] | None) -> list[dict[str, Any]] | None:
    if logprobs is None:
        return None
    return [
        {
            "token_id": token.token_id,
            "logprob": token.logprob,
            "top": [{"token_id": other, "logprob": value} for other, value in token.top],
        }
        for token in logprobs
    ]


def _to_ipc(table: Table) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def blob_table(blob: bytes) -> Table:
    """The rows of a batch's `ipc`. Raises ResultsError: it is damaged."""
    try:
        with pa.ipc.open_stream(blob) as stream:
            return stream.read_all()
    except (pa.ArrowException, OSError) as error:
        raise ResultsError(
            f"a batch of finished rows in the state database is damaged: {error}; restore the "
            "database from a copy"
        ) from error


# ---- reading -----------------------------------------------------------------------------


def open_parquet(path: str) -> pq.ParquetFile:
    """A part, of which ranges are read as they are asked for.

    Raises OSError, StorageError, pyarrow.ArrowException: it cannot be read.
    """
    if not is_uri(path):
        return pq.ParquetFile(path, pre_buffer=False)
    # Row groups of parts are small: the columns of one are asked for at once, not one by one.
    return pq.ParquetFile(pa.PythonFile(open_remote(path)), pre_buffer=True)


def read_results(finished: FinishedRows, *, head: int | None = None, errors: bool = False) -> Table:
    """The rows finished so far in input order; rows that a cancelled job left are `cancelled`.

    finished: as the store gives it
    head: the first rows only
    errors: failed rows only

    Raises ResultsError: a part is gone, or is not what the store says.
    """
    results = Results(finished)
    tables, num_rows = [], 0
    for table in results.tables(errors=errors):
        tables.append(table)
        num_rows += table.num_rows
        if head is not None and num_rows >= head:
            break
    whole = pa.concat_tables([results.schema.empty_table(), *tables])
    return whole if head is None else whole.slice(0, head)


@dataclass(frozen=True, slots=True)
class _Source:
    """A piece of the results, in no order: rows of [first_row, last_row]."""

    first_row: int
    last_row: int
    load: Callable[[], Table]


class Results:
    """The finished rows of a job at one instant, read window by window of the input's order.

    A failed row that a retry finished is shown as the retry has it.

    window_rows: input rows of one table that comes out
    schema: of every such table

    Raises ResultsError: as read_results.
    """

    def __init__(self, finished: FinishedRows, *, window_rows: int = WINDOW_ROWS) -> None:
        self._job = finished.job
        self._selection = finished.selection
        self._window_rows = window_rows
        self._cached: dict[int, Table] = {}
        prefix = finished.job.spec.output_prefix
        self._row_column, self._sample_column = prefix + "row_index", prefix + "sample_index"
        self._status_column = prefix + "status"
        self.schema = self._find_schema(finished)
        filled = [part for part in finished.parts if part.num_rows]
        footers = each(self._footer, filled) if is_uri(self._job.results_dir) else None
        self._sources = [
            source
            for idx, part in enumerate(filled)
            for source in self._part_sources(part, footers[idx] if footers else self._footer(part))
        ] + [source for blob in finished.blobs for source in self._blob_sources(blob)]
        self._retries = [Results(retry, window_rows=window_rows) for retry in finished.retries]

    def tables(self, *, errors: bool = False) -> Iterator[Table]:
        """Tables in input order, each of one window of input rows, none of them empty.

        errors: failed rows only
        """
        for begin in range(0, self._end(), self._window_rows):
            end = begin + self._window_rows
            table = self._window(begin, end)
            for retry in self._retries:
                table = self._with_retried(table, retry._window(begin, end), begin)
            if errors:
                table = table.filter(pc.equal(table.column(self._status_column), "error"))
            if table.num_rows:
                yield table

    def _end(self) -> int:
        last = max((source.last_row for source in self._sources), default=-1)
        planned = (self._job.total or 0) // self._job.spec.samples
        if self._selection is not None and len(self._selection):
            planned = int(self._selection[-1, 0]) + 1
        return max(last + 1, planned if self._job.state == "cancelled" else 0)

    def _planned_keys(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Keys of the job's output rows in the window [begin, end), finished or not."""
        if self._selection is None:
            samples = self._job.spec.samples
            outputs = np.arange(begin * samples, min(end * samples, self._job.total or 0))
            return _window_keys(outputs // samples, outputs % samples, begin)
        rows, sample_indices = self._selection.T
        inside = (rows >= begin) & (rows < end)
        return _window_keys(rows[inside], sample_indices[inside], begin)

    def _window(self, begin: int, end: int) -> Table:
        """Rows [begin, end), sorted. Windows are asked for in order."""
        cached = self._cached
        pieces = [self.schema.empty_table()]
        for idx, source in enumerate(self._sources):
            if source.first_row < end and source.last_row >= begin:
                if idx not in cached:
                    cached[idx] = source.load()
                rows = self._row_indices(cached[idx])
                pieces.append(cached[idx].filter(pa.array((rows >= begin) & (rows < end))))
        table = pa.concat_tables(pieces)
        if self._job.state == "cancelled":
            left = np.setdiff1d(self._planned_keys(begin, end), self._keys(table, begin))
            table = pa.concat_tables([table, self._cancelled(left, begin)])
        for idx in [idx for idx in cached if self._sources[idx].last_row < end]:
            del cached[idx]
        return self._sorted(table)

    def _with_retried(self, table: Table, retried: Table, begin: int) -> Table:
        """The rows of a window, those replaced that failed here and are ok in a retry."""
        better = retried.filter(pc.equal(retried.column(self._status_column), "ok"))
        failed = table.filter(pc.equal(table.column(self._status_column), "error"))
        taken = np.intersect1d(self._keys(failed, begin), self._keys(better, begin))
        if not len(taken):
            return table
        kept = table.filter(pa.array(~np.isin(self._keys(table, begin), taken)))
        better = better.filter(pa.array(np.isin(self._keys(better, begin), taken)))
        return self._sorted(pa.concat_tables([kept, self._conform(better)]))

    def _keys(self, table: Table, begin: int) -> npt.NDArray[np.int64]:
        samples: npt.NDArray[np.int64] = table.column(self._sample_column).to_numpy()
        return _window_keys(self._row_indices(table), samples, begin)

    def _sorted(self, table: Table) -> Table:
        if not table.num_rows:
            return table
        keys = [(self._row_column, "ascending"), (self._sample_column, "ascending")]
        order = pc.sort_indices(table.select([key for key, _ in keys]), sort_keys=keys)
        return table.unify_dictionaries().combine_chunks().take(order)

    def _row_indices(self, table: Table) -> npt.NDArray[np.int64]:
        indices: npt.NDArray[np.int64] = table.column(self._row_column).to_numpy()
        return indices

    def _find_schema(self, finished: FinishedRows) -> Schema:
        for part in finished.parts[:1]:
            with self._open(part) as parquet:
                return parquet.schema_arrow.remove_metadata()
        for blob in finished.blobs[:1]:
            return blob_table(blob).schema
        return job_schema(finished.job)

    def _open(self, part: Part) -> pq.ParquetFile:
        path = child(self._job.results_dir, part.name)
        why = f"; {self._job.reason}" if self._job.reason else ""
        try:
            parquet = open_parquet(path)
        except FileNotFoundError as error:
            raise ResultsError(f"job {self._job.id}: results part {path} is gone{why}") from error
        except (OSError, pa.ArrowException) as error:
            raise ResultsError(
                f"job {self._job.id}: results part {path} cannot be read: {error}{why}"
            ) from error
        if parquet.metadata.num_rows != part.num_rows:
            raise ResultsError(
                f"job {self._job.id}: results part {path} has {parquet.metadata.num_rows} rows, "
                f"was published with {part.num_rows}: something else wrote to it"
            )
        return parquet

    def _footer(self, part: Part) -> pq.FileMetaData:
        with self._open(part) as parquet:
            return parquet.metadata

    def _part_sources(self, part: Part, metadata: pq.FileMetaData) -> Iterator[_Source]:
        leaves = [metadata.schema.column(idx).path for idx in range(metadata.num_columns)]
        column = leaves.index(self._row_column)
        for idx in range(metadata.num_row_groups):
            statistics = metadata.row_group(idx).column(column).statistics
            yield _Source(statistics.min, statistics.max, self._group_loader(part, idx))

    def _group_loader(self, part: Part, group: int) -> Callable[[], Table]:
        def load() -> Table:
            with self._open(part) as parquet:
                return self._conform(parquet.read_row_group(group, use_threads=False))

        return load

    def _blob_sources(self, blob: bytes) -> Iterator[_Source]:
        rows = self._row_indices(blob_table(blob))
        if len(rows):
            first_row, last_row = int(rows.min()), int(rows.max())
            yield _Source(first_row, last_row, lambda: self._conform(blob_table(blob)))

    def _conform(self, table: Table) -> Table:
        return pa.Table.from_arrays(table.columns, schema=self.schema)

    def _cancelled(self, keys: npt.NDArray[np.int64], begin: int) -> Table:
        """Result rows for what a cancelled job left; carried columns as far as it can.

        keys: ascending, of the window that begins at row `begin`
        """
        rows = begin + (keys >> 32)
        own = {
            self._row_column: pa.array(rows),
            self._sample_column: pa.array((keys & 0xFFFFFFFF).astype(np.int32)),
            self._status_column: pa.array(["cancelled"] * len(rows), pa.string()),
        }
        carried = self._carried(rows)
        columns = [
            own.get(field.name, carried.get(field.name, pa.nulls(len(rows), field.type)))
            for field in self.schema
        ]
        return pa.Table.from_arrays(columns, schema=self.schema)

    def _carried(self, rows: npt.NDArray[np.int64]) -> dict[str, pa.ChunkedArray]:
        names = self.schema.names[: len(self.schema) - len(RESULT_FIELDS)]
        if not names or not len(rows):
            return {}
        begin, end = int(rows[0]), int(rows[-1]) + 1
        try:
            with RowReader(self._job.manifest, names) as reader:
                batches = [batch.table for _, batch in reader.read(begin, end)]
        except (DatasetError, StorageError):
            # The input is gone: the rows are still there, with their numbers.
            return {}
        table = pa.Table.from_batches(batches).take(pa.array(rows - begin))
        return dict(zip(names, table.columns, strict=True))


def _window_keys(
    rows: npt.NDArray[np.int64], samples: npt.NDArray[np.int64], begin: int
) -> npt.NDArray[np.int64]:
    """Row and sample indices as one number each, for the window that begins at row `begin`."""
    return (rows - begin) << 32 | samples
