"""Files that readers hold open, and how each error of theirs is worded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from nvme.base import ReadError, ReadRequest


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file as it was when the reader opened it."""

    path: Path
    fd: int
    nbytes: int
    mtime_ns: int
    inode: int


def open_file(path: Path, flags: int = 0) -> OpenFile:
    """Open for reading. flags: more of them for open(2). Raises ReadError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except OSError as error:
        raise ReadError(f"{path}: cannot be opened: {error.strerror}") from error
    status = os.fstat(fd)
    return OpenFile(path, fd, status.st_size, status.st_mtime_ns, status.st_ino)


def check_request(file: OpenFile, request: ReadRequest) -> None:
    """Check that the file holds the range. Raises ReadError."""
    if request.offset < 0 or request.offset + request.out.nbytes > file.nbytes:
        raise came_short(file, request, max(file.nbytes - request.offset, 0))


def check_unchanged(file: OpenFile) -> None:
    """Compare what lies at the path, so that a file put in its place is noticed too."""
    then = (file.nbytes, file.mtime_ns, file.inode)
    try:
        status = os.stat(file.path)
    except OSError as error:
        raise ReadError(f"{file.path}: gone since it was opened: {error.strerror}") from error
    now = (status.st_size, status.st_mtime_ns, status.st_ino)
    if now != then:
        raise ReadError(
            f"{file.path}: changed since it was opened: (bytes, mtime in ns, inode) were {then}, "
            f"are {now}; leave model files alone while they are read"
        )


def mount_of(path: Path) -> tuple[str, str]:
    """(file system, source) that a path lies on, such as ("ext4", "/dev/nvme0n1p2")."""
    resolved = path.resolve()
    found, depth = ("unknown file system", ""), -1
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        # Spaces and backslashes stand as octal escapes; of mounts in one place the last is on top.
        point = Path(before.split()[4].encode().decode("unicode_escape"))
        if len(point.parts) >= depth and resolved.is_relative_to(point):
            file_system, source = after.split()[:2]
            found, depth = (file_system, source), len(point.parts)
    return found


def came_short(file: OpenFile, request: ReadRequest, got: int) -> ReadError:
    return failed(file, request, got, "the file ends")


def failed(file: OpenFile, request: ReadRequest, got: int, why: str) -> ReadError:
    return ReadError(
        f"{file.path}: wanted {request.out.nbytes} bytes at offset {request.offset}, "
        f"got {got}: {why}"
    )


def after_close(path: Path) -> ReadError:
    return ReadError(f"read of {path} after the reader was closed")
