"""A driver for tests that says it is ready, is its own engine actor, and does nothing.

`python -m tests.silent_driver --fd N --temp-dir DIR`
"""

from __future__ import annotations

import argparse
from multiprocessing.connection import Connection

from jobs.messages import ActorStarted, DriverReady, JobReady
from jobs.processes import ProcessId


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--temp-dir", required=True)
    pipe = Connection(parser.parse_args().fd)
    pipe.send(DriverReady(0.0, ()))
    command = pipe.recv()
    limit = {"memory_limit_nbytes": command.spec.engine.memory_nbytes}
    pipe.send(JobReady(command.attempt, limit))
    pipe.send(ActorStarted(command.attempt, ProcessId.current()))
    while True:
        pipe.recv()


if __name__ == "__main__":
    main()
