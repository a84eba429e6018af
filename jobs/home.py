"""Where everything of one user lives on disk: the state folder and the names inside it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from jobs.file_systems import read_mounts, refuse_network

HOME_VARIABLE = "NTX_HOME"


@dataclass(frozen=True, slots=True)
class Home:
    """The state folder. `path` is absolute, with symbolic links resolved."""

    path: Path

    @classmethod
    def open(
        cls, path: str | Path | None = None, *, mounts: Callable[[], bytes] = read_mounts
    ) -> Home:
        """The folder given, else $NTX_HOME, else the platform's; created where absent (0700).

        mounts: the kernel's list of mounts

        Raises OSError: the folder cannot be made.
        Raises RunnerError: it is on a network file system.
        """
        chosen = path or os.environ.get(HOME_VARIABLE) or platformdirs.user_data_dir("ntx-batch")
        home = cls(Path(chosen).expanduser().resolve())
        refuse_network(home.path, mounts)
        home.jobs_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return home

    @property
    def key(self) -> str:
        """Names this folder in process environments and temp folders: 12 hex digits."""
        return hashlib.sha256(os.fsencode(self.path)).hexdigest()[:12]

    @property
    def state_path(self) -> Path:
        return self.path / "state.sqlite"

    @property
    def lock_path(self) -> Path:
        return self.path / "runner.lock"

    @property
    def log_path(self) -> Path:
        return self.path / "runner.log"

    @property
    def ray_token_path(self) -> Path:
        return self.path / "ray-token"

    @property
    def driver_path(self) -> Path:
        """Pid and start time of the last driver, for the next runner."""
        return self.path / "driver.json"

    def board_path(self, engine: int) -> Path:
        """Where the actor of an engine notes the rows on board."""
        return self.path / f"board-{engine}"

    @property
    def spare_path(self) -> Path:
        """Room on the disk that is given up to write down that the disk is full."""
        return self.path / "spare"

    @property
    def probes_dir(self) -> Path:
        """What was found out about disks."""
        return self.path / "probes"

    @property
    def jobs_dir(self) -> Path:
        return self.path / "jobs"

    def job_dir(self, job_id: str) -> Path:
        return self.jobs_dir / job_id

    def results_dir(self, job_id: str) -> Path:
        return self.job_dir(job_id) / "results"

    def job_log_path(self, job_id: str) -> Path:
        return self.job_dir(job_id) / "log.txt"
