"""A team of worker threads; worker 0 is the thread that calls `Team.run`."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from kernels.cpu.barrier import break_barrier, mend_barrier, new_barrier
from kernels.ops import KernelError

Body = Callable[[int], None]
_Inbox = SimpleQueue[Body | None]
_Outbox = SimpleQueue[BaseException | None]


class TeamBroken(KernelError):
    """Another worker failed; raised where this one would have waited for it."""


def default_num_threads() -> int:
    """Cores this process may use: its affinity, limited by a cgroup v2 quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def _serve(
    worker: int, inbox: _Inbox, outbox: _Outbox, barrier_state: npt.NDArray[np.int64]
) -> None:
    while (body := inbox.get()) is not None:
        outbox.put(_call(body, worker, barrier_state))
        del body  # a waiting thread must not keep the last sweep's arrays alive


def _call(body: Body, worker: int, barrier_state: npt.NDArray[np.int64]) -> BaseException | None:
    try:
        body(worker)
    except BaseException as error:
        break_barrier(barrier_state)
        return error
    return None


def _stop(inboxes: list[_Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)


class Team:
    """Persistent daemon threads that run one body together.

    barrier_state: what `kernels.cpu.barrier.barrier` takes, shared by the team
    """

    def __init__(self, num_workers: int) -> None:
        assert num_workers >= 1, num_workers
        self.num_workers = num_workers
        self.barrier_state = new_barrier()
        self._inboxes: list[_Inbox] = [SimpleQueue() for _ in range(num_workers - 1)]
        self._outbox: _Outbox = SimpleQueue()
        self._running = threading.Lock()
        self._threads = [self._start(worker) for worker in range(1, num_workers)]
        # the threads know the queues, not the team, so a team that is dropped ends them
        self._finalizer = weakref.finalize(self, _stop, self._inboxes)

    def _start(self, worker: int) -> threading.Thread:
        thread = threading.Thread(
            target=_serve,
            args=(worker, self._inboxes[worker - 1], self._outbox, self.barrier_state),
            name=f"ntx-worker-{worker}",
            daemon=True,
        )
        thread.start()
        return thread

    def run(self, body: Body) -> None:
        """Call `body(worker)` on every worker and wait for all; raises the first error."""
        if not self._finalizer.alive:
            raise KernelError("the workers are stopped; make a new backend")
        with self._running:
            mend_barrier(self.barrier_state)
            for inbox in self._inboxes:
                inbox.put(body)
            errors = [_call(body, 0, self.barrier_state)]
            errors += [self._result() for _ in self._inboxes]
        failed = [error for error in errors if error is not None]
        for error in failed:
            if not isinstance(error, TeamBroken):
                raise error
        assert not failed, failed

    def _result(self) -> BaseException | None:
        """One worker's outcome; an interrupt stops the others first and is then the outcome."""
        interrupt: BaseException | None = None
        while True:
            try:
                outcome = self._outbox.get()
                return interrupt or outcome
            except BaseException as error:
                break_barrier(self.barrier_state)
                interrupt = error

    def close(self) -> None:
        """Stop the threads and wait for them. Idempotent; not called inside `run`."""
        self._finalizer()
        for thread in self._threads:
            thread.join()
