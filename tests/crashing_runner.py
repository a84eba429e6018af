"""A runner for tests: it notes what its engine sends, and may die right after publishing a part.

`python -m tests.crashing_runner HOME NOTES [die]`: NOTES gets the row indices of each batch as a
line of JSON, before anything is done with them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from jobs.control import RunnerLock
from jobs.driver_process import DriverProcess
from jobs.home import Home
from jobs.messages import BatchDone, Event
from jobs.publish import publish_part
from jobs.records import Job, Part
from jobs.runner import Runner
from jobs.stop_signal import StopSignal
from jobs.store import JobStore


class NotingDriver(DriverProcess):
    notes: Path

    def wait(self, timeout_s: float, others: Sequence[int] = ()) -> list[Event]:
        events = super().wait(timeout_s, others)
        with self.notes.open("a") as file:
            for event in events:
                if isinstance(event, BatchDone) and event.batch is not None:
                    file.write(json.dumps(event.batch.row_indices) + "\n")
        return events


def publish_and_die(job: Job, part: Part, blobs: Sequence[bytes]) -> None:
    publish_part(job, part, blobs)
    if part.num_rows:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    home = Home.open(sys.argv[1])
    NotingDriver.notes = Path(sys.argv[2])
    publish = publish_and_die if sys.argv[3:] == ["die"] else publish_part
    with (
        StopSignal().install() as stop,
        RunnerLock(home) as lock,
        JobStore(home.state_path) as store,
    ):
        runner = Runner(
            home,
            lock,
            store=store,
            stop=stop,
            publish=publish,
            start_driver=NotingDriver,
            store_retry_s=1.0,
        )
        runner.run()


if __name__ == "__main__":
    main()
