"""Results as a dataset: parts stay on disk until they are read, and columns apart."""

from __future__ import annotations

from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from jobs.records import FinishedRows
from jobs.remote import locate
from jobs.results import Results, Schema, Table, blob_table
from jobs.uris import child, is_uri, parse_uri

Dataset: TypeAlias = ds.Dataset


def open_dataset(finished: FinishedRows) -> Dataset:
    """The rows of `jobs.results.read_results`, in no order.

    finished: as the store gives it; rows that no part has yet are held in memory, and so are those
        that a retry brought or that a cancelled job left

    Raises ResultsError: a part is gone, or is not what the store says.
    """
    results = Results(finished)
    stored = _stored_rows(finished, results.schema)
    if finished.job.state != "cancelled" and not finished.retries:
        return stored
    return _with_later_rows(stored, finished, results)


def _stored_rows(finished: FinishedRows, schema: Schema) -> Dataset:
    folder = finished.job.results_dir
    paths = [child(folder, part.name) for part in finished.parts if part.num_rows]
    spooled = [_of_schema(blob_table(blob), schema) for blob in finished.blobs]
    in_memory = _in_memory(pa.concat_tables([schema.empty_table(), *spooled]))
    if not paths:
        return in_memory
    return ds.dataset([_of_files(paths, schema), in_memory])


def _of_files(paths: list[str], schema: Schema) -> Dataset:
    if not is_uri(paths[0]):
        return ds.dataset(paths, schema=schema, format="parquet")
    places = [locate(parse_uri(path)) for path in paths]
    return ds.dataset(
        [path for _, path in places], schema=schema, format="parquet", filesystem=places[0][0]
    )


def _with_later_rows(stored: Dataset, finished: FinishedRows, results: Results) -> Dataset:
    """Those of the retries take the place of failed ones; those never run come as cancelled."""
    spec = finished.job.spec
    status, row, sample = (
        pc.field(spec.output_prefix + name) for name in ("status", "row_index", "sample_index")
    )
    key = row * spec.samples + sample.cast(pa.int64())
    failed = status == "error"
    keys = stored.to_table(columns={"key": key}, filter=failed).column("key")
    comes_later = (status == "cancelled") | ((status == "ok") & key.isin(keys))
    later = [table.filter(comes_later) for table in results.tables()]
    mended = pa.concat_tables([results.schema.empty_table(), *later])
    mended_keys = ds.dataset(mended).to_table(columns={"key": key}).column("key")
    kept: Dataset = ds.dataset([stored, _in_memory(mended)]).filter(
        ~(failed & key.isin(mended_keys))
    )
    return kept


def _in_memory(table: Table) -> Dataset:
    return ds.dataset(table.combine_chunks())


def _of_schema(table: Table, schema: Schema) -> Table:
    return pa.Table.from_arrays(table.columns, schema=schema)
