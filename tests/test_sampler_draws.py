"""Draws follow their distribution, against an independent sampler, and so do single choices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from engine.requests import SamplingParams
from tests.sampler_helpers import adjusted, choose_all, ids_of, probabilities, row_of, uniform

NUM_DRAWS = 20_000
RNG = np.random.default_rng(20_260_101)

LOGITS = {
    "5 tokens": np.array([1.0, -0.5, 2.0, 0.0, 1.0], np.float32),
    "40 normal": RNG.normal(0, 1.5, 40).astype(np.float32),
    "300 with ties": RNG.integers(-3, 3, 300).astype(np.float32),
    "1000 heavy tail": (2 * RNG.standard_t(4, 1000)).astype(np.float32),
}
MIXES: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.3": {"temperature": 0.3},
    "temperature 2": {"temperature": 2.0},
    "top_k 1": {"temperature": 1.0, "top_k": 1},
    "top_k 3": {"temperature": 1.0, "top_k": 3},
    "top_k 25": {"temperature": 1.5, "top_k": 25},
    "top_p 0.5": {"temperature": 1.0, "top_p": 0.5},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "min_p 0.1": {"temperature": 1.0, "min_p": 0.1},
    "min_p 0.02": {"temperature": 1.3, "min_p": 0.02},
    "top_k and top_p": {"temperature": 1.2, "top_k": 20, "top_p": 0.8},
    "top_k and min_p": {"temperature": 0.9, "top_k": 4, "min_p": 0.2},
    "top_p and min_p": {"temperature": 1.4, "top_p": 0.95, "min_p": 0.05},
    "all": {"temperature": 1.1, "top_k": 30, "top_p": 0.92, "min_p": 0.03},
}


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Of a chi-square test, bins with fewer than 5 expected draws merged into one."""
    small = expected < 5
    observed, wanted = counts[~small].tolist(), expected[~small].tolist()
    if expected[small].sum() > 0:
        observed.append(counts[small].sum())
        wanted.append(expected[small].sum())
    if len(wanted) == 1:
        return 1.0
    return float(stats.chisquare(observed, wanted).pvalue)


@pytest.mark.parametrize("mix", MIXES)
def test_20000_draws_follow_the_distribution(mix: str) -> None:
    params = SamplingParams(**MIXES[mix])
    rows = [row_of(params, row_index=i, job_seed=7) for i in range(NUM_DRAWS)]
    for name, logits in LOGITS.items():
        counts = np.bincount(ids_of(choose_all(logits, rows)), minlength=len(logits))
        wanted = probabilities(logits, params)
        assert counts[wanted == 0].sum() == 0, name
        assert p_value(counts, NUM_DRAWS * wanted) > 0.001, name


def test_draws_along_the_positions_of_one_row_follow_the_distribution() -> None:
    logits, params = LOGITS["40 normal"], SamplingParams(temperature=1.0, seed=3)
    rows = [row_of(params) for _ in range(NUM_DRAWS)]
    for position, row in enumerate(rows):
        row.num_generated = position
    ids = np.array(ids_of(choose_all(logits, rows)))
    wanted = NUM_DRAWS * probabilities(logits, params)
    assert p_value(np.bincount(ids, minlength=40), wanted) > 0.001
    # Neighbours along the row are independent too: pairs of the two most likely tokens and others.
    classes = np.minimum(np.argsort(np.argsort(-wanted))[ids], 2)
    pairs = np.bincount(3 * classes[0::2] + classes[1::2], minlength=9)
    share = np.bincount(np.minimum(np.argsort(np.argsort(-wanted)), 2), wanted) / NUM_DRAWS
    assert p_value(pairs, NUM_DRAWS / 2 * np.outer(share, share).ravel()) > 0.001


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    data=st.data(),
    num_tokens=st.sampled_from([1, 2, 63, 64, 65, 200, 1500]),
    temperature=st.sampled_from([1e-6, 0.2, 1.0, 3.0, 1000.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 64, 3000]),
    top_p=st.sampled_from([1e-9, 0.3, 0.77, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-3, 0.3, 1.0]),
)
def test_a_choice_is_the_inverse_of_the_distribution_at_the_rows_number(
    data: st.DataObject,
    num_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = rng.normal(0, 3, num_tokens).astype(np.float32)
    if data.draw(st.booleans()):
        logits = np.round(logits)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assume(not near_a_border(logits, params))
    wanted = probabilities(logits, params)
    rows = [row_of(params, row_index=i, job_seed=11) for i in range(20)]
    for row_index, token in enumerate(ids_of(choose_all(logits, rows))):
        u = uniform(params, row_index=row_index, sample_index=0, position=0, job_seed=11)
        below = wanted[:token].sum()
        assert below - 1e-6 <= u <= below + wanted[token] + 1e-6
        assert wanted[token] > 0


def near_a_border(logits: np.ndarray, params: SamplingParams) -> bool:
    """Whether rounding may decide which tokens top_p or min_p keep."""
    nudged = [
        replace(params, top_p=min(1.0, params.top_p * (1 + sign * 1e-9)), min_p=min_p)
        for sign in (-1, 1)
        for min_p in (params.min_p * (1 - 1e-9), min(1.0, params.min_p * (1 + 1e-9)))
    ]
    kept = [tuple(np.flatnonzero(probabilities(logits, params))) for params in nudged]
    return len(set(kept)) > 1


def test_penalties_and_biases_shape_the_distribution() -> None:
    params = SamplingParams(
        temperature=0.9,
        top_k=12,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((5, 1.5), (9, -2.0)),
    )
    prompt, output = [0, 1, 2, 2, 30], [5, 7, 7, 30]
    logits = LOGITS["40 normal"]
    rows = [row_of(params, row_index=i, prompt=prompt, output=output) for i in range(NUM_DRAWS)]
    counts = np.bincount(ids_of(choose_all(logits, rows)), minlength=len(logits))
    wanted = NUM_DRAWS * probabilities(adjusted(logits, params, prompt, output), params)
    assert counts[wanted == 0].sum() == 0
    assert p_value(counts, wanted) > 0.001
