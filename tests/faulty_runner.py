"""A runner for tests whose engine certain rows bring down.

`python -m tests.faulty_runner HOME [MODULE]`: MODULE is the driver's program.
"""

from __future__ import annotations

import functools
import logging
import sys

from jobs.control import RunnerLock
from jobs.driver_process import DriverProcess
from jobs.home import Home
from jobs.job_log import LOG_FORMAT
from jobs.runner import Runner
from jobs.stop_signal import StopSignal
from jobs.store import JobStore


def main() -> None:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    home = Home.open(sys.argv[1])
    module = sys.argv[2] if len(sys.argv) > 2 else "tests.faulty_engine"
    start = functools.partial(DriverProcess, module=module)
    with (
        StopSignal().install() as stop,
        RunnerLock(home) as lock,
        JobStore(home.state_path) as store,
    ):
        Runner(home, lock, store=store, stop=stop, start_driver=start).run()


if __name__ == "__main__":
    main()
