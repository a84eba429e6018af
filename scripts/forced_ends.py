"""A backend that computes all it is asked to, and ends each row where a benchmark wants it to."""

from __future__ import annotations

from typing import Any

from kernels.choices import Choices, Edits, Rows
from kernels.ops import Float32, Ops
from scripts.simulated_ops import RowEnds


class ForcedOps:
    """Another backend, but for the tokens that end rows: those come when `ends` says so."""

    def __init__(self, ops: Ops, ends: RowEnds) -> None:
        self._ops = ops
        self.ends = ends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def choose(self, logits: Float32, specs: Rows, edits: Edits, num_tokens: int) -> Choices:
        choices = self._ops.choose(logits, specs, edits, num_tokens)
        return choices._replace(token_ids=self.ends.applied(choices.token_ids, specs))
