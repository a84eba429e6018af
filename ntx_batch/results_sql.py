"""One SELECT over a job's results, by DuckDB, which sees nothing else of this machine."""

from __future__ import annotations

from collections import Counter
from typing import Any

from jobs.records import JobError, SpecError

TABLE_NAME = "results"
_INSTALL = "SQL needs DuckDB: pip install 'ntx-batch[sql]', or pip install duckdb"


def query_dataset(dataset: Any, sql: str) -> Any:
    """The answer as a pyarrow.Table; `dataset` is the table `results`, which has no order.

    Files, the network and other tables are out of reach, and nothing outlives the query.

    Raises SpecError: it is not one SELECT, or DuckDB refuses it, in its own words.
    Raises JobError: DuckDB is not installed.
    """
    try:
        import duckdb
    except ImportError as error:
        raise JobError(_INSTALL) from error
    try:
        _check_select(duckdb, sql)
        with _connect(duckdb, dataset) as connection:
            answer = connection.sql(sql).to_arrow_table()
    except duckdb.Error as error:
        raise SpecError(f"--sql: {error}") from error
    _check_names(answer.column_names)
    return answer


def _connect(duckdb: Any, dataset: Any) -> Any:
    # Unless told so, it takes the caller's variables for tables, and the current folder for its
    # temporary files.
    config = {"python_enable_replacements": "false", "temp_directory": ""}
    connection = duckdb.connect(":memory:", config=config)
    connection.register(TABLE_NAME, dataset)
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _check_select(duckdb: Any, sql: str) -> None:
    statements = duckdb.extract_statements(sql)
    kinds = [statement.type for statement in statements]
    if kinds != [duckdb.StatementType.SELECT]:
        found = ", ".join(kind.name for kind in kinds) or "nothing"
        raise SpecError(f"--sql takes one SELECT, this is {found}: {sql.strip()!r}")


def _check_names(names: list[str]) -> None:
    double = [name for name, count in Counter(names).items() if count > 1]
    if double:
        raise SpecError(
            f"--sql: the answer has more than one column {double[0]!r}; tell them apart with AS"
        )
