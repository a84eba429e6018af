"""A runner for tests with no engine: `python -m tests.hook_runner HOME [before|after]`.

Its jobs end by themselves. It kills itself before, or right after, it starts the process that tells
of a job's end.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from jobs.control import RunnerLock
from jobs.home import Home
from jobs.hook_store import Attempt
from jobs.hook_watch import Delivery, start_delivery
from jobs.job_log import LOG_FORMAT
from jobs.runner import Runner
from jobs.stop_signal import StopSignal
from jobs.store import JobStore
from tests.runner_helpers import ScriptedDriver


def main() -> None:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    home, dies = Home.open(sys.argv[1]), sys.argv[2:]

    def start(home: Home, attempt: Attempt) -> Delivery:
        if dies == ["before"]:
            os.kill(os.getpid(), signal.SIGKILL)
        delivery = start_delivery(home, attempt)
        if dies == ["after"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return delivery

    with (
        StopSignal().install() as stop,
        RunnerLock(home) as lock,
        JobStore(home.state_path) as store,
    ):
        Runner(
            home,
            lock,
            store=store,
            stop=stop,
            start_driver=lambda _: ScriptedDriver(store),  # type: ignore[arg-type, return-value]
            start_hook=start,
            idle_exit_s=0.5,
        ).run()


if __name__ == "__main__":
    main()
