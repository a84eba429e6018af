"""A row on board: its tokens, its place in the cache, its text so far, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.kv_cache import RowKv
from engine.requests import FinishedRow, Request, RowError, TokenLogprob
from engine.sampler import Chosen, RowSampler, ending_token
from engine.scheduler import Chunk, Progress
from engine.text import RowText


class ActiveRow:
    """One row between admission and its end.

    slot: its line in the page table
    max_new_tokens: most tokens it may generate, the context window considered
    """

    def __init__(
        self,
        request: Request,
        *,
        slot: int,
        kv: RowKv,
        max_new_tokens: int,
        eog_ids: frozenset[int],
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self.request = request
        self.slot = slot
        self.kv = kv
        self.sampler = RowSampler(request, eog_ids)
        self._eog_ids = eog_ids
        self._max_new_tokens = max_new_tokens
        self._num_prompt = len(request.token_ids)
        self._tokens = np.empty(self._num_prompt + max_new_tokens, np.int32)
        self._tokens[: self._num_prompt] = request.token_ids
        self._known = self._num_prompt
        self._num_reused = kv.num_reused
        self._text = RowText(token_bytes, request.params)
        self._logprobs: list[TokenLogprob] | None = None if request.params.logprobs is None else []

    def go_on(self, slot: int, kv: RowKv) -> None:
        """Come on board again: what `kv` lacks is computed anew."""
        self.slot, self.kv = slot, kv

    def progress(self) -> Progress:
        return Progress(slot=self.slot, known=self._known, computed=self.kv.num_tokens)

    @property
    def num_known(self) -> int:
        """Tokens of the prompt, and those generated."""
        return self._known

    @property
    def most_tokens_left(self) -> int:
        """Tokens that the row may still generate."""
        return len(self._tokens) - self._known

    def chunk_tokens(self, chunk: Chunk) -> np.ndarray:
        return self._tokens[chunk.begin : chunk.end]

    def accept(self, chosen: Chosen) -> FinishedRow | None:
        """Take the next token; returns the finished row where it was the last."""
        token_id = chosen.token_id
        self._tokens[self._known] = token_id
        self._known += 1
        self.sampler.accept(token_id)
        if self._logprobs is not None and chosen.logprob is not None:
            self._logprobs.append(chosen.logprob)
        num_generated = self._known - self._num_prompt
        ended_by = ending_token(token_id, self.request.params, self._eog_ids, num_generated)
        if ended_by is not None:
            params = self.request.params
            if params.include_stop and token_id in params.stop_token_ids:
                self._text.push(token_id)
            return self._finish("stop", ended_by)
        stop = self._text.push(token_id)
        if stop is not None:
            return self._finish("stop", stop)
        if num_generated == self._max_new_tokens:
            return self._finish("length", None)
        return None

    def fail(self, error: RowError) -> FinishedRow:
        return failed_row(self.request, error)

    def _finish(self, reason: Literal["stop", "length"], stop_reason: str | None) -> FinishedRow:
        text, warnings = self._text.finish()
        generated = self._tokens[self._num_prompt : self._known]
        return FinishedRow(
            row_index=self.request.row_index,
            sample_index=self.request.sample_index,
            text=text,
            token_ids=tuple(int(token) for token in generated),
            finish_reason=reason,
            stop_reason=stop_reason,
            prompt_tokens=self._num_prompt,
            completion_tokens=len(generated),
            reused_tokens=self._num_reused,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            warnings=warnings,
        )


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A row that is not on board.

    prompt: its pieces, as the prefix tree knows them; none where nothing is reused
    begun: the row, where it was on board before
    """

    request: Request
    prompt: Sequence[bytes]
    begun: ActiveRow | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens to be computed before the next one is chosen."""
        return len(self.request.token_ids) if self.begun is None else self.begun.num_known


def failed_row(request: Request, error: RowError) -> FinishedRow:
    """The error row of a request that cannot run or failed on board."""
    return FinishedRow(
        row_index=request.row_index,
        sample_index=request.sample_index,
        status="error",
        prompt_tokens=len(request.token_ids),
        error_code=error.code,
        error_message=str(error),
    )
