"""Options to a JobSpec: what is understood, what is refused, and how it is said."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import SamplingParams
from jobs.records import JobSpec, SpecError
from ntx_batch.job_file import KNOWN_KEYS
from ntx_batch.options import OPTIONS
from ntx_batch.spec import KNOWN_OPTIONS, build_spec, parse_size


def spec(**options: Any) -> JobSpec:
    return build_spec("prompts.parquet", model="model.gguf", **options)


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    built = spec(output="answers")
    assert built.input == str(tmp_path / "prompts.parquet")
    assert built.model == str(tmp_path / "model.gguf")
    assert built.output == str(tmp_path / "answers")


def test_options_left_out_and_none_are_the_same() -> None:
    assert spec() == spec(**dict.fromkeys(KNOWN_OPTIONS))


def test_sampling_and_engine_options_reach_their_place() -> None:
    built = spec(
        max_tokens=8, temperature=1, stop="###", kv_type="f16", kv_memory="1.5GiB", threads=2
    )
    assert built.params == SamplingParams(max_tokens=8, temperature=1.0, stop=("###",))
    assert built.engine.kv_type == "f16"
    assert built.engine.kv_memory_nbytes == 3 << 29
    assert built.engine.num_threads == 2


def test_what_is_computed_once_is_of_the_job_and_of_the_engine() -> None:
    built = spec()
    assert (built.samples, built.dedupe, built.engine.reuse_prefixes) == (1, True, True)
    built = spec(samples=3, temperature=0.5, dedupe=False, reuse=False)
    assert (built.samples, built.dedupe, built.engine.reuse_prefixes) == (3, False, False)


def test_the_device_and_its_memories_are_the_engines() -> None:
    engine = spec(device="gpu", memory="24GiB", host_memory="100GiB").engine
    assert (engine.device, engine.memory_nbytes) == ("gpu", 24 << 30)
    assert engine.host_memory_nbytes == 100 << 30
    assert spec(host_memory="auto").engine == spec().engine
    assert (spec().engine.device, spec().engine.kv_type) == ("auto", None)


def test_texts_of_the_command_line_and_values_of_python_are_the_same() -> None:
    texts = spec(
        param_columns="temperature, seed",
        keep="id",
        stop_token_ids="2,5",
        logit_bias='{"5": -2.5}',
        template_kwargs='{"a": [1]}',
    )
    values = spec(
        param_columns=["temperature", "seed"],
        keep=("id",),
        stop_token_ids=[2, 5],
        logit_bias={5: -2.5},
        template_kwargs={"a": [1]},
    )
    assert texts == values
    assert texts.params.logit_bias == ((5, -2.5),)


def test_templates_come_from_files(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("Grüße {{ name }}", encoding="utf-8")
    assert spec(prompt_template=f"@{path}").prompt_template == "Grüße {{ name }}"
    assert spec(prompt_template="{{ name }}").prompt_template == "{{ name }}"
    assert spec(chat=True, chat_template=path).chat_template == "Grüße {{ name }}"


def test_every_flag_is_an_option_and_every_option_a_flag() -> None:
    flags = {option.name for panel in OPTIONS.values() for option in panel}
    assert flags | {"input", "model", "output"} == set(KNOWN_KEYS)
    assert set(KNOWN_OPTIONS) < set(KNOWN_KEYS)


def test_every_sampling_parameter_is_an_option_of_its_name() -> None:
    assert {field.name for field in fields(SamplingParams)} <= set(KNOWN_OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_token": 5}, "no option max_token; did you mean max_tokens?"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be an integer from 1 up"),
        ({"max_tokens": "12"}, "max_tokens is '12'"),
        ({"temperature": -1}, "temperature is -1"),
        ({"kv_type": "int4"}, "kv_type is one of f32, f16, int8, not 'int4'"),
        ({"limit": 0}, "limit is at least 1, not 0"),
        ({"limit": True}, "limit is a whole number, not True"),
        ({"seed": 2**63}, "seed is an integer of 64 bits"),
        ({"kv_memory": "8 gallons"}, "kv_memory: '8 gallons' is not a size; write it like 8GiB"),
        ({"kv_memory": 0}, "kv_memory is more than 0 bytes"),
        ({"stop_token_ids": "2,x"}, "stop_token_ids is a list of token ids such as 2,5"),
        ({"template_kwargs": "{"}, "template_kwargs is not JSON"),
        ({"template_kwargs": "[1]"}, "template_kwargs is a JSON object"),
        ({"logit_bias": '{"x": 1}'}, "logit_bias"),
        ({"prompt_template": "@/no/such/file"}, "cannot read /no/such/file"),
        (
            {"prompt_column": "a", "messages_column": "b"},
            "prompt_column and messages_column exclude each other",
        ),
        ({"prompt_template": "x", "prompt_column": "b"}, "exclude each other"),
        ({"messages_column": "m", "chat": True}, "drop chat"),
        ({"system": "Be brief."}, "add chat"),
        ({"device": "cuda"}, "device is one of auto, cpu, gpu, not 'cuda'"),
        ({"device": "cpu", "host_memory": "8GiB"}, "drop host_memory"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize("stop", ["", ["", "x"]])
def test_an_empty_stop_text_is_refused(stop: Any) -> None:
    """Case 62: an empty stop text would match at once; a list without any means none."""
    with pytest.raises(SpecError, match="none of them empty"):
        spec(stop=stop)
    assert spec(stop=[]).params.stop == ()
    assert spec(stop=None).params.stop == ()


@given(st.integers(0, 2**40))
def test_a_number_alone_is_bytes(nbytes: int) -> None:
    assert parse_size(nbytes) == parse_size(str(nbytes)) == parse_size(f"{nbytes}B") == nbytes


@given(st.integers(0, 4096), st.sampled_from([("K", 1), ("M", 2), ("G", 3), ("T", 4)]))
def test_binary_and_decimal_units(number: int, unit: tuple[str, int]) -> None:
    name, power = unit
    assert parse_size(f"{number}{name}iB") == number * 1024**power
    assert parse_size(f"{number} {name.lower()}b") == number * 1000**power
