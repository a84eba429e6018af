"""What a job's result rows come to: how they ended, how long they are, why some failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.compute as pc

from ntx_batch.report.lengths import Lengths

COLUMNS = (
    "row_index",
    "status",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "truncated",
    "error_code",
    "error_message",
)


@dataclass(slots=True)
class Failure:
    """Rows that failed with one code. row_index, message: of the first of them"""

    code: str
    num_rows: int = 0
    row_index: int = -1
    message: str = ""


@dataclass(slots=True)
class RowFigures:
    """Sums over result rows.

    statuses, endings: how many rows have each `status`, and each `finish_reason`
    num_truncated: rows whose prompt was cut
    prompts, answers: tokens of the rows that are ok, copies among them
    failures: by error code
    """

    statuses: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    num_truncated: int = 0
    prompts: Lengths = field(default_factory=Lengths)
    answers: Lengths = field(default_factory=Lengths)
    failures: dict[str, Failure] = field(default_factory=dict)

    def by_count(self) -> list[Failure]:
        """Failures, the most frequent first."""
        return sorted(self.failures.values(), key=lambda found: (-found.num_rows, found.code))


def sum_rows(dataset: Any, prefix: str) -> RowFigures:
    """Read the few columns that count, batch by batch.

    dataset: the job's results, in any order
    prefix: of the names of our columns
    """
    figures = RowFigures()
    for batch in dataset.to_batches(columns=[prefix + name for name in COLUMNS]):
        _add(figures, dict(zip(COLUMNS, batch.columns, strict=True)))
    return figures


def _add(figures: RowFigures, columns: Mapping[str, Any]) -> None:
    figures.statuses.update(_counts(columns["status"]))
    ok = pc.equal(columns["status"], "ok")
    figures.endings.update(_counts(columns["finish_reason"].filter(ok)))
    figures.num_truncated += pc.sum(columns["truncated"]).as_py() or 0
    figures.prompts.add(_numbers(columns["prompt_tokens"].filter(ok)))
    figures.answers.add(_numbers(columns["completion_tokens"].filter(ok)))
    _add_failures(figures.failures, columns)


def _add_failures(failures: dict[str, Failure], columns: Mapping[str, Any]) -> None:
    failed = pc.equal(columns["status"], "error")
    names = ("row_index", "error_code", "error_message")
    rows = zip(*(columns[name].filter(failed).to_pylist() for name in names), strict=True)
    for row_index, code, message in rows:
        failure = failures.setdefault(code, Failure(code))
        failure.num_rows += 1
        if failure.row_index < 0 or row_index < failure.row_index:
            failure.row_index, failure.message = row_index, message or ""


def _counts(column: Any) -> dict[str, int]:
    pairs: Iterable[dict[str, Any]] = pc.value_counts(column.drop_null()).to_pylist()
    return {pair["values"]: pair["counts"] for pair in pairs}


def _numbers(column: Any) -> Any:
    return np.asarray(column.drop_null(), dtype=np.int64)
