"""A barrier for worker threads that run without the interpreter lock.

State is an int64 array, one cache line per field: workers arrived, barriers passed, broken, and
how many pause instructions take a microsecond (9 to 60 ns each, by the processor).
Waiting spins for two microseconds, then yields for about a millisecond, then sleeps, so that a
machine with more threads than cores stays live.
"""

from __future__ import annotations

import platform
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.jit import I64, I64_VECTOR, inlined, kernel

ARRIVED, PASSED, BROKEN, PAUSES_PER_US = 0, 8, 16, 24
_STATE_LEN = 32
_SPIN_US = 2  # longer only keeps a thread away that shares this core
_YIELDS = 2000  # about a millisecond
_SLEEP_US = 50
_TURN_US = 2  # what a worker needs the interpreter for between two kernels, and some more
_CALIBRATION_PAUSES = 2000

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_PAUSE = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [1])}


def _element(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    view = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.gep(view.data, [args[1]])


def _atomic_add(_typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Returns the value before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element(context, builder, signature, args)
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), generate


def _atomic_load(_typing: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_element(context, builder, signature, args), "seq_cst", 8)

    return types.int64(array, types.int64), generate


def _atomic_store(_typing: Any, array: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element(context, builder, signature, args)
        builder.store_atomic(args[2], pointer, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


def _call(builder: Any, name: str, result: Any, values: list[int]) -> Any:
    kind = ir.FunctionType(result, [_I32] * len(values))
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, [ir.Constant(_I32, value) for value in values])


def _pause(_typing: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if platform.machine() in _PAUSE:
            name, values = _PAUSE[platform.machine()]
            _call(builder, name, ir.VoidType(), values)
        return context.get_dummy_value()

    return types.void(), generate


def _libc(name: str, values: list[int]) -> Any:
    def call(_typing: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
            return _call(builder, name, _I32, values)

        return types.int32(), generate

    return intrinsic(call)


atomic_add = intrinsic(_atomic_add)
atomic_load = intrinsic(_atomic_load)
atomic_store = intrinsic(_atomic_store)
_cpu_pause = intrinsic(_pause)
_sched_yield = _libc("sched_yield", [])
_short_sleep = _libc("usleep", [_SLEEP_US])


@inlined
def wait_for_all(state: Any, num_workers: int) -> Any:
    """Return once every worker is here; False when the barrier is broken."""
    if num_workers == 1:
        return True
    passed = atomic_load(state, PASSED)
    if atomic_add(state, ARRIVED, 1) == num_workers - 1:
        atomic_store(state, ARRIVED, 0)
        atomic_store(state, PASSED, passed + 1)
        return atomic_load(state, BROKEN) == 0
    turns, spins = 0, _SPIN_US * state[PAUSES_PER_US]
    while atomic_load(state, PASSED) == passed:
        if atomic_load(state, BROKEN) != 0:
            return False
        turns += 1
        if turns < spins:
            _cpu_pause()
        elif turns < spins + _YIELDS:
            _sched_yield()
        else:
            _short_sleep()
    return True


@inlined
def leave_in_turn(state: Any, worker: int, num_workers: int) -> Any:
    """Wait for all, then return worker after worker.

    Threads that ask for the interpreter lock at the same moment put each other to sleep, for ten
    times the few microseconds that each of them needs it.
    """
    done = wait_for_all(state, num_workers)
    for _ in range(worker * _TURN_US * state[PAUSES_PER_US]):
        _cpu_pause()
    return done


@kernel(types.void(I64))
def _pauses(count: int) -> None:
    for _ in range(count):
        _cpu_pause()


def new_barrier() -> npt.NDArray[np.int64]:
    """State of a barrier that nobody waits at, with the length of a pause measured."""
    state = np.zeros(_STATE_LEN, np.int64)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        _pauses(_CALIBRATION_PAUSES)
        seconds.append(time.perf_counter() - begin)
    state[PAUSES_PER_US] = max(1, int(_CALIBRATION_PAUSES * 1e-6 / min(seconds)))
    return state


def mend_barrier(state: npt.NDArray[np.int64]) -> None:
    """Make a barrier usable again; only while no worker runs."""
    state[[ARRIVED, PASSED, BROKEN]] = 0


@kernel(types.boolean(I64_VECTOR, I64))
def barrier(state: Any, num_workers: int) -> Any:
    """Wait for all workers; False when the barrier is broken."""
    return wait_for_all(state, num_workers)


@kernel(types.void(I64_VECTOR))
def break_barrier(state: Any) -> None:
    """Make every wait, present and coming, return False."""
    atomic_store(state, BROKEN, 1)
