"""Places that Ray and the state folder can use, and those that they cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jobs.file_systems import mount_of
from jobs.home import Home
from jobs.records import RunnerError
from jobs.temp_folder import (
    MAX_ROOT_LEN,
    clear_temp_folders,
    make_temp_folder,
    space_warnings,
    temp_roots,
)

MOUNTS = rb"""22 1 254:0 / / rw,relatime - ext4 /dev/root rw
23 22 0:21 / /mnt rw,relatime - ext4 /dev/sdb rw
24 22 0:22 / /mnt/shared\040files rw,relatime shared:9 - nfs4 server:/export rw,vers=4.2
25 22 0:23 / /mnt/shared\040files/local rw - xfs /dev/sdc rw
26 22 0:24 / /home/me/far rw - fuse.sshfs me@host:/ rw
"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/", ("/", "ext4")),
        ("/mntx/a", ("/", "ext4")),
        ("/mnt/a", ("/mnt", "ext4")),
        ("/mnt/shared files", ("/mnt/shared files", "nfs4")),
        ("/mnt/shared files/a/b", ("/mnt/shared files", "nfs4")),
        ("/mnt/shared files/local/b", ("/mnt/shared files/local", "xfs")),
    ],
)
def test_a_path_is_on_the_innermost_mount(path: str, mount: tuple[str, str]) -> None:
    assert mount_of(Path(path), MOUNTS) == mount


def test_without_a_list_of_mounts_nothing_is_known() -> None:
    assert mount_of(Path("/a"), b"") == ("", "")


def test_a_state_folder_on_a_network_file_system_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    point = os.fsencode(tmp_path)
    for kind in (b"nfs4", b"cifs", b"fuse.sshfs"):
        mounts = MOUNTS + b"30 22 0:30 / " + point + b" rw - " + kind + b" host:/ rw\n"
        with pytest.raises(RunnerError, match=f"network file system .{kind.decode()}.*NTX_HOME"):
            Home.open(folder, mounts=lambda mounts=mounts: mounts)
        assert not folder.exists()
    assert Home.open(folder, mounts=lambda: MOUNTS).jobs_dir.is_dir()


def test_the_first_folder_that_is_short_and_writable_is_taken(tmp_path: Path) -> None:
    long = tmp_path / ("x" * MAX_ROOT_LEN)
    long.mkdir()
    short = Path("/tmp")
    environ = {"TMPDIR": str(long), "XDG_RUNTIME_DIR": str(short)}
    made = make_temp_folder("ntx-test-places-", environ)
    try:
        assert len(os.fsencode(made.parent)) <= MAX_ROOT_LEN
        assert made.stat().st_mode & 0o777 == 0o700
        assert made.stat().st_uid == os.getuid()
    finally:
        clear_temp_folders("ntx-test-places-", environ)
    assert not made.exists()


def test_a_folder_named_by_the_user_is_used_or_refused_with_the_reason(tmp_path: Path) -> None:
    short = Path("/tmp") / f"n{os.getpid()}"
    short.mkdir()
    try:
        assert make_temp_folder("a-", {"NTX_TEMP": str(short)}).parent == short
        clear_temp_folders("a-", {"NTX_TEMP": str(short)})
        assert list(short.iterdir()) == []
    finally:
        short.rmdir()
    with pytest.raises(RunnerError, match=r"No such file.*NTX_TEMP"):
        make_temp_folder("a-", {"NTX_TEMP": "/nowhere"})
    with pytest.raises(RunnerError, match=f"longer than the {MAX_ROOT_LEN} bytes"):
        make_temp_folder("a-", {"NTX_TEMP": "/" + "x" * 100})


def test_the_order_of_temp_folders() -> None:
    environ = {"NTX_TEMP": "/a", "TMPDIR": "/b", "XDG_RUNTIME_DIR": "/c"}
    roots = [str(root) for root in temp_roots(environ)]
    assert roots[:2] == ["/a", "/b"]
    assert roots[-2:] == ["/c", "/var/tmp"]
    assert "/tmp" in roots


def test_tight_places_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 68: the disk of the temp folder; case 109: shared memory."""
    free = {"used": 10 << 30, "free": 90 << 30}

    class Usage:
        total = 100 << 30

        def __init__(self) -> None:
            self.used, self.free = free["used"], free["free"]

    monkeypatch.setattr("jobs.temp_folder.shutil.disk_usage", lambda path: Usage())
    assert list(space_warnings({"TMPDIR": str(tmp_path)})) == []
    free |= {"used": 97 << 30, "free": 3 << 30}
    (warning,) = space_warnings({"TMPDIR": str(tmp_path)})
    assert f"disk of {tmp_path}" in warning
    assert "97% full" in warning
    free |= {"used": 1 << 30, "free": 32 << 20}
    disk, memory = space_warnings({"TMPDIR": str(tmp_path)})
    assert "32 MiB free" in disk
    assert "/dev/shm has 32 MiB free" in memory
