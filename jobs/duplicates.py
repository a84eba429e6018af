"""Outputs that must come out the same: one of them is computed, the others are copies of it.

The same prompt tokens under the same parameters give the same output where the choice is greedy,
or where the row has a seed of its own. With a seed that comes from the row's index they do not.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import replace

from engine import FinishedRow, Request

KEPT_NBYTES = 8 << 20
_ROW_NBYTES = 800  # of a kept row beside its text and its log-probabilities

OutputKey = tuple[int, int]  # row index, sample index
_NO_COPIES: list[OutputKey] = []  # of the many that have none; never added to


def identity_of(request: Request, sampling_params: str) -> bytes | None:
    """What two outputs have in common exactly where they must be the same; None: nothing is.

    sampling_params: the request's, as JSON
    """
    params = request.params
    if params.temperature > 0 and params.seed is None:
        return None
    sample = request.sample_index if params.temperature > 0 else 0
    digest = hashlib.blake2b(request.token_ids.tobytes(), digest_size=16)
    digest.update(f"{sample} {sampling_params}".encode())
    return digest.digest()


class Duplicates:
    """Knows outputs on their way, with the copies that wait for them, and recent finished ones.

    kept_nbytes: of finished ones
    """

    def __init__(self, kept_nbytes: int = KEPT_NBYTES) -> None:
        self._firsts: dict[OutputKey, tuple[bytes, Request]] = {}
        self._waiting: dict[bytes, list[OutputKey]] = {}
        self._finished: OrderedDict[bytes, FinishedRow] = OrderedDict()
        self._free_nbytes = kept_nbytes
        self.num_waiting = 0

    def is_first(self, identity: bytes, request: Request) -> bool:
        """Whether the output must be computed; else it waits for the first of its kind."""
        key = (request.row_index, request.sample_index)
        copies = self._waiting.get(identity)
        if copies is not None:
            self._waiting[identity] = copies = copies or []
            copies.append(key)
            self.num_waiting += 1
            return False
        self._waiting[identity] = _NO_COPIES
        self._firsts[key] = identity, request
        return True

    def give_up(self, identity: bytes, row: FinishedRow) -> None:
        """All outputs of this kind that are to come end as this one, with its error."""
        self._keep(identity, row)

    def finished(self, identity: bytes) -> FinishedRow | None:
        """The output of this kind that was computed well or given up, where it is still kept."""
        return self._finished.get(identity)

    def settle(self, row: FinishedRow) -> list[OutputKey]:
        """An output has ended: what waited for it, and has its outcome, an error too."""
        first = self._firsts.pop((row.row_index, row.sample_index), None)
        if first is None:
            return []
        identity, _ = first
        copies = self._waiting.pop(identity)
        self.num_waiting -= len(copies)
        if row.status == "ok":
            self._keep(identity, replace(row, token_ids=()))
        return copies

    def next_in_line(self, row: FinishedRow) -> Request | None:
        """An output has ended for a reason that is not its own: one that waited must be computed.

        None: none waited.
        """
        first = self._firsts.pop((row.row_index, row.sample_index), None)
        if first is None:
            return None
        identity, request = first
        copies = self._waiting.pop(identity)
        if not copies:
            return None
        (row_index, sample_index), *others = copies
        self.num_waiting -= 1
        request = replace(request, row_index=row_index, sample_index=sample_index)
        self._waiting[identity] = others or _NO_COPIES
        self._firsts[row_index, sample_index] = identity, request
        return request

    def _keep(self, identity: bytes, row: FinishedRow) -> None:
        self._finished[identity] = row
        self._free_nbytes -= _nbytes(row)
        while self._free_nbytes < 0:
            _, oldest = self._finished.popitem(last=False)
            self._free_nbytes += _nbytes(oldest)


def copy_of(row: FinishedRow, key: OutputKey) -> FinishedRow:
    """The outcome of another output, `key`, that is a copy of this one."""
    row_index, sample_index = key
    return replace(row, row_index=row_index, sample_index=sample_index, reused_tokens=0)


def _nbytes(row: FinishedRow) -> int:
    tokens = row.logprobs or ()
    return _ROW_NBYTES + 4 * len(row.text) + sum(200 + 150 * len(token.top) for token in tokens)
