"""Ctrl-C twice in a row: the second does not cut short what the first one asks for."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from ntx_batch.interrupts import Interrupts


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_only_the_first_one_raises_until_the_next_is_let_through() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(signal.SIGINT) as interrupts:
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        interrupt()
        interrupts.renew()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    assert signal.getsignal(signal.SIGINT) is before


def test_one_of_two_kinds_counts_for_both() -> None:
    with Interrupts(signal.SIGINT, signal.SIGTERM):
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        interrupt()


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts(signal.SIGINT):
            interrupt()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_no_say() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def enter() -> None:
        with Interrupts(signal.SIGINT):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
