"""Making part files appear in a results folder: whole, on disk, and only under their final name.

Readers differ in the names they ignore, so the folder never holds anything but complete parts. A
file is written without a name (O_TMPFILE), or in a sibling folder where the file system cannot do
that, and linked to its name once it is on the disk. A store gets it as one object, made in memory,
which appears when its upload is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.files import exists, is_file, names_in
from jobs.records import RESULT_COLUMNS, Job, OutputError, Part, ResultsError
from jobs.remote import put
from jobs.results import Schema, Table, blob_table, job_schema, open_parquet
from jobs.specs import spec_to_json
from jobs.uris import child, is_uri, parse_uri
from kernels import __version__

# Rows come from all over the job's window. Sorted in long runs and written in short groups, few
# groups are needed for a stretch of the input.
RUN_NBYTES, ROW_GROUP_NBYTES = 32 << 20, 4 << 20
_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)

Write = Callable[[BinaryIO], None]


def publish_part(job: Job, part: Part, blobs: Sequence[bytes]) -> None:
    """Make a part's file from its spooled rows. Done again, it finds the file and accepts it.

    Raises ResultsError: a file of that name is there and is not this part.
    Raises OSError: disk full and the like, with the file's path; then nothing has appeared.
    Raises StorageError: a store refuses or does not answer; then nothing has appeared.
    """
    target = child(job.results_dir, part.name)
    if not exists(target):
        schema = blob_table(blobs[0]).schema if blobs else job_schema(job)
        facts = part_facts(job, part)
        publish_file(target, lambda sink: write_parquet(sink, blobs, schema, facts))
    check_part(target, job, part)
    if not is_uri(target):
        # Also where the file was found: its name may not be on the disk yet.
        _sync_folder(Path(target).parent)


def give_back_unused() -> None:
    """Let the system have what Arrow and the C library keep of memory that is not in use.

    Both keep most of it, in pieces that the next large buffers do not fit into.
    """
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def part_facts(job: Job, part: Part) -> dict[str, str]:
    """What a part's footer says of it."""
    return {
        "ntx_batch.job": job.id,
        "ntx_batch.part": str(part.number),
        "ntx_batch.version": __version__,
        "ntx_batch.spec": spec_to_json(job.spec),
    }


def check_part(path: str | Path, job: Job, part: Part) -> None:
    """Raise ResultsError where a file is not this part: another footer, other rows, damaged."""
    try:
        metadata = _read_metadata(str(path))
    except (OSError, pa.ArrowException) as error:
        raise ResultsError(f"{path} is in the way of part {part.number}: {error}") from error
    footer = metadata.metadata or {}
    for what, wanted, found in (
        ("job", job.id, footer.get(b"ntx_batch.job", b"none").decode(errors="replace")),
        ("part", str(part.number), footer.get(b"ntx_batch.part", b"none").decode(errors="replace")),
        ("number of rows", str(part.num_rows), str(metadata.num_rows)),
    ):
        if wanted != found:
            raise ResultsError(
                f"{path} is in the way of part {part.number} of job {job.id}: its {what} is "
                f"{found}, wanted is {wanted}; move it elsewhere"
            )


def _read_metadata(path: str) -> pq.FileMetaData:
    with open_parquet(path) as parquet:
        return parquet.metadata


def part_owner(path: str | Path) -> str | None:
    """The job that a file is a part of, by its footer; None where it is no part of ours."""
    try:
        footer = _read_metadata(str(path)).metadata or {}
    except (OSError, pa.ArrowException):
        return None
    owner = footer.get(b"ntx_batch.job")
    return None if owner is None else str(owner, "utf-8", "replace")


