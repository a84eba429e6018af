"""Random numbers: known answers, and independence of neighbours, order and workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.requests import SamplingParams
from kernels.cpu import CpuOps
from kernels.cpu.philox import philox4x32
from tests.sampler_helpers import Workers, choose, choose_all, choose_one, ids_of, row_of

RNG = np.random.default_rng(20_260_102)


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
            chosen = choose_all(FLAT, rows, ops=Workers(num_workers))
            assert ids_of(chosen)[place] == alone


def test_worker_threads_choose_what_one_thread_does() -> None:
    """Case 32: on 1 and 4 workers."""
    logits = RNG.normal(0, 2, (23, 700)).astype(np.float32)
    changes: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 3},
        {"temperature": 0.7, "top_k": 9, "repetition_penalty": 1.2},
    ]
    rows = [row_of(row_index=i, prompt=[i, 3], **changes[i % 4]) for i in range(23)]
    alone = choose(logits, rows, num_tokens=690)
    for num_threads in (1, 2, 4):
        ops = CpuOps(num_threads)
        try:
            assert choose(logits, rows, num_tokens=690, ops=ops) == alone
        finally:
            ops.close()


def test_read_only_and_strided_logits_and_no_rows_at_all() -> None:
    logits = RNG.normal(0, 2, (4, 100)).astype(np.float32)
    rows = [row_of(row_index=i) for i in range(4)]
    wanted = choose(logits, rows, num_tokens=100)
    frozen = logits.copy()
    frozen.flags.writeable = False
    assert choose(frozen, rows, num_tokens=100) == wanted
    assert choose(np.asfortranarray(logits), rows, num_tokens=100) == wanted
    assert choose(logits[:0], [], num_tokens=100) == []


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
    base: dict[str, Any] = {"temperature": 1.0, "row_index": 3, "sample_index": 0, "job_seed": 9}
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
