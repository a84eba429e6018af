"""Settings of the whole suite."""

from __future__ import annotations

import signal

from hypothesis import settings

# The same examples in every run, and no clock: a loaded machine must not fail a test.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

# A shell that starts the suite in the background ignores SIGINT for it, and so for every program
# it starts; the tests of Ctrl-C need what a terminal gives.
signal.signal(signal.SIGINT, signal.default_int_handler)
