"""Settings of the whole suite."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from jobs.home import Home
    from jobs.store import JobStore

# The same examples in every run, and no clock: a loaded machine must not fail a test.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

# A shell that starts the suite in the background ignores SIGINT for it, and so for every program
# it starts; the tests of Ctrl-C need what a terminal gives.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    from tests.runner_helpers import make_home  # not where kernels alone are tested

    return make_home(tmp_path / "home")


@pytest.fixture
def store(home: Home) -> Iterator[JobStore]:
    from jobs.store import JobStore

    with JobStore(home.state_path) as store:
        yield store
