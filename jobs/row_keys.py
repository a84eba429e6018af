"""Keys of finished rows, pairs of row and sample index, as parts keep them in the database."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def pack_keys(keys: npt.NDArray[np.int64]) -> bytes:
    """Compress (n, 2) pairs of row and sample index, sorted: a few bits for each."""
    steps = np.diff(keys, axis=0, prepend=np.zeros((1, 2), np.int64))
    return zlib.compress(np.ascontiguousarray(steps.T).astype("<i8").tobytes())


def unpack_keys(packed: bytes) -> npt.NDArray[np.int64]:
    """The (n, 2) pairs that `pack_keys` took."""
    steps = np.frombuffer(zlib.decompress(packed), "<i8").reshape(2, -1).T
    return np.cumsum(steps, axis=0, dtype=np.int64)


def key_array(rows: Iterable[Iterable[int]]) -> npt.NDArray[np.int64]:
    """(n, 2), also where there are none."""
    return np.fromiter(itertools.chain.from_iterable(rows), np.int64).reshape(-1, 2)
