"""Templates that turn conversations or rows into prompts.

A chat template's own marks become control tokens; the same marks in a message stay text. So the
template is rendered a second time, with a mark after each character of the messages that could
begin a control token; where the marks land tells which characters came from a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2

from engine.messages import (
    clean_messages,
    insert,
    mapped,
    marked_positions,
    strings,
    unused_mark,
)
from engine.requests import TemplateError
from engine.template_limits import TemplateLimits
from engine.template_sandbox import CompiledTemplate, raise_exception
from engine.tokenizer import Tokenizer
from engine.vocabulary import HasMetadata

TEMPLATE_KEY = "tokenizer.chat_template"
DEFAULT_TEMPLATE_KEY = "tokenizer.chat_template.default"


class ChatTemplate:
    """A model's chat template, in a sandbox with limits.

    source: Jinja, with Hugging Face's additions: raise_exception, strftime_now, tojson with indent,
        break and continue, {% generation %}
    bos_token, eos_token: texts that the template may write
    now: what strftime_now tells, so that a job's prompts do not depend on the day; None is the
        moment when this object was made
    defer_errors: a source that does not compile raises when it is used, not here; for models whose
        template a job may never need

    Raises TemplateError: the source does not compile; names the line.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        now: datetime | None = None,
        limits: TemplateLimits | None = None,
        defer_errors: bool = False,
    ) -> None:
        self.source = source
        self._globals = {"bos_token": bos_token, "eos_token": eos_token, **_helpers(now)}
        self._compiled: CompiledTemplate | None = None
        try:
            self._compiled = CompiledTemplate(
                source, what="chat template", limits=limits, trim_blocks=True, lstrip_blocks=True
            )
        except TemplateError as error:
            if not defer_errors:
                raise
            self._error = error

    def render(self, messages: Any, /, *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt of a conversation, as text.

        messages: list of dicts with role and content. Keys that are null are dropped, at any depth.
            A turn with a null content is refused unless it carries tool calls. Content may be a
            list of text parts; they are joined by line breaks.
        add_generation_prompt: end with the opening of the model's turn
        kwargs: further variables of the template

        Raises TemplateError: not a conversation, or the template refuses it, fails, or passes its
        limits; RowError("unsupported_content"): a part that is not text.
        """
        conversation = clean_messages(messages)
        return self._render(
            conversation, {**kwargs, "add_generation_prompt": add_generation_prompt}
        )

    def encode(
        self,
        messages: Any,
        tokenizer: Tokenizer,
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation's prompt; arguments and errors as for `render`.

        The ids are those of the rendered text with the template's marks as control tokens, BOS
        once. Marks that stand in a message or in `kwargs` stay text. Raises TemplateError too where
        the template treats them in a way that hides where they came from.
        """
        conversation = clean_messages(messages)
        variables = {**kwargs, "add_generation_prompt": add_generation_prompt}
        text = self._render(conversation, variables)
        protected = self._find_protected(text, conversation, variables, tokenizer)
        return tokenizer.encode(text, parse_special=True, protected=protected)

    def _render(self, conversation: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        if self._compiled is None:
            raise self._error
        return self._compiled.render({**variables, **self._globals, "messages": conversation})

    def _find_protected(
        self,
        text: str,
        conversation: list[dict[str, Any]],
        variables: dict[str, Any],
        tokenizer: Tokenizer,
    ) -> frozenset[int]:
        """Positions in the rendered text that users wrote and where a control token could begin.

        Marks go after every character that a control token may begin with. A template that looks
        for such characters ("<think>") would render otherwise with them; then only whole texts of
        control tokens are marked.
        """
        given = [*strings(conversation), *strings(variables)]
        starts = tokenizer.control_starts
        if not any(start in string for start in starts for string in given):
            return frozenset()
        mark = unused_mark([text, self.source, *given])
        every_start = str.maketrans({start: start + mark for start in starts})

        def mark_tokens(string: str) -> str:
            return insert(string, mark, tokenizer.find_control(string))

        for add_marks in (lambda string: string.translate(every_start), mark_tokens):
            marked = self._render(mapped(conversation, add_marks), mapped(variables, add_marks))
            if marked.replace(mark, "") == text:
                return marked_positions(marked, mark)
        raise TemplateError(
            "the chat template acts on the text of a control token inside a message, so it cannot "
            "be told apart from the template's own; remove that text from the message"
        )


class PromptTemplate:
    """A prompt over a row's columns, in the sandbox and limits of chat templates.

    Line breaks and white space stay as written. now: as for ChatTemplate.

    Raises TemplateError: it does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        now: datetime | None = None,
        limits: TemplateLimits | None = None,
    ) -> None:
        self._globals = _helpers(now)
        self._compiled = CompiledTemplate(
            source,
            what="prompt template",
            limits=limits,
            undefined=jinja2.StrictUndefined,
            finalize=_not_null,
            keep_trailing_newline=True,
        )

    def render(self, columns: Mapping[str, Any], /) -> str:
        """Raises TemplateError: it names no column of these, prints a null, or fails."""
        try:
            return self._compiled.render({**self._globals, **columns})
        except TemplateError as error:
            if isinstance(error.__cause__, jinja2.UndefinedError):
                raise TemplateError(f"{error}; the columns are {', '.join(columns)}") from error
            raise


def chat_template_of(
    file: HasMetadata, tokenizer: Tokenizer, *, now: datetime | None = None
) -> ChatTemplate | None:
    """A model file's chat template (its default one of several); None where it has none.

    A broken one raises when it is used.
    """
    source = file.metadata.get(TEMPLATE_KEY) or file.metadata.get(DEFAULT_TEMPLATE_KEY)
    if not isinstance(source, str):
        return None
    bos_id, eos_id = tokenizer.bos_id, tokenizer.eos_id
    return ChatTemplate(
        source,
        bos_token="" if bos_id is None else tokenizer.token_text(bos_id),
        eos_token="" if eos_id is None else tokenizer.token_text(eos_id),
        now=now,
        defer_errors=True,
    )


def _helpers(now: datetime | None) -> dict[str, Any]:
    return {
        "raise_exception": raise_exception,
        "strftime_now": (now or datetime.now()).strftime,
    }


def _not_null(value: Any) -> Any:
    if value is None:
        raise jinja2.TemplateRuntimeError("a null would be printed; use {{ column or '' }}")
    return value
