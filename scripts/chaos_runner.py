"""A runner whose driver is `scripts.chaos_driver`: `python -m scripts.chaos_runner HOME`."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys

from jobs.control import RunnerLock, child_environment
from jobs.driver_process import DriverProcess
from jobs.home import HOME_VARIABLE, Home
from jobs.job_log import LOG_FORMAT
from jobs.runner import Runner
from jobs.stop_signal import StopSignal
from jobs.store import JobStore


def start_chaos_runner(home: Home) -> subprocess.Popen[bytes]:
    """Start one, as `ntx-batch runner start` does the usual one."""
    with home.log_path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "scripts.chaos_runner", home.path],
            env=child_environment() | {HOME_VARIABLE: str(home.path)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def main() -> None:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    home = Home.open(sys.argv[1])
    start = functools.partial(DriverProcess, module="scripts.chaos_driver")
    with (
        StopSignal().install() as stop,
        RunnerLock(home) as lock,
        JobStore(home.state_path) as store,
    ):
        Runner(home, lock, store=store, stop=stop, start_driver=start).run()


if __name__ == "__main__":
    main()
