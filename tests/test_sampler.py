"""Next tokens: greedy, penalties, biases, masks, log-probabilities, and ending tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from engine.requests import RowError, SamplingParams
from engine.sampler import Chosen, RowSampler, ending_token
from tests.sampler_helpers import choose, choose_all, choose_one, ids_of, row_of

RNG = np.random.default_rng(20_260_103)

# ---- greedy --------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1, 63, 64, 127, 128, 198, 199])
def test_greedy_takes_the_largest_logit_anywhere(place: int) -> None:
    logits = RNG.normal(0, 1, 200).astype(np.float32)
    logits[place] = 9
    assert choose_one(logits, row_of()) == place
    assert choose_one(logits - 20, row_of()) == place


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = np.zeros(300, np.float32)
    logits[[70, 71, 250]] = 1
    assert choose_one(logits, row_of()) == 70
    assert choose_one([-1.0, -0.0, 0.0], row_of()) == 1


def test_padded_ids_are_never_chosen() -> None:
    """Case 55: 32 tokens + 32 more rows with large logits."""
    logits = np.concatenate([np.linspace(0, 1, 32), np.full(32, 50.0)])
    assert choose_one(logits, row_of(), num_tokens=32) == 31
    rows = [row_of(temperature=t, row_index=i) for t in (1.0, 1000.0) for i in range(500)]
    assert max(ids_of(choose_all(logits, rows, num_tokens=32))) < 32
    logprobs = choose_all(logits, [row_of(logprobs=20)], num_tokens=32)[0]
    assert max(token for token, _ in cast(Chosen, logprobs).logprob.top) < 32  # type: ignore[union-attr]


# ---- penalties, biases, masks --------------------------------------------------------------


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    """Case 64: penalty 1.3, prompt holding the greedy next token; positive and negative."""
    assert choose_one([2.0, 1.6, 0.0], row_of(repetition_penalty=1.3, prompt=[0])) == 1
    assert choose_one([2.0, 1.5, 0.0], row_of(repetition_penalty=1.3, prompt=[0])) == 0
    assert choose_one([-1.0, -1.2, -9.0], row_of(repetition_penalty=1.3, prompt=[0])) == 1
    assert choose_one([-1.0, -1.4, -9.0], row_of(repetition_penalty=1.3, prompt=[0])) == 0


def test_repetition_penalty_looks_at_the_whole_prompt_and_output_once_per_token() -> None:
    """Case 64: documented scope and window."""
    prompt = [0, *[3] * 5000]
    row = row_of(repetition_penalty=2.0, prompt=prompt, output=[1, 1])
    assert choose_one([4.0, 4.0, 1.9, 3.0], row) == 0  # 2, 2, 1.9, 1.5
    row.accept(2)
    assert choose_one([3.6, 4.0, 3.9, 3.0], row) == 1  # 1.8, 2, 1.95, 1.5


@pytest.mark.parametrize(
    ("changes", "logits", "wanted"),
    [
        # output: token 1 once, token 2 three times; the prompt, token 0, does not count
        ({"presence_penalty": 0.5}, [0.4, 1.0, 1.0], 1),
        ({"presence_penalty": 0.5}, [0.51, 1.0, 1.0], 0),
        ({"frequency_penalty": 0.25}, [0.0, 1.0, 1.49], 1),
        ({"frequency_penalty": 0.25}, [0.0, 1.0, 1.51], 2),
        ({"presence_penalty": -1.0}, [1.9, 1.0, 0.9], 1),
        ({"frequency_penalty": -1.0}, [1.9, 1.0, 0.9], 2),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, [0.0, 1.0, 1.6], 2),
        # 3 / 2 - 0.5 - 0.25 = 0.75; 4 / 2 - 0.5 - 3 * 0.25 = 0.75; a tie, the lower id wins
        (
            {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 2.0},
            [1.4, 3.0, 4.0],
            1,
        ),
        (
            {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 2.0},
            [1.52, 3.0, 4.0],
            0,
        ),
    ],
)
def test_presence_and_frequency_penalties_by_hand(
    changes: dict[str, Any], logits: list[float], wanted: int
) -> None:
    assert choose_one(logits, row_of(prompt=[0], output=[1, 2, 2, 2], **changes)) == wanted


def test_logit_bias_comes_after_the_penalties() -> None:
    row = row_of(repetition_penalty=2.0, logit_bias=((0, 1.0),), prompt=[0])
    assert choose_one([3.0, 2.4], row) == 0  # 3 / 2 + 1 = 2.5, not (3 + 1) / 2
    assert choose_one([3.0, 2.6], row) == 1


def test_huge_biases_and_penalties_neither_overflow_nor_leak_to_a_neighbour() -> None:
    banned = row_of(temperature=1.0, logit_bias=((1, -1e308), (2, -1e308)), presence_penalty=1e308)
    banned.accept(3)
    rows = [row_of(), banned, row_of()]
    assert ids_of(choose_all([0.0, 5.0, 4.0, 3.0], rows)) == [1, 0, 1]


def test_many_generated_tokens_are_counted() -> None:
    row = row_of(frequency_penalty=0.01, prompt=[0])
    for token_id in range(1000):
        row.accept(token_id)
        row.accept(999)
    assert row.seen is not None
    assert row.seen.ids.tolist() == list(dict.fromkeys([0, 999, *range(1000)]))
    assert row.seen.counts.tolist() == [1, 1001, *[1] * 998]


def test_ending_tokens_are_masked_before_min_tokens() -> None:
    logits = [9.0, 8.0, 7.0, 1.0]
    eog = frozenset({0})
    row = row_of(min_tokens=2, stop_token_ids=(1,), eog_ids=eog)
    chosen = []
    for _ in range(3):
        chosen.append(choose_one(logits, row))
        row.accept(chosen[-1])
    assert chosen == [2, 2, 0]
    keeps_eos = row_of(min_tokens=2, stop_token_ids=(1,), ignore_eos=True, eog_ids=eog)
    assert choose_one(logits, keeps_eos) == 0


def test_masked_tokens_are_not_drawn_at_any_temperature() -> None:
    changes: dict[str, Any] = {"temperature": 1000.0, "min_tokens": 1, "top_p": 0.99999}
    rows = [row_of(row_index=i, eog_ids=frozenset({0, 2}), **changes) for i in range(500)]
    assert set(ids_of(choose_all([9.0, 1.0, 8.0, 0.0], rows))) == {1, 3}


def test_a_row_with_every_token_masked_is_an_error_of_that_row() -> None:
    rows = [row_of(), row_of(min_tokens=1, eog_ids=frozenset({0, 1})), row_of()]
    first, masked, last = choose_all([1.0, 2.0], rows)
    assert isinstance(masked, RowError) and masked.code == "invalid_parameter"
    assert first == last == Chosen(1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_an_error_of_that_row(bad: float) -> None:
    logits = np.zeros((3, 200), np.float32)
    logits[:, 7] = 1
    logits[1, 130] = bad
    for temperature in (0.0, 1.0):
        rows = [row_of(temperature=temperature, top_k=1, row_index=i) for i in range(3)]
        first, error, last = choose(logits, rows, num_tokens=200)
        assert first == last == Chosen(7)
        assert isinstance(error, RowError) and error.code == "internal_error"
        assert "id 130" in str(error) and "1 of 200" in str(error)


# ---- log-probabilities ---------------------------------------------------------------------


def logprob_of(logits: Any, row: RowSampler) -> Any:
    return cast(Chosen, choose_all(logits, [row])[0]).logprob


def test_logprobs_by_hand() -> None:
    logits = np.log(np.array([1.0, 4.0, 2.0, 1.0], np.float32))  # of 8
    got = logprob_of(logits, row_of(logprobs=3))
    assert got.token_id == 1
    assert got.logprob == pytest.approx(math.log(4 / 8), abs=1e-7)
    assert [token for token, _ in got.top] == [1, 2, 0]
    wanted = [math.log(p) for p in (4 / 8, 2 / 8, 1 / 8)]
    assert [logprob for _, logprob in got.top] == pytest.approx(wanted, abs=1e-7)
    exact = np.array([0.0, 1.0, -30.0, 0.0])
    got = logprob_of(exact, row_of(logprobs=4))
    norm = 1 + math.log(1 + 2 * math.exp(-1) + math.exp(-31))
    assert dict(got.top) == pytest.approx(dict(enumerate(exact - norm)), abs=1e-11)


def test_logprobs_are_of_the_model_before_everything_else() -> None:
    row = row_of(logprobs=1, logit_bias=((2, 100.0),), temperature=3.0, top_k=1, prompt=[0, 1, 2])
    got = logprob_of([0.0, 0.0, 0.0, math.log(7)], row)
    assert got.token_id == 2
    assert got.logprob == pytest.approx(math.log(0.1), abs=1e-7)
    assert got.top == ((3, pytest.approx(math.log(0.7), abs=1e-7)),)


def test_logprobs_0_reports_the_chosen_token_alone_and_none_nothing() -> None:
    got = logprob_of([0.0, 0.0], row_of(logprobs=0))
    assert (got.token_id, got.top) == (0, ())
    assert got.logprob == pytest.approx(math.log(0.5), abs=1e-11)
    assert logprob_of([0.0, 0.0], row_of()) is None


def test_logprobs_of_a_large_vocabulary_agree_with_numpy() -> None:
    logits = (3 * RNG.standard_t(4, 30_000)).astype(np.float32)
    got = logprob_of(logits, row_of(logprobs=20, temperature=1.0))
    exact = logits.astype(np.float64)
    wanted = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    order = np.argsort(-exact, kind="stable")[:20]
    assert [token for token, _ in got.top] == order.tolist()
    assert [value for _, value in got.top] == pytest.approx(wanted[order].tolist(), abs=1e-9)
    assert got.logprob == pytest.approx(wanted[got.token_id], abs=1e-9)


def test_fewer_tokens_than_logprobs_reports_them_all() -> None:
    got = logprob_of([0.0, 1.0], row_of(logprobs=20))
    assert [token for token, _ in got.top] == [1, 0]


# ---- the end of a row ----------------------------------------------------------------------


def test_ending_tokens() -> None:
    """Case 5: any end-of-generation token ends the row."""
    eog = frozenset({2, 3})
    params = SamplingParams(stop_token_ids=(7,))
    assert ending_token(2, params, eog, 1) == "2"
    assert ending_token(3, params, eog, 1) == "3"
    assert ending_token(7, params, eog, 1) == "7"
    assert ending_token(4, params, eog, 1) is None
    assert ending_token(2, replace(params, ignore_eos=True), eog, 1) is None
    assert ending_token(7, replace(params, ignore_eos=True), eog, 1) == "7"
