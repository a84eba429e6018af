"""What an approximating KV cache changes, on rows of the job that uses it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine import FinishedRow, Request
from engine.engine import Engine
from engine.kv_accuracy import measure_kv_accuracy
from kernels.ops import KvType
from nvme import ReadError

APPROXIMATE: tuple[KvType, ...] = ("int8",)
REFERENCE: KvType = "f16"
ROWS = 8
MOST_TOKENS = 512  # of a row, from its first on: what is run twice must stay small

Int32 = npt.NDArray[np.int32]


class KvSample:
    """The first rows of a job: their prompts when they start, their answers when they end."""

    def __init__(self) -> None:
        self._prompts: dict[tuple[int, int], Int32] = {}
        self._num_seen = 0
        self._rows: list[Int32] = []

    def add(self, request: Request) -> None:
        if self._num_seen < ROWS:
            self._num_seen += 1
            key = (request.row_index, request.sample_index)
            self._prompts[key] = request.token_ids[:MOST_TOKENS]

    def finish(self, row: FinishedRow) -> None:
        prompt = self._prompts.pop((row.row_index, row.sample_index), None)
        if prompt is not None:
            ids = np.concatenate([prompt, np.array(row.token_ids, np.int32)])
            self._rows.append(ids[:MOST_TOKENS])

    def is_complete(self, *, no_more: bool) -> bool:
        """Whether all rows of it have ended. no_more: none will be added"""
        return not self._prompts and (self._num_seen == ROWS or (no_more and self._num_seen > 0))

    def measure(self, engine: Engine, kv_type: KvType) -> dict[str, Any]:
        """The figures as plain JSON values, or why there are none; see `KvAccuracy`."""
        facts = {"kv_type": kv_type, "reference": REFERENCE, "num_rows": len(self._rows)}
        try:
            found = measure_kv_accuracy(engine, self._rows, kv_type, reference=REFERENCE)
        except (ReadError, ValueError) as error:
            return {**facts, "error": str(error)}
        return {**facts, **found.record()}
