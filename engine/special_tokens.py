"""Cut text at special tokens, leftmost first and the longest at each place.

User-defined tokens (think tags, runs of spaces) are ordinary text with an id of their own and are
always found. Control and unknown tokens are found only when asked for, and never where a
protected character begins them.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

from engine.vocabulary import TokenKind, Vocabulary

WHITE_SPACE = re.compile(r"[ \t\n\r\v\f]*")


class SpecialTokens:
    """Finds a vocabulary's special tokens in text.

    strip_after: white space that follows a control token is dropped (Phi-3's files want it)
    """

    def __init__(self, vocabulary: Vocabulary, *, strip_after: bool = False) -> None:
        user_defined = vocabulary.ids_of(TokenKind.USER_DEFINED)
        control = vocabulary.ids_of(TokenKind.CONTROL, TokenKind.UNKNOWN)
        self._ids = {vocabulary.texts[i]: i for i in reversed(control + user_defined)}
        self._control_ids = frozenset(control)
        self._strip_after = frozenset(control if strip_after else ()) - {
            vocabulary.bos_id,
            vocabulary.unknown_id,
        }
        self._user_defined = _pattern(vocabulary.texts[i] for i in user_defined)
        self._control = _pattern(vocabulary.texts[i] for i in control)
        self._all = _pattern(self._ids)
        self.control_starts = frozenset(vocabulary.texts[i][:1] for i in control)

    def split(
        self, text: str, *, parse_special: bool, protected: Container[int] = ()
    ) -> Iterator[str | int]:
        """Yield the text's pieces in order: token ids, and stretches of ordinary text.

        protected: positions in `text` where no control token may begin
        """
        pattern = self._all if parse_special else self._user_defined
        begin = search_from = 0
        while match := pattern.search(text, search_from) if pattern else None:
            if match.start() in protected and self._ids[match.group()] in self._control_ids:
                search_from = match.start() + 1
                match = self._user_defined and self._user_defined.match(text, match.start())
                if match is None:
                    continue
            if match.start() > begin:
                yield text[begin : match.start()]
            token_id = self._ids[match.group()]
            yield token_id
            begin = match.end()
            if token_id in self._strip_after:
                begin = WHITE_SPACE.match(text, begin).end()  # type: ignore[union-attr]
            search_from = begin
        if begin < len(text):
            yield text[begin:]

    def find_control(self, text: str) -> list[int]:
        """Positions in `text` where the text of a control token begins."""
        return [match.start() for match in self._control.finditer(text)] if self._control else []


def _pattern(texts: Iterator[str] | dict[str, int]) -> re.Pattern[str] | None:
    longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
