"""What rows share: counted where all of them are read, never promised too freely where some are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Request, SamplingParams
from jobs.sharing import SampledRow, Sharing, estimate_sharing
from jobs.workload import SAMPLE_ROWS, sample_ranges
from kernels.ops import PAGE_TOKENS

OWN_TOKENS, NEW_TOKENS = 20, 16


def row(tokens: Sequence[int], *, temperature: float = 0.0, seed: int | None = None) -> SampledRow:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature, seed=seed)
    ids = np.asarray(tokens, np.int32)
    return SampledRow(Request(row_index=0, token_ids=ids, params=params), "{}", NEW_TOKENS)


def counted(rows: Sequence[Sequence[int]], *, to_pages: bool = False) -> float:
    """Mean tokens that rows take over, one after the other, found token by token."""
    seen: set[int] = set()
    reused = 0
    for tokens in rows:
        beginnings = list(itertools.accumulate(tokens, lambda past, token: hash((past, token))))
        common = sum(b in seen for b in beginnings[:-1])
        reused += common // PAGE_TOKENS * PAGE_TOKENS if to_pages else common
        seen.update(beginnings)
    return reused / len(rows)


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=80), min_size=1, max_size=12)


@given(prompts, st.integers(1, 4))
def test_rows_that_are_all_read_are_counted(rows: list[list[int]], run_length: int) -> None:
    runs = [
        [row(tokens, temperature=1.0) for tokens in rows[at : at + run_length]]
        for at in range(0, len(rows), run_length)
    ]
    found = estimate_sharing(runs, num_rows=len(rows), num_samples=1, dedupe=True)
    assert found.outputs_per_row == 1
    assert found.prompt_tokens == pytest.approx(np.mean([len(tokens) for tokens in rows]))
    assert found.reused_tokens == pytest.approx(counted(rows))
    assert PAGE_TOKENS * found.reused_pages == pytest.approx(counted(rows, to_pages=True))


@given(prompts, st.integers(1, 5), st.booleans())
def test_copies_and_samples_are_counted(
    rows: list[list[int]], num_samples: int, dedupe: bool
) -> None:
    """Greedy copies are none where they are computed once; samples share all but a last token."""
    greedy = [row(tokens) for tokens in rows]
    drawn = [row(tokens, temperature=1.0) for tokens in rows]
    options = {"num_rows": len(rows), "dedupe": dedupe}
    found = estimate_sharing([greedy], num_samples=1, **options)  # type: ignore[arg-type]
    num_distinct = len({tuple(tokens) for tokens in rows}) if dedupe else len(rows)
    assert found.outputs_per_row * len(rows) == pytest.approx(num_distinct)
    one = estimate_sharing([drawn], num_samples=1, **options)  # type: ignore[arg-type]
    many = estimate_sharing([drawn], num_samples=num_samples, **options)  # type: ignore[arg-type]
    assert many.outputs_per_row == num_samples
    others = (num_samples - 1) * (one.prompt_tokens - 1)
    assert many.reused_tokens * num_samples == pytest.approx(one.reused_tokens + others)


def test_seeded_rows_are_copies_of_each_sample() -> None:
    twice = [row([1, 2, 3], temperature=1.0, seed=7)] * 2
    found = estimate_sharing([twice], num_rows=2, num_samples=3, dedupe=True)
    assert found.outputs_per_row == 1.5


def test_rows_that_cannot_run_compute_nothing() -> None:
    found = estimate_sharing([[None, row([1, 2])]], num_rows=2, num_samples=1, dedupe=True)
    assert (found.outputs_per_row, found.prompt_tokens) == (0.5, 2)
    assert estimate_sharing([[None]], num_rows=9, num_samples=1, dedupe=True) == Sharing()
    assert estimate_sharing([], num_rows=0, num_samples=1, dedupe=True) == Sharing()


# ---- samples of large inputs -----------------------------------------------------------------


def templates(num: int, prefix_tokens: int, num_rows: int, *, is_grouped: bool) -> list[list[int]]:
    rng = np.random.default_rng(3)
    prefixes = rng.integers(0, 10**6, (num, prefix_tokens)).tolist()
    ends = rng.integers(0, 10**6, (num_rows, OWN_TOKENS)).tolist()
    which = [at * num // num_rows for at in range(num_rows)]
    if not is_grouped:
        rng.shuffle(which)
    return [prefixes[w] + end for w, end in zip(which, ends, strict=True)]


def estimated(rows: Sequence[Sequence[int]]) -> Sharing:
    runs = [[row(rows[at]) for at in range(*ends)] for ends in sample_ranges(len(rows))]
    assert sum(map(len, runs)) == min(SAMPLE_ROWS, len(rows))
    return estimate_sharing(runs, num_rows=len(rows), num_samples=1, dedupe=True)


@pytest.mark.parametrize("is_grouped", [True, False])
@pytest.mark.parametrize(("num", "prefix_tokens"), [(1, 1000), (40, 300), (2000, 300)])
def test_tokens_to_compute_of_templates(num: int, prefix_tokens: int, is_grouped: bool) -> None:
    """One prefix, forty, and as many as rows: within a quarter, and not below what there is."""
    rows = templates(num, prefix_tokens, 2000, is_grouped=is_grouped)
    found = estimated(rows)
    computed = found.prompt_tokens - found.reused_tokens
    true = prefix_tokens + OWN_TOKENS - counted(rows)
    assert 0.97 * true <= computed <= 1.25 * true
    assert found.outputs_per_row == 1


def test_pairs_all_over_a_large_input_are_not_seen() -> None:
    rows = templates(2500, 300, 5000, is_grouped=False)
    found = estimated(rows)
    assert counted(rows) > 140
    assert found.reused_tokens < 20


def test_copies_in_a_large_input_are_extrapolated() -> None:
    rows = templates(30, 40, 3000, is_grouped=False)
    few = [rows[index % 50] for index in np.random.default_rng(4).permutation(3000)]
    assert 50 / 3000 <= estimated(few).outputs_per_row < 0.05
    assert estimated(rows).outputs_per_row == 1
