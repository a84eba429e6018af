"""Reading whole inputs, for tests of their formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine import RowError
from jobs.dataset import RowReader, build_manifest, count_rows
from jobs.id_counts import IdCounter
from jobs.records import Manifest


def manifest_of(path: str | Path, folder: Path, **options: Any) -> Manifest:
    """The manifest of an input, its rows counted. folder: for the index"""
    on_bad_utf8 = options.get("on_bad_utf8", "error")
    return count_rows(build_manifest(path, **options), folder / "job", on_bad_utf8)


def table_of(manifest: Manifest, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """All rows as they go to the results."""
    with RowReader(manifest, columns) as reader:
        batches = [batch.table for _, batch in reader.read(0, manifest.num_rows or 0)]
    return [row for batch in batches for row in batch.to_pylist()]


def values_of(manifest: Manifest, names: Sequence[str], on_bad_utf8: Any = "error") -> list[Any]:
    """The values of all rows, as a job gets them: dicts, or the code and text of an error."""
    with RowReader(manifest, (), values=names, on_bad_utf8=on_bad_utf8) as reader:
        batches = [batch for _, batch in reader.read(0, manifest.num_rows or 0)]
    return [shown(row) for batch in batches for row in batch.values]


def shown(row: Any) -> Any:
    return (row.code, str(row)) if isinstance(row, RowError) else row


def types_of(manifest: Manifest) -> dict[str, str]:
    with RowReader(manifest) as reader:
        return {field.name: str(field.type) for field in reader.schema}


def id_facts(path: Path, folder: Path, max_rows: int | None = None) -> dict[str, int]:
    ids = IdCounter(max_rows)
    count_rows(build_manifest(path), folder / "job", ids=ids)
    return ids.facts()
