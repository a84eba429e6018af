"""A row's text as its tokens come: stop texts, and bytes that are no whole character yet.

Rules:
- Stop texts are searched in the bytes of the output, so a token's or a character's edges do not
  matter. The match that is complete first ends the row; of two that are complete at the same
  byte, the longer. The same bytes give the same end, however they are split into tokens.
- Before min_tokens tokens nothing is searched, and a match must be complete in a later token.
- Text after a match is dropped, and the match with it unless include_stop.
- A character whose last bytes never came is dropped at the end of the output, with the warning
  incomplete_utf8_bytes. Other bytes that are no UTF-8 become U+FFFD, with the warning
  invalid_utf8_bytes. Both count bytes.
- Nothing else is changed: an SPM model's leading space stays.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any

from engine.requests import SamplingParams

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_REPLACEMENT_UTF8 = _REPLACEMENT.encode()


class RowText:
    """Collects one row's output.

    token_bytes: bytes of a token, empty for control tokens
    params: whose stop texts, include_stop and min_tokens hold
    """

    def __init__(self, token_bytes: Callable[[int], bytes], params: SamplingParams) -> None:
        self._token_bytes = token_bytes
        self._stops = tuple((text, text.encode()) for text in params.stop)
        self._include_stop = params.include_stop
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._bytes = bytearray()

    def push(self, token_id: int) -> str | None:
        """Add a token; returns the stop text that is complete with it, or None."""
        num_before = len(self._bytes)
        self._bytes += self._token_bytes(token_id)
        self._num_tokens += 1
        if self._num_tokens < self._min_tokens:
            return None
        matches = [match for stop in self._stops if (match := self._match(*stop, num_before))]
        if not matches:
            return None
        end, begin, text = min(matches)
        del self._bytes[end if self._include_stop else begin :]
        return text

    def finish(self) -> tuple[str, dict[str, Any]]:
        """The text and its warnings."""
        data = bytes(self._bytes)
        text, num_whole = codecs.utf_8_decode(data, "replace", False)
        invalid = _num_replaced_bytes(data[:num_whole], text)
        counts = {
            "incomplete_utf8_bytes": len(data) - num_whole,
            "invalid_utf8_bytes": invalid,
        }
        return text, {name: count for name, count in counts.items() if count}

    def _match(self, text: str, stop: bytes, num_before: int) -> tuple[int, int, str] | None:
        # A match must end in the new bytes; one that ended before was there before min_tokens.
        begin = self._bytes.find(stop, max(0, num_before - len(stop) + 1))
        return None if begin < 0 else (begin + len(stop), begin, text)


def _num_replaced_bytes(data: bytes, text: str) -> int:
    replaced = text.count(_REPLACEMENT) - data.count(_REPLACEMENT_UTF8)
    return len(data) - len(text.encode()) + replaced * len(_REPLACEMENT_UTF8)
