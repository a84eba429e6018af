"""Next tokens: distributions, penalties, log-probabilities, seeds, and independence of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from engine.requests import Request, RowError, SamplingParams
from engine.sampler import Chosen, RowSampler, choose, ending_token
from kernels.cpu.philox import philox4x32
from kernels.ops import Ops
from tests.reference_sampler import adjusted, probabilities, uniform

NUM_DRAWS = 20_000
RNG = np.random.default_rng(20_260_101)
NO_EOG: frozenset[int] = frozenset()


def row_of(
    params: SamplingParams | None = None,
    *,
    row_index: int = 0,
    sample_index: int = 0,
    job_seed: int = 0,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    eog_ids: frozenset[int] = NO_EOG,
    **changes: Any,
) -> RowSampler:
    request = Request(
        row_index=row_index,
        sample_index=sample_index,
        token_ids=np.array(prompt, np.int32),
        params=replace(params or SamplingParams(), **changes),
        job_seed=job_seed,
    )
    row = RowSampler(request, eog_ids)
    for token_id in output:
        row.accept(token_id)
    return row


def choose_all(logits: Any, rows: list[RowSampler], **kwargs: Any) -> list[Chosen | RowError]:
    matrix = np.array(np.broadcast_to(np.asarray(logits, np.float32), (len(rows), len(logits))))
    return choose(matrix, rows, **{"num_tokens": matrix.shape[1], **kwargs})


def ids_of(outcomes: list[Chosen | RowError]) -> list[int]:
    assert all(isinstance(outcome, Chosen) for outcome in outcomes), outcomes
    return [cast(Chosen, outcome).token_id for outcome in outcomes]


def choose_one(logits: Any, row: RowSampler, **kwargs: Any) -> int:
    return ids_of(choose_all(logits, [row], **kwargs))[0]


class ReversedWorkers:
    """Runs the workers one after the other, the last one first."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers

    def run(self, body: Callable[[int], None]) -> None:
        for worker in reversed(range(self.num_workers)):
            body(worker)


# ---- distributions -------------------------------------------------------------------------

LOGITS = {
    "5 tokens": np.array([1.0, -0.5, 2.0, 0.0, 1.0], np.float32),
    "40 normal": RNG.normal(0, 1.5, 40).astype(np.float32),
    "300 with ties": RNG.integers(-3, 3, 300).astype(np.float32),
    "1000 heavy tail": (2 * RNG.standard_t(4, 1000)).astype(np.float32),
}
MIXES = {
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


@settings(max_examples=150, deadline=None)
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
    wanted = probabilities(logits, params)
    rows = [row_of(params, row_index=i, job_seed=11) for i in range(20)]
    for row_index, token in enumerate(ids_of(choose_all(logits, rows))):
        u = uniform(params, row_index=row_index, sample_index=0, position=0, job_seed=11)
        below = wanted[:token].sum()
        assert below - 1e-6 <= u <= below + wanted[token] + 1e-6
        assert wanted[token] > 0 or near_a_border(logits, params)


def near_a_border(logits: np.ndarray, params: SamplingParams) -> bool:
    """Whether rounding may decide which tokens top_p or min_p keep."""
    nudged = [
        replace(params, top_p=min(1.0, params.top_p * (1 + sign * 1e-9)), min_p=min_p)
        for sign in (-1, 1)
        for min_p in (params.min_p * (1 - 1e-9), min(1.0, params.min_p * (1 + 1e-9)))
    ]
    kept = [tuple(np.flatnonzero(probabilities(logits, params))) for params in nudged]
    return len(set(kept)) > 1


# ---- random numbers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    words = philox4x32(*(np.uint64(word) for word in (*counter, *key)))
    assert tuple(int(word) for word in words) == wanted


FLAT = np.zeros(1000, np.float32)


def test_a_seeded_row_is_the_same_alone_among_neighbours_and_on_any_worker() -> None:
    """Case 32: row seed 42 alone, with unseeded neighbours, on 1 and 4 workers."""
    params = SamplingParams(temperature=1.0, seed=42)
    alone = choose_one(FLAT, row_of(params, row_index=5))
    neighbours = [row_of(temperature=1.0, row_index=i) for i in range(9)]
    for place in (0, 4, 9):
        rows = [*neighbours[:place], row_of(params, row_index=77), *neighbours[place:]]
        for num_workers in (1, 4):
            ops = cast(Ops, ReversedWorkers(num_workers))
            assert ids_of(choose_all(FLAT, rows, ops=ops))[place] == alone


def test_unseeded_twins_differ_but_repeat_under_the_job_seed() -> None:
    """Case 32: two equal prompts without row seed."""

    def texts(job_seed: int) -> list[tuple[int, ...]]:
        rows = [row_of(temperature=1.0, row_index=i, job_seed=job_seed) for i in (0, 1)]
        steps = []
        for _ in range(5):
            steps.append(ids_of(choose_all(FLAT, rows)))
            for row, token_id in zip(rows, steps[-1], strict=True):
                row.accept(token_id)
        return list(zip(*steps, strict=True))

    first, second = texts(1)
    assert first != second
    assert texts(1) == [first, second]
    assert set(texts(2)).isdisjoint({first, second})


def test_seed_row_sample_position_and_purpose_each_change_the_number() -> None:
    base = {"temperature": 1.0, "row_index": 3, "sample_index": 0, "job_seed": 9}
    rows = [
        row_of(**base),
        row_of(**{**base, "row_index": 4}),
        row_of(**{**base, "row_index": 3 + 2**32}),
        row_of(**{**base, "sample_index": 1}),
        row_of(**{**base, "job_seed": 10}),
        row_of(**{**base, "job_seed": 9 + 2**32}),
        row_of(**{**base, "job_seed": -9}),
        row_of(**base, output=[1]),
        row_of(**base, seed=9),
    ]
    wide = np.zeros(200_000, np.float32)
    assert len(set(ids_of(choose_all(wide, rows)))) == len(rows)
    assert choose_one(FLAT, row_of(temperature=1.0, job_seed=9)) != choose_one(
        FLAT, row_of(temperature=1.0, seed=9)
    )


def test_each_row_follows_its_own_parameters() -> None:
    """Case 28: temperature {0, 1.5}, top_k {1, 40} and others mixed in one batch."""
    logits = RNG.normal(0, 2, (6, 500)).astype(np.float32)
    rows = [
        row_of(row_index=0),
        row_of(row_index=1, temperature=1.5, top_k=1),
        row_of(row_index=2, temperature=1.5, top_k=40),
        row_of(row_index=3, temperature=1.5, top_p=0.5, seed=1),
        row_of(row_index=4, temperature=1.5, logprobs=2),
        row_of(row_index=5, logit_bias=((17, 100.0),)),
    ]
    together = choose(logits, rows, num_tokens=500)
    alone = [choose(logits[i : i + 1], [rows[i]], num_tokens=500)[0] for i in range(6)]
    assert together == alone
    ids = ids_of(together)
    assert ids[:2] == logits[:2].argmax(axis=1).tolist()
    assert ids[5] == 17
    backwards = choose(logits[::-1].copy(), rows[::-1], num_tokens=500)
    assert backwards[::-1] == together


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
    changes: dict[str, float], logits: list[float], wanted: int
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
    changes = {"temperature": 1000.0, "min_tokens": 1, "top_p": 0.99999}
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
