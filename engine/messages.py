"""Conversations as templates get them: checked, without nulls; and marks put into their texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from engine.requests import RowError, TemplateError

PAYLOAD_KEYS = ("tool_calls", "function_call", "reasoning_content")
MARKS = range(0xE000, 0xF900)  # private use: no text means anything by them


def clean_messages(messages: Any) -> list[dict[str, Any]]:
    """Check a conversation and drop what is null in it.

    Raises TemplateError: empty, or a message without role or content; RowError.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise TemplateError("the conversation is empty; it needs at least one message")
    return [_clean_message(message, number) for number, message in enumerate(messages, 1)]


def _clean_message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TemplateError(f"message {number} is a {type(message).__name__}, not role and content")
    cleaned: dict[str, Any] = _without_nulls(message)
    role = cleaned.get("role")
    if not isinstance(role, str) or not role:
        raise TemplateError(f"message {number} has the role {role!r}; it must be a text")
    content = cleaned.get("content")
    if isinstance(content, list):
        cleaned["content"] = "\n".join(_part_texts(content, number))
    elif content is None and not any(cleaned.get(key) for key in PAYLOAD_KEYS):
        raise TemplateError(f"message {number} ({role}) has no content")
    elif content is not None and not isinstance(content, str):
        raise TemplateError(
            f"message {number} ({role}) has a {type(content).__name__} as content, not a text"
        )
    return cleaned


def _part_texts(parts: list[Any], number: int) -> Iterator[str]:
    for part in parts:
        if isinstance(part, Mapping) and part.get("type", "text") == "text":
            part = part.get("text")
        if not isinstance(part, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RowError(
                "unsupported_content",
                f"message {number} holds a part of type {kind!r}; only text is supported",
            )
        yield part


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = ((key, item) for key, item in value.items() if item is not None)
        return {key: _without_nulls(item) for key, item in kept}
    if isinstance(value, list | tuple):
        return [_without_nulls(item) for item in value]
    return value


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every string in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {mapped(key, change): mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(item, change) for item in value]
    return value


def unused_mark(texts: list[str]) -> str:
    for code in MARKS:
        if not any(chr(code) in text for text in texts):
            return chr(code)
    raise TemplateError(f"the messages use all {len(MARKS)} private-use characters")


def insert(text: str, mark: str, positions: Iterable[int]) -> str:
    """Put the mark after the character at each position."""
    pieces = []
    begin = 0
    for position in positions:
        pieces.append(text[begin : position + 1])
        begin = position + 1
    return mark.join([*pieces, text[begin:]])


def marked_positions(marked: str, mark: str) -> frozenset[int]:
    """Where, without the marks, the characters stand that a mark follows."""
    positions = set()
    length = 0
    for piece in marked.split(mark)[:-1]:
        length += len(piece)
        positions.add(length - 1)
    return frozenset(positions)
