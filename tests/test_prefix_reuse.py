"""Prompts that begin alike are computed once, and no byte of any row changes for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import EngineConfig, FinishedRow, Request, RowError, SamplingParams
from engine.engine import Engine
from engine.scheduler import LOOK_AHEAD
from kernels.ops import PAGE_TOKENS
from nvme import ReadError
from tests import golden
from tests.gguf_factory import TinySizes, write_tiny_model
from tests.test_engine_invariance import LogitTap
from tests.test_streaming import FailingReader, open_reader, streaming_engine

POOL = 64 << 20
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)

Rows = dict[tuple[int, int], FinishedRow]


def engine_with(name: str = "llama-q4_0", **settings: Any) -> Engine:
    config = EngineConfig(**{"kv_memory_nbytes": POOL, **settings})
    return Engine(golden.load(name).model, config)


def some_tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 500, count)]


def request(index: int, tokens: Sequence[int], sample: int = 0, **params: Any) -> Request:
    return Request(
        row_index=index,
        sample_index=sample,
        token_ids=np.asarray(tokens, np.int32),
        params=replace(PARAMS, **params),
        job_seed=7,
    )


def with_common_prefix(count: int, prefix: Sequence[int], end: int = 20) -> list[Request]:
    """Rows whose ends differ from their first token on."""
    return [request(i, [*prefix, 3 + i, *some_tokens(100 + i, end - 1)]) for i in range(count)]


def run(engine: Engine, requests: Iterable[Request] = ()) -> Rows:
    for each in requests:
        engine.add(each)
    rows: Rows = {}
    while engine.has_work:
        for row in engine.sweep():
            assert (row.row_index, row.sample_index) not in rows
            rows[row.row_index, row.sample_index] = row
    return rows


def num_computed(engine: Engine) -> int:
    """Prompt tokens that went through the model."""
    return engine.totals.prompt_tokens - engine.totals.reused_tokens


def page_nbytes(name: str = "llama-q4_0") -> int:
    with engine_with(name) as engine:
        return engine.kv_page_nbytes


def mixed_rows() -> list[Request]:
    """Nested beginnings, equal prompts, cuts at and around pages, ends of one token; some draw."""
    trunk, rng = some_tokens(1, 150), np.random.default_rng(2)
    cuts = [1, 31, 32, 33, 64, 65, 95, 96, 128, 150]
    rows = []
    for index in range(48):
        cut, end = cuts[index % len(cuts)], int(rng.integers(0, 40))
        tokens = trunk[:cut] + some_tokens(300 + index % 7, 50) * (index % 3 == 0)
        tokens += some_tokens(400 + index, end)
        drawn = {"temperature": 1.0, "top_p": 0.9} if index % 2 else {}
        rows.append(request(index, tokens, max_tokens=3 + index % 5, logprobs=2, **drawn))
    return rows


@pytest.mark.parametrize("name", ["llama-q4_k_m", "qwen3-headdim96-q4_0"])
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize("sweep_tokens", [None, 37], ids=["whole", "chunked"])
def test_every_byte_is_the_same_with_reuse_and_without(
    name: str, kv_type: str, sweep_tokens: int | None
) -> None:
    seen = {}
    for reuse in (False, True):
        settings = {"kv_type": kv_type, "sweep_tokens": sweep_tokens, "reuse_prefixes": reuse}
        with engine_with(name, **settings) as engine:
            tap = LogitTap(engine)
            seen[reuse] = run(engine, mixed_rows()), tap.seen
            assert engine.record()["reuse_prefixes"] == reuse
            assert (engine.totals.reused_tokens > 1000) == reuse
            assert (engine.num_cached_pages > 0) == reuse
    assert seen[True] == seen[False]
    assert all(row.status == "ok" for row in seen[True][0].values())


def test_a_common_beginning_is_computed_once_and_to_the_token() -> None:
    prefix = some_tokens(1, 150)
    with engine_with() as engine:
        rows = run(engine, with_common_prefix(100, prefix))
        assert num_computed(engine) == len(prefix) + 100 * 20
    reused = [row.reused_tokens for row in rows.values()]
    assert sorted(reused) == [0] + [len(prefix)] * 99


def test_rows_wait_for_a_beginning_that_takes_several_sweeps_and_others_go_first() -> None:
    prefix, other = some_tokens(1, 150), some_tokens(2, 5)
    with engine_with(sweep_tokens=64) as engine:
        rows = with_common_prefix(10, prefix)
        for each in [*rows, request(50, other)]:
            engine.add(each)
        boards = []
        for _ in range(4):
            engine.sweep()
            boards.append({row for row, _ in engine.rows_on_board()})
        assert boards == [{0}, {0}, {0, 50}, {0, 50, 1, 2, 3, 4}]
        run(engine)
        assert num_computed(engine) == len(prefix) + 10 * 20 + len(other)


def test_admitting_twice_takes_no_more_on_board() -> None:
    """The actor notes the rows on board between `admit` and `sweep`."""
    requests = with_common_prefix(LOOK_AHEAD + 60, some_tokens(1, 100))
    other = [request(900 + i, some_tokens(900 + i, 8)) for i in range(5)]
    with engine_with(sweep_tokens=300) as engine:
        for each in [*requests, *other]:
            engine.add(each)
        while engine.has_work:
            engine.admit()
            board = engine.rows_on_board()
            engine.admit()
            assert engine.rows_on_board() == board
            engine.sweep()


@pytest.mark.parametrize("num_tokens", [2, 20, 32, 33, 50, 64])
def test_samples_of_a_row_cost_one_prefill(num_tokens: int) -> None:
    tokens = some_tokens(5, num_tokens)
    samples = [request(0, tokens, sample, temperature=1.0) for sample in range(8)]
    with engine_with(reuse_prefixes=False) as engine:
        expected = run(engine, samples)
    with engine_with() as engine:
        rows = run(engine, samples)
        assert num_computed(engine) == num_tokens + 7
        pages_for_one = -(-num_tokens // PAGE_TOKENS)
        assert engine.num_cached_pages == pages_for_one
    assert rows == expected
    assert len({row.token_ids for row in rows.values()}) > 1


def test_a_prompt_of_one_token_waits_for_nobody() -> None:
    with engine_with() as engine:
        for sample in range(5):
            engine.add(request(0, [9], sample))
        engine.sweep()
        assert engine.num_running == 5


def test_a_row_that_waits_for_one_that_is_cancelled_computes_for_itself() -> None:
    first, second = with_common_prefix(2, some_tokens(1, 150))
    with engine_with() as engine:
        expected = run(engine, [second])
    with engine_with(sweep_tokens=48) as engine:
        for each in (first, second):
            engine.add(each)
        engine.sweep()
        assert engine.rows_on_board() == [(0, 0)]
        engine.cancel_row(0, 0, RowError("timeout", "too late"))
        assert engine.num_cached_pages == 1
        assert run(engine) == expected
        assert engine.totals.reused_tokens == PAGE_TOKENS


def test_jobs_share_what_an_engine_has_computed() -> None:
    """A job that is cancelled in the middle leaves what it had computed, and nothing wrong."""
    jobs = [mixed_rows(), with_common_prefix(8, some_tokens(1, 150)), mixed_rows()]
    with engine_with(reuse_prefixes=False) as engine:
        expected = [run(engine, job) for job in jobs]
    with engine_with(sweep_tokens=64) as engine:
        for stop_after in (2, 5, 9):
            for each in mixed_rows():
                engine.add(each)
            for _ in range(stop_after):
                engine.sweep()
            for index, sample in engine.rows_on_board()[::3]:
                engine.cancel_row(index, sample, RowError("timeout", "too late"))
            engine.sweep()
            engine.cancel_all()
        assert [run(engine, job) for job in jobs] == expected
        before = num_computed(engine)
        run(engine, jobs[0])
        assert num_computed(engine) - before == len(jobs[0])


@pytest.mark.parametrize("num_pages", [8, 12, 20])
def test_a_pool_too_small_for_all_prefixes_gives_the_same_text(num_pages: int) -> None:
    with engine_with(reuse_prefixes=False) as engine:
        expected = run(engine, mixed_rows())
    with engine_with(kv_memory_nbytes=num_pages * page_nbytes()) as engine:
        assert engine.plan.kv_pages == num_pages
        assert run(engine, mixed_rows()) == expected
        cache = engine._cache
        assert cache.num_unreserved == num_pages
        assert cache.num_free + cache.num_cached == num_pages


def test_a_common_beginning_lets_more_rows_on_board_than_the_pool_could_hold_apart() -> None:
    prefix = some_tokens(1, 10 * PAGE_TOKENS)
    with engine_with(kv_memory_nbytes=32 * page_nbytes()) as engine:
        for each in with_common_prefix(20, prefix, end=8):
            engine.add(each)
        most = 0
        while engine.has_work:
            engine.sweep()
            most = max(most, engine.num_running)
    assert most >= 19


def test_pages_kept_for_reuse_keep_no_row_out() -> None:
    with engine_with(kv_memory_nbytes=12 * page_nbytes()) as engine:
        run(engine, [request(i, some_tokens(i, 60)) for i in range(20)])
        assert engine._cache.num_free < 4
        for i in range(4):
            engine.add(request(i, some_tokens(50 + i, 80)))
        engine.sweep()
        assert engine.num_running == 4


def test_what_waiting_rows_begin_with_is_kept_while_other_pages_can_go() -> None:
    """A beginning, then strangers that fill the pool, while a row that needs it waits."""
    prefix = some_tokens(1, 4 * PAGE_TOKENS)
    first, last = with_common_prefix(2, prefix)
    strangers = [request(10 + i, some_tokens(10 + i, 70)) for i in range(30)]
    with engine_with(kv_memory_nbytes=24 * page_nbytes(), sweep_tokens=70) as engine:
        run(engine, [first])
        rows = run(engine, [*strangers, last])
        assert engine._cache.num_free < 3
    assert rows[last.row_index, 0].reused_tokens == len(prefix)


def test_a_sweep_that_fails_leaves_nothing_uncomputed_in_the_tree(model: Path) -> None:
    """Every try of a sweep fails; the engine goes on with the same rows."""
    requests = [request(i, t) for i, t in enumerate(small_prompts())]
    with Engine(model, EngineConfig(kv_memory_nbytes=POOL, reuse_prefixes=False)) as resident:
        expected = run(resident, requests)
    reader = FailingReader(open_reader("direct", [model]), set())
    with streaming_engine(
        model, [False] * 6, head=False, ring_parcels=3, reader_factory=lambda _: reader
    ) as engine:
        for each in requests:
            engine.add(each)
        rows: Rows = {}
        for failing in range(4):
            reader.calls, reader._fail_at = 0, set(range(1, 1000))
            with pytest.raises(ReadError, match="injected"):
                engine.sweep()
            reader._fail_at = set()
            if failing == 0:
                assert len(engine._cache._tree) == 0
                assert all(row.progress().computed == 0 for row in engine._running.values())
            rows |= {(row.row_index, 0): row for row in engine.sweep()}
        assert rows | run(engine) == expected
        assert engine.totals.reused_tokens > 0


def small_prompts() -> list[list[int]]:
    """For the tiny model of 32 ids: beginnings of 70 and 40 tokens, and one sample each."""
    rng = np.random.default_rng(3)
    trunks = [[int(token) for token in rng.integers(3, 30, n)] for n in (70, 40)]
    ends = [[int(token) for token in rng.integers(3, 30, 5)] for _ in range(6)]
    return [trunks[i % 2] + end for i, end in enumerate(ends)] + trunks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "six.gguf"
    write_tiny_model(path, sizes=TinySizes(num_layers=6))
    return path


def test_a_draining_job_takes_cached_pages_and_the_next_one_reads_right(model: Path) -> None:
    """Layers take the memory of pages that only the tree holds; text stays the same."""
    requests = [request(i, t, max_tokens=30) for i, t in enumerate(small_prompts())]
    with Engine(model, EngineConfig(kv_memory_nbytes=POOL, reuse_prefixes=False)) as resident:
        expected = run(resident, requests)
    with streaming_engine(model, [False] * 6, head=False, ring_parcels=2) as engine:
        stream, cache = engine._model.stream, engine._cache
        assert stream is not None
        for _ in range(3):
            for each in requests:
                engine.add(each)
            rows, most_kept = {}, 0
            while engine.has_work:
                rows.update({(row.row_index, 0): row for row in engine.sweep()})
                most_kept = max(most_kept, stream.num_kept)
                assert cache.num_unreserved >= 0
            assert rows == expected
            assert most_kept == 6


def test_rows_that_come_while_a_job_drains_are_on_board_before_the_sweep(model: Path) -> None:
    """`admit` takes back the pages that layers have; `sweep` then takes no more rows on board."""
    prompts = small_prompts()
    with streaming_engine(model, [False] * 6, head=False, ring_parcels=2) as engine:
        engine.add(request(0, prompts[0], max_tokens=40))
        while engine._cache.num_unreserved >= 2 and engine.has_work:
            engine.sweep()
            cache, stream = engine._cache, engine._model.stream
            assert stream is not None
            if stream.num_kept:
                cache.withdraw(cache.num_unreserved)
        for index, prompt in enumerate(prompts[2:6], 1):
            engine.add(request(index, [index, *prompt], max_tokens=4))
        engine.admit()
        board = engine.rows_on_board()
        assert len(board) == 5
        engine.sweep()
        assert engine.rows_on_board() == board
        run(engine)


def test_freed_slots_are_refilled_while_a_long_row_runs() -> None:
    """Case 79: 200 rows of 20 tokens and one of 4,000, 16 at a time."""
    long = request(0, some_tokens(0, 10), max_tokens=4000)
    short = [request(i, some_tokens(i, 10), max_tokens=20) for i in range(1, 201)]
    with engine_with(sweep_tokens=16) as engine:
        assert engine.plan.max_rows == 16
        for each in [long, *short]:
            engine.add(each)
        left, sweeps, sweeps_to_short = set(range(1, 201)), 0, 0
        while engine.has_work:
            left -= {row.row_index for row in engine.sweep()}
            sweeps += 1
            sweeps_to_short += bool(left)
    assert sweeps == 4000
    # Beside the long row's token a sweep has room for 15 others; a short row takes 10 + 19.
    assert sweeps_to_short <= 1.05 * 200 * (10 + 19) / 15


def test_one_long_system_prompt_is_computed_once() -> None:
    """Case 79: 1,000 rows that begin with the same 2,000 tokens, the same text out."""
    prefix, count = some_tokens(1, 2000), 1000
    ends = [[3 + i % 490, 3 + i // 490, *some_tokens(i, 18)] for i in range(count)]
    requests = [request(i, prefix + end) for i, end in enumerate(ends)]
    checked = requests[::50]
    with engine_with(kv_memory_nbytes=256 << 20, reuse_prefixes=False) as engine:
        expected = run(engine, checked)
    with engine_with(kv_memory_nbytes=256 << 20) as engine:
        rows = run(engine, requests)
        distinct = len(prefix) + len({tuple(end[:1]) for end in ends})
        distinct += sum(len(end) - 1 for end in ends)
        assert distinct <= num_computed(engine) <= 1.02 * distinct
    assert len(rows) == count
    assert {key: rows[key] for key in expected} == expected
