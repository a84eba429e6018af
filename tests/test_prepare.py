"""What becomes of an input row: a request, or an error row with its code."""

from __future__ import annotations

import time
from typing import Any

import pytest

from engine import FinishedRow, Request, SamplingParams
from engine.chat import ChatTemplate, PromptTemplate
from engine.gguf_file import GgufFile
from engine.tokenizer import Tokenizer
from jobs.prepare import RowFacts, RowPreparer, as_messages, truncate
from jobs.records import Binding, JobSpec, SpecError
from tests.golden import GOLDEN
from tests.smollm2 import smollm2_path

MODEL = GOLDEN / "llama-q4_0.gguf"
CONTEXT_LENGTH = 64
TEMPLATE = """
{%- if messages[0].role == 'system' %}[{{ messages[0].content }}]{% endif %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role not in ('user', 'assistant') %}
{{- raise_exception('unknown role ' + message.role) }}{% endif %}
{%- if message.role != ('user' if loop.index0 is even else 'assistant') %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- message.role + ': ' + message.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(GgufFile.open(MODEL))


def preparer(
    tokenizer: Tokenizer,
    *,
    source: Any = "prompt",
    params: tuple[str, ...] = (),
    template: str | None = None,
    prompt_template: PromptTemplate | None = None,
    defaults: SamplingParams | None = None,
    **spec: Any,
) -> RowPreparer:
    column = "" if source == "template" else source
    return RowPreparer(
        JobSpec(input="in.parquet", model=str(MODEL), params=defaults or SamplingParams(), **spec),
        Binding(source=source, column=column, params=params),
        tokenizer=tokenizer,
        chat_template=None if template is None else ChatTemplate(template),
        context_length=CONTEXT_LENGTH,
        prompt_template=prompt_template,
    )


def request_of(prepared: tuple[Request | FinishedRow, RowFacts]) -> Request:
    assert isinstance(prepared[0], Request), prepared[0]
    return prepared[0]


def error_of(prepared: tuple[Request | FinishedRow, RowFacts]) -> tuple[str, str]:
    row = prepared[0]
    assert isinstance(row, FinishedRow), row
    assert row.status == "error"
    assert row.error_code is not None and row.error_message is not None
    return row.error_code, row.error_message


def text_of(tokenizer: Tokenizer, request: Request) -> str:
    return b"".join(tokenizer.token_bytes(int(token)) for token in request.token_ids).decode()


# ---- prompts -----------------------------------------------------------------------------


def test_null_is_an_error_and_blanks_are_ordinary(tokenizer: Tokenizer) -> None:
    """Case 7: null is an error, never text; blanks, "None" and "nan" are prompts as they are."""
    prepare = preparer(tokenizer).prepare
    assert error_of(prepare(0, {"prompt": None}))[0] == "invalid_prompt"
    for text in ("   ", "\n", "None", "nan"):
        request = request_of(prepare(1, {"prompt": text}))
        assert request.token_ids.tolist() == tokenizer.encode(text)


def test_an_empty_prompt_is_one_error_row(tokenizer: Tokenizer) -> None:
    """Case 8: also where BOS would make it a prompt of one token, and with a chat template."""
    assert error_of(preparer(tokenizer).prepare(0, {"prompt": ""}))[0] == "empty_prompt"
    chat = preparer(tokenizer, chat=True, template=TEMPLATE)
    assert error_of(chat.prepare(0, {"prompt": ""}))[0] == "empty_prompt"


@pytest.mark.parametrize("value", [7, 1.5, True, ["text"], {"text": "x"}])
def test_a_prompt_that_is_no_text_names_its_type(tokenizer: Tokenizer, value: Any) -> None:
    code, message = error_of(preparer(tokenizer).prepare(0, {"prompt": value}))
    assert code == "invalid_prompt"
    assert type(value).__name__ in message


def test_a_request_carries_row_index_params_and_seed(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=3)
    prepared = preparer(tokenizer, defaults=params, seed=11).prepare(42, {"prompt": "hello"})
    request = request_of(prepared)
    assert (request.row_index, request.job_seed, request.params) == (42, 11, params)
    assert prepared[1] == RowFacts(sampling_params=params.to_json())


def test_a_prompt_template_takes_columns(tokenizer: Tokenizer) -> None:
    rows = preparer(
        tokenizer,
        source="template",
        prompt_template=PromptTemplate("{{ question }} in {{ language }}"),
    )
    request = request_of(rows.prepare(0, {"question": "cat", "language": "French"}))
    assert request.token_ids.tolist() == tokenizer.encode("cat in French")


# ---- length ------------------------------------------------------------------------------


def prompt_of(tokenizer: Tokenizer, num_tokens: int) -> str:
    text = "a" * (num_tokens - 2)
    assert len(tokenizer.encode(text)) == num_tokens
    return text


def test_an_over_long_prompt_says_its_length_and_the_limit(tokenizer: Tokenizer) -> None:
    """Cases 1 and 3: by default an error row, from the context length on."""
    prepare = preparer(tokenizer).prepare
    fits = prompt_of(tokenizer, CONTEXT_LENGTH - 1)
    assert len(request_of(prepare(0, {"prompt": fits})).token_ids) == CONTEXT_LENGTH - 1
    for num_tokens in (CONTEXT_LENGTH, CONTEXT_LENGTH + 1, CONTEXT_LENGTH + 10_000):
        prepared = prepare(0, {"prompt": prompt_of(tokenizer, num_tokens)})
        code, message = error_of(prepared)
        assert code == "context_length_exceeded"
        assert str(num_tokens) in message and str(CONTEXT_LENGTH) in message
        assert isinstance(prepared[0], FinishedRow)
        assert prepared[0].prompt_tokens == num_tokens
        assert not prepared[1].truncated


def test_truncation_is_told_and_keeps_the_asked_end(tokenizer: Tokenizer) -> None:
    """Case 3: only when asked; the row says so, with the tokens it had."""
    text = "needle " + prompt_of(tokenizer, CONTEXT_LENGTH + 9) + " tail"
    whole = tokenizer.encode(text)
    for side in ("left", "right"):
        rows = preparer(tokenizer, truncate=side, defaults=SamplingParams(max_tokens=16))
        prepared = rows.prepare(0, {"prompt": text})
        kept = request_of(prepared).token_ids.tolist()
        assert len(kept) == CONTEXT_LENGTH - 16
        assert kept[0] == tokenizer.bos_id
        if side == "left":
            assert kept[1:] == whole[len(whole) - len(kept) + 1 :]
        else:
            assert kept == whole[: len(kept)]
        facts = prepared[1]
        assert (facts.truncated, facts.original_prompt_tokens) == (True, len(whole))


def test_truncate_without_bos_keeps_only_the_end() -> None:
    assert truncate([5, 6, 7, 8], 2, side="left", bos_id=None) == [7, 8]
    assert truncate([5, 6, 7, 8], 2, side="left", bos_id=1) == [7, 8]
    assert truncate([1, 6, 7, 8], 2, side="left", bos_id=1) == [1, 8]
    assert truncate([1, 6, 7, 8], 3, side="right", bos_id=1) == [1, 6, 7]


def test_a_very_long_prompt_does_not_stall(tokenizer: Tokenizer) -> None:
    """Case 1: 200,000 characters, words and one single run."""
    prepare = preparer(tokenizer).prepare
    for text in ("lorem ipsum " * 16_667, "a" * 200_000):
        started = time.perf_counter()
        assert error_of(prepare(0, {"prompt": text}))[0] == "context_length_exceeded"
        assert time.perf_counter() - started < 5.0


# ---- parameters --------------------------------------------------------------------------


def test_each_row_follows_its_own_parameters(tokenizer: Tokenizer) -> None:
    """Case 28: null means the job's value; what is used is written down."""
    rows = preparer(tokenizer, params=("temperature", "top_k", "sampling_params"))
    first = rows.prepare(0, {"prompt": "x", "temperature": 1.5, "top_k": None})
    second = rows.prepare(
        1,
        {"prompt": "x", "temperature": None, "top_k": 40, "sampling_params": {"max_tokens": 1}},
    )
    assert request_of(first).params == SamplingParams(temperature=1.5)
    assert request_of(second).params == SamplingParams(top_k=40, max_tokens=1)
    assert second[1].sampling_params == SamplingParams(top_k=40, max_tokens=1).to_json()


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": "hot"},
        {"sampling_params": {"top_p": 3.0}},
        {"sampling_params": {"tempreature": 1.0}},
        {"sampling_params": "temperature=1"},
        {"sampling_params": {"stop": [""]}},
    ],
)
def test_a_bad_parameter_fails_its_row(tokenizer: Tokenizer, values: dict[str, Any]) -> None:
    rows = preparer(tokenizer, params=("temperature", "sampling_params"))
    assert error_of(rows.prepare(0, {"prompt": "x", **values}))[0] == "invalid_parameter"


