"""A driver for tests that says it is ready; its engine actors sleep, and it does nothing else.

`python -m tests.silent_driver --fd N --temp-dir DIR`
"""

from __future__ import annotations

import argparse
import subprocess
import time
from multiprocessing.connection import Connection

from jobs.messages import ActorStarted, DriverReady, JobReady, StartJob
from jobs.processes import ProcessId


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--temp-dir", required=True)
    pipe = Connection(parser.parse_args().fd)
    pipe.send(DriverReady(0.0, ()))
    while True:
        command = pipe.recv()
        if isinstance(command, StartJob):
            attempt, engine = command.attempt, command.engine
            actor = ProcessId.of(subprocess.Popen(["sleep", "1000"]).pid)
            limit = {"memory_limit_nbytes": command.spec.engine.memory_nbytes}
            pipe.send(ActorStarted(attempt, actor, engine))
            time.sleep(0.3)
            pipe.send(JobReady(attempt, limit, engine))


if __name__ == "__main__":
    main()
