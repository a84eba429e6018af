"""SQLite as the store uses it: one connection, its transactions, its errors, its versions."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from jobs.records import DiskFullError, StoreError
from jobs.sql import QUERIES, SCHEMA, STEPS

BUSY_TIMEOUT_S = 60.0
WAL_KEPT_NBYTES = 64 << 20
# The last two: the index of the write-ahead log cannot grow, the log itself cannot be written.
_DISK_FULL = ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE", "SQLITE_IOERR_WRITE")

Row: TypeAlias = sqlite3.Row


class ConflictError(StoreError):
    """A constraint of the schema refuses a write."""


class Database:
    """One connection to a database file, created or brought up to date where needed.

    Use it in the thread that made it; other threads and processes open their own. Queries go by
    their names in sql/queries.sql.

    Raises StoreError: the file cannot be opened or is of a later version.
    """

    def __init__(self, path: Path, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        self.path = path
        with self._errors("cannot be opened"):
            self._connection = sqlite3.connect(path, timeout=busy_timeout_s, isolation_level=None)
        self._connection.row_factory = sqlite3.Row
        try:
            with self._errors("cannot be opened"):
                self._set_up(busy_timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()

    # ---- transactions --------------------------------------------------------------------

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """All writes within happen, or none. Waits for other writers up to the busy timeout.

        Within another it is a part of that one; an error must then leave both.

        Raises StoreError: SQLite's own words and which database; nothing was written.
        """
        if self._connection.in_transaction:
            yield
            return
        # NOTE: a plain BEGIN that turns into a write fails at once under contention.
        with self._errors("refuses a write"), self._transaction("BEGIN IMMEDIATE"):
            yield

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """All reads within see one state of the database."""
        with self._errors("cannot be read"), self._transaction("BEGIN"):
            yield

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        self._connection.execute(begin)
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            # A full disk may have rolled back already.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    # ---- queries -------------------------------------------------------------------------

    def insert(self, query: str, **values: Any) -> int:
        """Insert a row and return its number. Raises ConflictError: a constraint forbids it."""
        with self._errors("refuses a write"):
            row_id = self._connection.execute(QUERIES[query], values).lastrowid
        assert row_id is not None
        return row_id

    def run(self, query: str, **values: Any) -> None:
        self.rows(query, **values)

    def rows(self, query: str, **values: Any) -> list[Row]:
        with self._errors("refuses a query"):
            return self._connection.execute(QUERIES[query], values).fetchall()

    def row(self, query: str, **values: Any) -> Row | None:
        rows = self.rows(query, **values)
        return rows[0] if rows else None

    def one(self, query: str, **values: Any) -> Any:
        """The first value of the only row."""
        (row,) = self.rows(query, **values)
        return row[0]

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", type(error).__name__)
            kind = StoreError
            if isinstance(error, sqlite3.IntegrityError):
                kind = ConflictError
            elif name in _DISK_FULL:
                kind = DiskFullError
            raise kind(f"state database {self.path} {what}: {error} ({name})") from error

    # ---- opening -------------------------------------------------------------------------

    def _set_up(self, busy_timeout_s: float) -> None:
        self._use_wal(busy_timeout_s)
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("PRAGMA foreign_keys = ON")
        self._connection.execute(f"PRAGMA journal_size_limit = {WAL_KEPT_NBYTES}")
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version > len(STEPS):
            raise StoreError(
                f"state database {self.path} has version {version}, this program knows up to "
                f"{len(STEPS)}: use the newer ntx-batch that wrote it"
            )
        if version < len(STEPS):
            migrate(self._connection)

    def _use_wal(self, timeout_s: float) -> None:
        # NOTE: SQLite does not wait for others here, so several first openers would fail.
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


def migrate(db: sqlite3.Connection, schema: str = SCHEMA, steps: tuple[str, ...] = STEPS) -> None:
    """Bring a database to the newest version: an empty one at once, an older one step by step.

    Another process may do so at the same time: one of the two then finds nothing left to do.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        for script in [schema] if version == 0 else steps[version:]:
            for statement in _statements(script):
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {len(steps)}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def _statements(script: str) -> Iterator[str]:
    """The statements of a script; executescript would end the transaction around it."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