# ---- conversations -----------------------------------------------------------------------


def test_chat_wraps_the_prompt(tokenizer: Tokenizer) -> None:
    rows = preparer(tokenizer, chat=True, system="be brief", template=TEMPLATE)
    request = request_of(rows.prepare(0, {"prompt": "hi"}))
    assert text_of(tokenizer, request).strip() == "[be brief]user: hi\nassistant:"


def test_null_keys_are_not_part_of_a_message(tokenizer: Tokenizer) -> None:
    """Case 10: keys that are null in the struct never reach the template."""
    bare = [{"role": "user", "content": "hi"}]
    padded = [{"role": "user", "content": "hi", "name": None, "tool_calls": None}]
    seen = TEMPLATE + "{{ messages[0] | length }}"
    rows = preparer(tokenizer, source="messages", template=seen)
    one, two = (request_of(rows.prepare(0, {"messages": m})) for m in (bare, padded))
    assert text_of(tokenizer, one).endswith("2")
    assert one.token_ids.tolist() == two.token_ids.tolist()


def test_messages_come_as_structs_maps_or_json_text() -> None:
    plain = [{"role": "user", "content": "hi"}]
    assert as_messages([[("role", "user"), ("content", "hi")]]) == plain
    assert as_messages('[{"role": "user", "content": "hi"}]') == plain


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "alternate"),
        ([{"role": "assistant", "content": "a"}], "alternate"),
        ([{"role": "foo", "content": "a"}], "unknown role foo"),
    ],
)
def test_a_template_that_refuses_is_quoted(
    tokenizer: Tokenizer, messages: list[dict[str, str]], words: str
) -> None:
    """Case 13: the error row carries the template's own message; other rows go on."""
    rows = preparer(tokenizer, source="messages", template=TEMPLATE)
    code, message = error_of(rows.prepare(0, {"messages": messages}))
    assert code == "template_error"
    assert words in message
    assert request_of(rows.prepare(1, {"messages": [{"role": "user", "content": "a"}]}))


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        (None, "invalid_prompt"),
        ("hi", "invalid_prompt"),
        ({"role": "user", "content": "hi"}, "invalid_prompt"),
        ("7", "invalid_prompt"),
        ([7], "invalid_prompt"),
        ([None], "invalid_prompt"),
        ([{"role": None, "content": "hi"}], "template_error"),
        ([{"role": "user", "content": 7}], "template_error"),
        ([{"role": "user", "content": None}], "template_error"),
        ([], "empty_prompt"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "unsupported_content",
        ),
    ],
)
def test_a_bad_conversation_is_an_error_row(tokenizer: Tokenizer, messages: Any, code: str) -> None:
    """Case 13: role null, content null, an empty list, and what is no list at all."""
    rows = preparer(tokenizer, source="messages", template=TEMPLATE)
    assert error_of(rows.prepare(0, {"messages": messages}))[0] == code