def claim_folder(folder: str | Path, job_id: str | None = None) -> None:
    """Make sure that a results folder is there and holds nothing but parts of this job.

    job_id: None, before there is a job, wants it empty or absent, and does not create it

    Raises OutputError: something else is in it, or it is a file.
    Raises StorageError: a store refuses, has not the bucket, or does not answer.
    """
    place = str(folder)
    if is_file(place):
        raise OutputError(f"results folder {place} is a file; name a folder")
    ours = f"-{job_id}.parquet"
    for name in names_in(place):
        if job_id is None or not (name.startswith("part-") and name.endswith(ours)):
            raise OutputError(
                f"results folder {place} is not empty: it has {name}; name a new folder with -o, "
                "or remove what other jobs wrote there with --overwrite"
            )
    if job_id is not None and not is_uri(place) and not exists(place):
        Path(place).mkdir(parents=True)
        _sync_folder(Path(place).parent)


# ---- the file's content ------------------------------------------------------------------


def write_parquet(
    sink: BinaryIO, blobs: Iterable[bytes], schema: Schema, facts: dict[str, str]
) -> None:
    """Write spooled batches as one Parquet file, one run of row groups in memory at a time.

    facts: for the footer

    Raises ResultsError: a batch has another schema.
    """
    with pq.ParquetWriter(sink, schema.with_metadata(facts), compression="zstd") as writer:
        pending: list[Table] = []
        for blob in blobs:
            table = blob_table(blob)
            if not table.schema.equals(schema):
                raise ResultsError(
                    f"a batch has columns {table.schema.names}, the part has {schema.names}; or "
                    "their types differ"
                )
            pending.append(table)
            if sum(table.nbytes for table in pending) >= RUN_NBYTES:
                _write_run(writer, pending)
        if pending:
            _write_run(writer, pending)


def _write_run(writer: pq.ParquetWriter, pending: list[Table]) -> None:
    """Write these rows, sorted by row and sample, as groups of about the same size."""
    table = pa.concat_tables(pending).unify_dictionaries().cast(writer.schema)
    pending.clear()
    keys = table.schema.names[-len(RESULT_COLUMNS) :][:2]
    order = pc.sort_indices(table.select(keys), sort_keys=[(key, "ascending") for key in keys])
    num_groups = -(-table.nbytes // ROW_GROUP_NBYTES)
    table = table.combine_chunks().take(order)
    writer.write_table(table, row_group_size=max(1, -(-table.num_rows // max(1, num_groups))))


# ---- the file's name ---------------------------------------------------------------------


def publish_file(place: str | Path, write: Write) -> None:
    """Make a file appear with what `write` writes, whole and on the disk, or not at all.

    A file of this machine that is there already stays as it is.

    Raises OSError: with the path; nothing has appeared.
    Raises StorageError: a store refuses or does not answer; nothing has appeared.
    """
    if is_uri(place):
        content = io.BytesIO()
        write(content)
        put(parse_uri(str(place)), content.getbuffer())
        return
    target = Path(place)
    try:
        try:
            publish_unnamed(target, write)
        except OSError as error:
            if error.errno not in _NO_UNNAMED_FILES:
                raise
            publish_from_sibling(target, write)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(target)) from error


def publish_unnamed(target: Path, write: Write) -> None:
    """Write a file that has no name until it is complete, then link it to `target`."""
    fd = os.open(target.parent, os.O_TMPFILE | os.O_WRONLY, 0o666)
    with open(fd, "wb") as sink:
        _write_through(sink, write)
        folder_fd = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # NOTE: only with a folder's descriptor does os.link follow the link under /proc.
            os.link(f"/proc/self/fd/{fd}", target.name, dst_dir_fd=folder_fd, follow_symlinks=True)
        except FileExistsError:
            pass
        finally:
            os.close(folder_fd)


def publish_from_sibling(target: Path, write: Write) -> None:
    """Write a file in a folder beside the results folder, then link it to `target`."""
    folder = target.parent.with_name(f".{target.parent.name}.tmp")
    folder.mkdir(exist_ok=True)
    source = folder / target.name
    try:
        with open(source, "wb") as sink:
            _write_through(sink, write)
        os.link(source, target)
    except FileExistsError:
        pass
    finally:
        source.unlink(missing_ok=True)
        folder.rmdir()


def _write_through(sink: BinaryIO, write: Write) -> None:
    write(sink)
    sink.flush()
    os.fsync(sink.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
