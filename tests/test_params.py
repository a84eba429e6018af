"""Sampling parameters: types, ranges, and per-row values by name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.params import params_from_mapping, validate_params
from engine.requests import RowError, SamplingParams

NUM_TOKENS = 100


def refusal(**changes: Any) -> str:
    with pytest.raises(RowError) as caught:
        validate_params(replace(SamplingParams(), **changes), NUM_TOKENS)
    assert caught.value.code == "invalid_parameter"
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_tokens", 0, "from 1 up"),
        ("max_tokens", 1.5, "an integer"),
        ("max_tokens", True, "an integer"),
        ("min_tokens", -1, "from 0 up"),
        ("min_tokens", 257, "max_tokens, 256"),
        ("temperature", -0.1, "from 0 (greedy) to 1000"),
        ("temperature", math.nan, "from 0 (greedy) to 1000"),
        ("temperature", math.inf, "from 0 (greedy) to 1000"),
        ("temperature", "0.5", "a number"),
        ("top_k", -1, "from 0 (keeps all) up"),
        ("top_p", 0.0, "above 0, up to 1"),
        ("top_p", 1.01, "above 0, up to 1"),
        ("min_p", -0.01, "from 0 (keeps all) to 1"),
        ("min_p", 1.01, "from 0 (keeps all) to 1"),
        ("presence_penalty", math.inf, "finite"),
        ("frequency_penalty", math.nan, "finite"),
        ("stop_token_ids", (100,), "from 0 to 99"),
        ("logit_bias", ((-1, 1.0),), "from 0 to 99"),
        ("logit_bias", ((1, math.inf),), "finite"),
        ("seed", 2**63, "64 bits"),
        ("seed", -(2**63) - 1, "64 bits"),
        ("logprobs", 21, "from 0 to 20"),
        ("logprobs", -1, "from 0 to 20"),
        ("include_stop", 1, "true or false"),
        ("stop", ("\ud800",), "a text"),
    ],
)
def test_a_bad_value_is_refused_by_name_with_what_is_allowed(
    name: str, value: Any, allowed: str
) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name} is ")
    assert allowed in message


@pytest.mark.parametrize("value", [0, -1, 0.0, -0.5, math.nan])
def test_a_repetition_penalty_of_0_or_less_is_refused(value: float) -> None:
    """Case 64: 0, -1."""
    assert refusal(repetition_penalty=value).endswith("it must be a number above 0 (1 is none)")


def test_an_empty_stop_is_refused_and_none_or_an_empty_list_means_none() -> None:
    """Case 62: stop "", [], ["", "x"], null."""
    base = SamplingParams()
    for value in ("", ["", "x"]):
        with pytest.raises(RowError, match=r"stop is .*none of them empty"):
            params_from_mapping(base, {"stop": value})
    assert params_from_mapping(base, {"stop": []}).stop == ()
    assert params_from_mapping(replace(base, stop=("x",)), {"stop": None}).stop == ("x",)
    assert refusal(stop=("", "x")).startswith("stop is ('', 'x')")


def test_the_largest_and_smallest_values_allowed_pass() -> None:
    for params in (
        SamplingParams(),
        SamplingParams(
            max_tokens=1,
            min_tokens=1,
            temperature=1000.0,
            top_k=2**31 - 1,
            min_p=1.0,
            seed=-(2**63),
            stop_token_ids=(0, 99),
            logit_bias=((0, -1e300), (99, 1e300)),
            logprobs=20,
        ),
        SamplingParams(seed=2**63 - 1, top_p=5e-324, repetition_penalty=5e-324, logprobs=0),
    ):
        validate_params(params, NUM_TOKENS)


def test_values_of_a_row_replace_those_of_the_job_and_null_keeps_them() -> None:
    """Case 28: null means the job default."""
    base = SamplingParams(temperature=0.7, top_k=40, seed=5, stop=("x",))
    values = {
        "temperature": 0,
        "top_k": None,
        "seed": None,
        "max_tokens": 12.0,
        "stop": ["a", "b"],
        "stop_token_ids": [3, 4],
        "logit_bias": {"7": 1, 8: -2.5, "9": None},
        "ignore_eos": True,
    }
    assert params_from_mapping(base, values) == replace(
        base,
        temperature=0.0,
        max_tokens=12,
        stop=("a", "b"),
        stop_token_ids=(3, 4),
        logit_bias=((7, 1.0), (8, -2.5)),
        ignore_eos=True,
    )


def test_one_text_is_a_stop_and_pairs_are_a_bias() -> None:
    got = params_from_mapping(SamplingParams(), {"stop": ".\n", "logit_bias": [(1, 2), [3, 4.5]]})
    assert got.stop == (".\n",)
    assert got.logit_bias == ((1, 2.0), (3, 4.5))


def test_numpy_numbers_are_numbers() -> None:
    values = {"top_k": np.int64(3), "temperature": np.float32(0.5), "seed": np.uint32(7)}
    got = params_from_mapping(SamplingParams(), values)
    assert (got.top_k, got.temperature, got.seed) == (3, 0.5, 7)
    assert {type(got.top_k), type(got.temperature), type(got.seed)} == {int, float}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", True),
        ("temperature", "1"),
        ("temperature", [1.0]),
        ("top_k", 2.5),
        ("top_k", "40"),
        ("top_k", math.inf),
        ("seed", 1e300),
        ("stop", 5),
        ("stop", [5]),
        ("stop", [None]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [1.5]),
        ("logit_bias", "1:2"),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {"1": "2"}),
        ("logit_bias", [1, 2]),
        ("include_stop", "yes"),
        ("ignore_eos", 1),
    ],
)
def test_nothing_is_converted_silently(name: str, value: Any) -> None:
    with pytest.raises(RowError, match=f"^{name} is .*; it must be "):
        params_from_mapping(SamplingParams(), {name: value})


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(RowError, match="'temprature'; did you mean temperature"):
        params_from_mapping(SamplingParams(), {"temprature": 1.0})
    with pytest.raises(RowError, match="'qqq'; known are max_tokens, min_tokens,"):
        params_from_mapping(SamplingParams(), {"qqq": None})


def test_a_long_value_is_shortened_in_the_message() -> None:
    assert len(refusal(stop=("",) * 1000)) < 250
