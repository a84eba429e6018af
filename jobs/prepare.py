"""From an input row to a request, or to the error row that says why it cannot run.

Pure: no files, no Ray, no engine state. What cannot run becomes a result with a code; nothing that
a row holds raises.

Over-long prompts are error rows unless the spec asks for truncation. Then a prompt that does not
fit is cut to the context length less `max_tokens`, but never to less than half of the context
length, so that a large `max_tokens` cannot eat the prompt. Cutting at the left keeps a leading BOS.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from engine import FinishedRow, Request, RowError, SamplingParams, TemplateError
from engine.chat import ChatTemplate, PromptTemplate
from engine.params import params_from_mapping, validate_params
from engine.tokenizer import Tokenizer
from jobs.records import Binding, JobSpec, SpecError

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What preparing found out about a row, for its result.

    original_prompt_tokens: tokens before the cut; None where nothing was cut
    sampling_params: JSON, as used; None where the row never got that far
    lost_prompt_bytes: bytes of the prompt that no token of the vocabulary stands for
    """

    truncated: bool = False
    original_prompt_tokens: int | None = None
    sampling_params: str | None = None
    lost_prompt_bytes: int = 0


class RowPreparer:
    """Prepares the rows of one job.

    binding: which columns hold the prompt and the row's own parameters
    chat_template: the job's own, else the model's; None where there is neither
    prompt_template: the job's, where the binding's source is one
    params_are_text: parameter columns hold text, as those of CSV do

    Raises SpecError: a chat template is needed and there is none.
    """

    def __init__(
        self,
        spec: JobSpec,
        binding: Binding,
        *,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        context_length: int,
        prompt_template: PromptTemplate | None = None,
        params_are_text: bool = False,
    ) -> None:
        self._spec = spec
        self._binding = binding
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._context_length = context_length
        self._prompt_template = prompt_template
        self._params_are_text = params_are_text
        if chat_template is None and (spec.chat or binding.source == "messages"):
            raise SpecError(
                f"{spec.model} has no chat template, which "
                f"{'--chat' if spec.chat else 'a messages column'} needs; "
                "give one with --chat-template"
            )

    def prepare(self, row_index: int, values: Values) -> tuple[Request | FinishedRow, RowFacts]:
        """Turn one row into a request, or into its error row.

        values: the row's columns as Python values
        """
        params: SamplingParams | None = None
        num_tokens = 0
        try:
            params = self._params(values)
            token_ids, num_lost = self._encode(values)
            num_tokens = len(token_ids)
            kept = self._fit(token_ids, params)
        except RowError as error:
            return error_row(row_index, error, num_tokens), _facts(params)
        except Exception as error:
            wrapped = RowError("internal_error", f"{type(error).__name__}: {error}")
            return error_row(row_index, wrapped, num_tokens), _facts(params)
        request = Request(
            row_index=row_index,
            token_ids=np.asarray(kept, np.int32),
            params=params,
            job_seed=self._spec.seed,
        )
        cut = len(kept) < num_tokens
        return request, _facts(params, num_tokens if cut else None, num_lost)

    # ---- the row's parameters ------------------------------------------------------------

    @functools.cached_property
    def _job_params(self) -> SamplingParams:
        """The job's own, checked once for all rows. Raises RowError: they do not suit the model."""
        validate_params(self._spec.params, self._tokenizer.num_tokens)
        return self._spec.params

    def _params(self, values: Values) -> SamplingParams:
        if not self._binding.params:
            return self._job_params
        given: dict[str, Any] = {}
        for column in self._binding.params:
            value = values.get(column)
            if self._params_are_text:
                value = param_of_text(column, value)
            if column != "sampling_params":
                given[column] = value
            elif isinstance(value, Mapping):
                given.update(value)
            elif value is not None:
                raise RowError(
                    "invalid_parameter",
                    f"sampling_params is a {type(value).__name__}, not a struct of parameters",
                )
        params = params_from_mapping(self._spec.params, given)
        validate_params(params, self._tokenizer.num_tokens)
        # Many rows are held at once, most of them with the job's own.
        return self._spec.params if params == self._spec.params else params

    # ---- the prompt ----------------------------------------------------------------------

    def _num_lost(self, texts: Iterable[Any]) -> int:
        lost = self._tokenizer.lost_bytes
        if not lost:
            return 0
        data = [text.encode() for text in texts if isinstance(text, str)]
        return sum(part.count(byte) for part in data for byte in lost)

    def _encode(self, values: Values) -> tuple[list[int], int]:
        """Token ids of the prompt, and the number of its bytes that got none."""
        try:
            if self._binding.source == "messages":
                messages = as_messages(values.get(self._binding.column))
                contents = (message.get("content") for message in messages)
                return self._encode_chat(messages), self._num_lost(contents)
            text = self._prompt_text(values)
            if not self._spec.chat:
                return self._tokenizer.encode(text), self._num_lost([text])
            system = self._spec.system
            turns = [{"role": "system", "content": system}] if system is not None else []
            ids = self._encode_chat([*turns, {"role": "user", "content": text}])
            return ids, self._num_lost([text])
        except TemplateError as error:
            raise RowError("template_error", str(error)) from error
        except UnicodeEncodeError as error:
            raise RowError(
                "invalid_utf8",
                f"the text holds {error.object[error.start : error.end]!r} at character "
                f"{error.start}, which UTF-8 cannot write",
            ) from error

    def _prompt_text(self, values: Values) -> str:
        column = self._binding.column
        if self._prompt_template is not None:
            text: Any = self._prompt_template.render(values)
        else:
            text = values.get(column)
        if text is None:
            raise RowError("invalid_prompt", f"column {column} is null")
        if not isinstance(text, str):
            kind = type(text).__name__
            raise RowError(
                "invalid_prompt", f"column {column} holds a value of type {kind}, not text"
            )
        if text == "":
            raise RowError("empty_prompt", "the prompt is an empty string")
        return text

    def _encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        assert self._chat_template is not None
        return self._chat_template.encode(messages, self._tokenizer, **self._spec.template_kwargs)

    # ---- its length ----------------------------------------------------------------------

    def _fit(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        if not token_ids:
            raise RowError("empty_prompt", "the prompt has no tokens")
        limit = self._context_length
        if len(token_ids) < limit:
            return token_ids
        if self._spec.truncate is None:
            raise RowError(
                "context_length_exceeded",
                f"the prompt has {len(token_ids)} tokens; the context window holds {limit} and "
                "one must be left for the answer; shorten it or cut it with --truncate",
            )
        return truncate(
            token_ids,
            max(limit - max(params.max_tokens, 1), limit // 2),
            side=self._spec.truncate,
            bos_id=self._tokenizer.bos_id,
        )


def truncate(
    token_ids: list[int], num_kept: int, *, side: Literal["left", "right"], bos_id: int | None
) -> list[int]:
    """Keep `num_kept` tokens, the last ones where `side` is left; a leading BOS stays."""
    if side == "right":
        return token_ids[:num_kept]
    if bos_id is not None and token_ids[0] == bos_id and num_kept > 1:
        return [bos_id, *token_ids[len(token_ids) - num_kept + 1 :]]
    return token_ids[len(token_ids) - num_kept :]


def param_of_text(name: str, text: str | None) -> Any:
    """A parameter out of a text cell: JSON where it is any, nothing where it is empty.

    A stop text stays as it is unless it is a JSON list.
    """
    if not text or (name == "stop" and not text.startswith("[")):
        return text or None
    try:
        return json.loads(text)
    except ValueError:
        return text


# ---- messages ----------------------------------------------------------------------------


def as_messages(value: Any) -> list[dict[str, Any]]:
    """A conversation in any of its forms as a list of dicts; the chat template checks the rest.

    value: a list of mappings or of (key, value) pairs, or JSON text of such a list

    Raises RowError: `invalid_prompt` for another shape, `empty_prompt` for no message at all.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError("invalid_prompt", f"messages is not JSON: {error}") from error
    if not isinstance(value, list):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise RowError("invalid_prompt", f"messages is {kind}, not a list of role and content")
    if not value:
        raise RowError("empty_prompt", "the conversation has no messages")
    return [_as_message(item, number) for number, item in enumerate(value, 1)]


def _as_message(item: Any, number: int) -> dict[str, Any]:
    try:
        return dict(item)
    except (TypeError, ValueError):
        kind = "null" if item is None else f"a {type(item).__name__}"
        raise RowError(
            "invalid_prompt", f"message {number} is {kind}, not a struct or a map"
        ) from None


# ---- results -----------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _facts(
    params: SamplingParams | None, original_prompt_tokens: int | None = None, num_lost: int = 0
) -> RowFacts:
    """The same object for equal rows, as many are held at once."""
    return RowFacts(
        truncated=original_prompt_tokens is not None,
        original_prompt_tokens=original_prompt_tokens,
        sampling_params=None if params is None else _params_json(params),
        lost_prompt_bytes=num_lost,
    )


@functools.lru_cache(maxsize=1024)
def _params_json(params: SamplingParams) -> str:
    """One text for all rows of the same parameters, as many rows are held at once."""
    return params.to_json()


def error_row(row_index: int, error: RowError, prompt_tokens: int = 0) -> FinishedRow:
    """The result of a row that cannot run."""
    return FinishedRow(
        row_index=row_index,
        status="error",
        prompt_tokens=prompt_tokens,
        error_code=error.code,
        error_message=str(error),
    )
