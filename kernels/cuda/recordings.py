"""Sweeps of few tokens, recorded as graphs: replayed, their launches cost the host nothing."""

from __future__ import annotations

import contextlib
import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import cupy as cp

from kernels.cuda.launch import overlapping_launches

MAX_TOKENS = 16  # of a recorded sweep; with more, the device takes longer than the host
_MOST = 32  # recordings that are kept
_SEEN = None  # in place of a recording: the calls were made once, so that all buffers are there


class Recordings:
    """Graphs by what their calls depend on.

    A graph holds addresses: whatever may move has to be part of its key.
    """

    def __init__(self) -> None:
        self.num_replayed = 0
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self._stream = cp.cuda.Stream(non_blocking=True)

    def run(self, key: Hashable, calls: Callable[[], None]) -> None:
        """Make the calls; a second time they are recorded, from then on replayed."""
        if key not in self._graphs:
            calls()
            self._graphs[key] = _SEEN
            if len(self._graphs) > _MOST:
                self._graphs.popitem(last=False)
            return
        if self._graphs[key] is _SEEN:
            self._graphs[key] = self._record(calls)
        self._graphs.move_to_end(key)
        self._graphs[key].launch(cp.cuda.get_current_stream())
        self.num_replayed += 1

    def clear(self) -> None:
        self._graphs.clear()

    def _record(self, calls: Callable[[], None]) -> Any:
        with self._stream, _no_collection():
            self._stream.begin_capture(cp.cuda.runtime.streamCaptureModeThreadLocal)
            try:
                with overlapping_launches():
                    calls()
            finally:
                graph = self._stream.end_capture()
        return graph


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage may own memory of the device, and to free that would end a recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
