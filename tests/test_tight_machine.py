"""A machine that others use too: little shared memory, a small /tmp, somebody else's /tmp/ray."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.store import JobStore
from tests.cli_helpers import MODEL, ROOT, write_prompts
from tests.runner_helpers import make_home

LONG_TMPDIR = f"/tmp/{'t' * 150}"
# Mounts are seen in here alone, and this root obeys the rights of files.
SCRIPT = r"""
set -e
mount --make-rprivate /
mount -t tmpfs -o size=32m tmpfs /dev/shm
mount --bind "$ROOT" "$SAVED"
mount -t tmpfs -o size=190m tmpfs /tmp
test -d "$ROOT" || { mkdir -p "$ROOT"; mount --bind "$SAVED" "$ROOT"; }
install -d -m 755 -o 4321 -g 4321 /tmp/ray
install -d -m 700 "$TMPDIR"
exec setpriv --bounding-set -dac_override,-dac_read_search bash -e -c '
! touch /tmp/ray/mine 2>/dev/null
"$@"
find /dev/shm /tmp -xdev -mindepth 1 -printf "left: %p\n"
' run "$@"
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not below /tmp, which is another one in there."""
    folder = Path(tempfile.mkdtemp(prefix="ntx-tight-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


def run_inside(folder: Path, home: Path, command: str) -> subprocess.CompletedProcess[str]:
    saved = folder / "saved"  # a checkout below /tmp comes back at its place in the new /tmp
    saved.mkdir()
    environment = os.environ | {
        "ROOT": str(ROOT),
        "SAVED": str(saved),
        "NTX_HOME": str(home),
        "TMPDIR": LONG_TMPDIR,
        "PYTHONPATH": str(ROOT),
        "PY": sys.executable,
    }
    return subprocess.run(
        ["unshare", "-m", "bash", "-c", SCRIPT, "tight", "bash", "-e", "-c", command],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.slow
def test_a_job_runs_with_what_others_have_left(folder: Path) -> None:
    """Cases 68, 70 and 109, and paths of any length: the job runs, and says what is tight."""
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("only root may make a mount namespace")
    home = make_home(folder.joinpath(*["deep" * 10] * 5, "home"))
    assert len(str(home.path)) > 200
    write_prompts(folder / "in.parquet", ["a", "b", "x" * 4000])
    ran = run_inside(
        folder,
        home.path,
        f'"$PY" -m ntx_batch run in.parquet --model {MODEL} --max-tokens 4 > out.txt;'
        '"$PY" -m ntx_batch runner stop',
    )
    assert ran.returncode == 0, ran.stderr + home.log_path.read_text()
    with JobStore(home.state_path) as store:
        (job,) = store.list_jobs()
    assert (job.state, job.num_ok) == ("completed", 3)
    assert (folder / "out.txt").read_text() == f"{job.id}\n"
    log = home.job_log_path(job.id).read_text()
    for words in ("/dev/shm has 32 MiB free", "MiB free); NTX_TEMP names another folder"):
        assert words in log
        assert words in ran.stderr, "submit says it too"
    left = {line.removeprefix("left: ") for line in ran.stdout.splitlines()}
    checkout = {str(path) for path in (ROOT, *ROOT.parents)}
    assert left - checkout == {"/tmp/ray", LONG_TMPDIR}, (
        "nothing of ours stays in shared memory or /tmp"
    )
