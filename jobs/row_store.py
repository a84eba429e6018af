"""Finished rows in the state database: first in the spool, then in parts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from jobs.database import ConflictError, Database
from jobs.records import Part, RowBatch, SpoolSize, StoreError
from jobs.row_keys import key_array, pack_keys, unpack_keys

MAX_ROW_INDEX = (1 << 63) - 1


class RowStore:
    """The rows of all jobs that are finished, each kept once. See `JobStore`, which opens it."""

    def __init__(self, db: Database, clock: Callable[[], float]) -> None:
        self._db = db
        self._clock = clock

    def commit_batch(self, job_id: str, batch: RowBatch) -> int:
        """Keep finished rows for good, and count them, in one transaction.

        Returns the number of rows of the job that are finished now.

        Raises StoreError: one of the rows is finished already, or there are more than the total;
            then nothing of the batch is kept.
        """
        with self._db.atomic():
            self._refuse_published_rows(job_id, batch)
            batch_id = self._db.insert(
                "insert_spool_batch",
                job_id=job_id,
                num_rows=len(batch.row_indices),
                now=self._clock(),
                ipc=batch.ipc,
            )
            for row, sample in zip(batch.row_indices, batch.sample_indices, strict=True):
                self._insert_spool_row(job_id, row, sample, batch_id)
            return self._count(job_id, batch)

    def done_keys(
        self, job_id: str, begin: int = 0, end: int = MAX_ROW_INDEX
    ) -> npt.NDArray[np.int64]:
        """(n, 2) row and sample indices of what is finished of the rows [begin, end), ascending.

        Memory is bounded by the range and by the parts that reach into it.
        """
        with self._db.snapshot():
            keys = self._done_keys(job_id, begin, end)
        keys = keys[(keys[:, 0] >= begin) & (keys[:, 0] < end)]
        return keys[np.lexsort((keys[:, 1], keys[:, 0]))]

    def spool_size(self, job_id: str) -> SpoolSize:
        """What is finished and in no part, not even a publishing one."""
        row = self._db.row("select_spool_size", job_id=job_id)
        assert row is not None
        return SpoolSize(**dict(row))

    def spool(self, job_id: str) -> list[bytes]:
        """Arrow IPC streams of the rows in no committed part, in the order they came."""
        return [row["ipc"] for row in self._db.rows("select_spool_blobs", job_id=job_id)]

    def begin_part(self, job_id: str) -> tuple[Part, list[bytes]]:
        """Announce the next part with all rows that no other has taken; they stay in the spool.

        Part 0 is always empty: it shows the schema before there are rows.
        Returns the part, `publishing`, and its rows as Arrow IPC streams.
        """
        with self._db.atomic():
            number = self._db.one("select_next_part_number", job_id=job_id)
            taken = self._db.rows("select_untaken_rows", job_id=job_id) if number else []
            keys = key_array(taken)
            self._db.insert(
                "insert_part",
                job_id=job_id,
                number=number,
                name=part_name(job_id, number),
                num_rows=len(keys),
                first_row=int(keys[0, 0]) if len(keys) else None,
                last_row=int(keys[-1, 0]) if len(keys) else None,
                row_keys=pack_keys(keys),
            )
            if number:
                self._db.run("take_spool_batches", job_id=job_id, number=number)
            return self._with_blobs(job_id, number)

    def unfinished_parts(self, job_id: str) -> list[tuple[Part, list[bytes]]]:
        """Parts announced and not committed, whose files may be there or not, with their rows."""
        with self._db.snapshot():
            publishing = [part for part in self.parts(job_id) if part.state == "publishing"]
            return [self._with_blobs(job_id, part.number) for part in publishing]

    def commit_part(self, job_id: str, number: int) -> None:
        """The part's file is published: its rows leave the spool, in one transaction.

        Raises StoreError: no such part is publishing.
        """
        with self._db.atomic():
            if self._db.row("commit_part", job_id=job_id, number=number) is None:
                raise StoreError(f"job {job_id} has no part {number} that is being published")
            self._db.run("delete_part_batches", job_id=job_id, number=number)

    def parts(self, job_id: str) -> list[Part]:
        """All parts of a job by number."""
        return [Part(**dict(row)) for row in self._db.rows("select_parts", job_id=job_id)]

    # Steps of the above

    def _insert_spool_row(
        self, job_id: str, row_index: int, sample_index: int, batch_id: int
    ) -> None:
        try:
            self._db.insert(
                "insert_spool_row",
                job_id=job_id,
                row_index=row_index,
                sample_index=sample_index,
                batch_id=batch_id,
            )
        except ConflictError as error:
            raise StoreError(
                f"job {job_id}: row {row_index} sample {sample_index} is in the spool already, "
                f"or is negative ({error})"
            ) from error

    def _refuse_published_rows(self, job_id: str, batch: RowBatch) -> None:
        if not batch.row_indices:
            return
        begin, end = min(batch.row_indices), max(batch.row_indices) + 1
        new = set(zip(batch.row_indices, batch.sample_indices, strict=True))
        for row in self._db.rows("select_part_keys", job_id=job_id, begin=begin, end=end):
            keys = unpack_keys(row["row_keys"])
            near = keys[(keys[:, 0] >= begin) & (keys[:, 0] < end)]
            again = sorted(new.intersection(map(tuple, near.tolist())))
            if again:
                raise StoreError(
                    f"job {job_id}: row {again[0][0]} sample {again[0][1]} is in a part already"
                )

    def _count(self, job_id: str, batch: RowBatch) -> int:
        return int(
            self._db.one(
                "add_counts",
                id=job_id,
                num_ok=batch.num_ok,
                num_error=batch.num_error,
                prompt_tokens=batch.prompt_tokens,
                completion_tokens=batch.completion_tokens,
                reused_tokens=batch.reused_tokens,
                num_copied=batch.num_copied,
            )
        )

    def _done_keys(self, job_id: str, begin: int, end: int) -> npt.NDArray[np.int64]:
        spooled = self._db.rows("select_spool_rows", job_id=job_id, begin=begin, end=end)
        packed = self._db.rows("select_part_keys", job_id=job_id, begin=begin, end=end)
        return np.concatenate([key_array(spooled), *(unpack_keys(row[0]) for row in packed)])

    def _with_blobs(self, job_id: str, number: int) -> tuple[Part, list[bytes]]:
        rows = self._db.rows("select_part_blobs", job_id=job_id, number=number)
        return self.parts(job_id)[number], [row["ipc"] for row in rows]


def part_name(job_id: str, number: int) -> str:
    """The file name of a part; it depends on these two alone."""
    return f"part-{number:05d}-{job_id}.parquet"