def test_a_lone_surrogate_is_invalid_utf8(tokenizer: Tokenizer) -> None:
    rows = preparer(tokenizer, source="messages", template=TEMPLATE)
    bad = '[{"role": "user", "content": "a \\ud800 b"}]'
    assert error_of(rows.prepare(0, {"messages": bad}))[0] == "invalid_utf8"


def test_a_job_that_needs_a_chat_template_says_so_at_once(tokenizer: Tokenizer) -> None:
    with pytest.raises(SpecError, match="chat-template"):
        preparer(tokenizer, source="messages")
    with pytest.raises(SpecError, match="chat-template"):
        preparer(tokenizer, chat=True)


@pytest.mark.parametrize("source", ["prompt", "messages"])
def test_bytes_without_a_token_are_counted_in_the_row(source: str) -> None:
    """SmolLM2's vocabulary has no token for the byte 04: nothing is dropped in silence."""
    smol = Tokenizer.from_gguf(GgufFile.open(smollm2_path()))
    assert 0x04 in smol.lost_bytes
    text = "a\x04b\x04c"
    value = text if source == "prompt" else [{"role": "user", "content": text}]
    _, facts = preparer(smol, source=source, template=TEMPLATE).prepare(0, {source: value})
    assert facts.lost_prompt_bytes == 2
