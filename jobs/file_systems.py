"""Which file system a folder is on, as far as the state folder must know."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from jobs.records import RunnerError

# Where a lock or a shared map made on one host may mean nothing on another.
NETWORK_TYPES = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs"),
    *("pvfs2", "orangefs", "ocfs2", "gfs2", "davfs", "fuse.sshfs", "fuse.glusterfs"),
    *("fuse.cephfs", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse", "fuse.goofys"),
    *("fuse.mount-s3", "fuse.juicefs", "fuse.davfs"),
)
_ESCAPE = re.compile(rb"\\([0-7]{3})")


def read_mounts() -> bytes:
    """The kernel's list of mounts; empty where there is none to read."""
    try:
        return Path("/proc/self/mountinfo").read_bytes()
    except OSError:
        return b""


def mount_of(path: Path, mounts: bytes) -> tuple[str, str]:
    """(mount point, type) of the file system that holds an absolute path; ("", "") if unknown.

    mounts: as in /proc/self/mountinfo
    """
    found = ("", "")
    wanted = os.fsencode(path)
    for line in mounts.splitlines():
        before, _, after = line.partition(b" - ")
        point = _ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), before.split()[4])
        inside = wanted == point or wanted.startswith(point.rstrip(b"/") + b"/")
        # Of two mounts on one point, the later one is seen.
        if inside and len(point) >= len(os.fsencode(found[0])):
            found = (os.fsdecode(point), os.fsdecode(after.split()[0]))
    return found


def refuse_network(path: Path, mounts: Callable[[], bytes] = read_mounts) -> None:
    """Raise RunnerError where the state folder `path` would be on a network file system."""
    point, kind = mount_of(path, mounts())
    if kind in NETWORK_TYPES:
        raise RunnerError(
            f"state folder {path} is on a network file system ({kind}, mounted at {point}), where "
            "the locks of its database do not hold; set NTX_HOME to a folder on a local disk "
            "(inputs, models and results may stay where they are: -o DIR)"
        )
