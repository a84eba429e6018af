"""A team of worker threads; worker 0 is the thread that calls `Team.run`."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
import numpy.typing as npt

from kernels.cpu.barrier import break_barrier, mend_barrier, new_barrier
from kernels.ops import KernelError

Body = Callable[[int], None]
_POLL_S = 0.1  # most that a wake-up lost to an interrupt costs


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


class _Run:
    """One body on all workers: who has ended, and with what error."""

    def __init__(self, body: Body, num_workers: int, barrier_state: npt.NDArray[np.int64]) -> None:
        self.body = body
        self.barrier_state = barrier_state
        self.cancelled = False
        self.errors: list[BaseException | None] = [None] * num_workers
        self.ended = [False] * num_workers
        self._wake: SimpleQueue[int] = SimpleQueue()

    def call(self, worker: int) -> None:
        try:
            if not self.cancelled:
                self.body(worker)
        except BaseException as error:
            self.errors[worker] = error
            break_barrier(self.barrier_state)
        self.ended[worker] = True
        self._wake.put(worker)

    def wait(self) -> None:
        # An interrupt may come between taking a wake-up and noting it, so `ended` alone counts.
        while not all(self.ended):
            with contextlib.suppress(Empty):
                self._wake.get(timeout=_POLL_S)

    def raise_first(self) -> None:
        failed = [error for error in self.errors if error is not None]
        for error in failed:
            if not isinstance(error, TeamBroken):
                raise error
        assert not failed, failed


_Inbox = SimpleQueue[_Run | None]


def _serve(worker: int, inbox: _Inbox) -> None:
    while (run := inbox.get()) is not None:
        run.call(worker)
        del run  # a waiting thread must not keep the last sweep's arrays alive


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
        self._running = threading.Lock()
        self._threads = [self._start(worker) for worker in range(1, num_workers)]
        # the threads know the queues, not the team, so a team that is dropped ends them
        self._finalizer = weakref.finalize(self, _stop, self._inboxes)

    def _start(self, worker: int) -> threading.Thread:
        thread = threading.Thread(
            target=_serve,
            args=(worker, self._inboxes[worker - 1]),
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
            run = _Run(body, self.num_workers, self.barrier_state)
            try:
                for inbox in self._inboxes:
                    inbox.put(run)
                run.call(0)
                run.wait()
            except BaseException:
                self._abandon(run)
                raise
        run.raise_first()

    def _abandon(self, run: _Run) -> None:
        """The caller was interrupted: end the run on every worker before going on."""
        run.cancelled = True
        break_barrier(self.barrier_state)
        run.ended[0] = True
        for inbox in self._inboxes:
            inbox.put(run)  # for those that have not got it; to the others it is nothing new
        while not all(run.ended):
            with contextlib.suppress(KeyboardInterrupt):  # the first one is on its way already
                run.wait()

    def close(self) -> None:
        """Stop the threads and wait for them. Idempotent; not called inside `run`."""
        self._finalizer()
        for thread in self._threads:
            thread.join()
