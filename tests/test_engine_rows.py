"""How rows run and end: limits, waiting, stops, errors, and what the engine reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from engine import EngineConfig, FinishedRow, MemoryBudgetError, Request, SamplingParams
from engine.engine import Engine
from kernels.ops import PAGE_TOKENS
from tests import golden

MODEL = golden.GOLDEN / "llama-q4_0.gguf"


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(MODEL, EngineConfig(kv_memory_nbytes=64 << 20)) as engine:
        yield engine


def request(index: int = 0, num_tokens: int = 5, **params: object) -> Request:
    ids = np.random.default_rng(index).integers(3, 500, num_tokens).astype(np.int32)
    settings = SamplingParams(max_tokens=4, ignore_eos=True)
    return Request(row_index=index, token_ids=ids, params=replace(settings, **params))  # type: ignore[arg-type]


def run(engine: Engine, *requests: Request) -> dict[int, FinishedRow]:
    for one in requests:
        engine.add(one)
    rows: dict[int, FinishedRow] = {}
    while engine.has_work:
        for row in engine.sweep():
            assert row.row_index not in rows
            rows[row.row_index] = row
    return rows


def page_nbytes(engine: Engine) -> int:
    assert engine._cache.pool is not None
    return engine._cache.pool.page_nbytes


def num_unused(engine: Engine) -> int:
    return engine._cache.num_free + engine.num_cached_pages


def test_row_ends_at_max_tokens(engine: Engine) -> None:
    row = run(engine, request(max_tokens=7))[0]
    assert (row.status, row.finish_reason, row.completion_tokens) == ("ok", "length", 7)
    assert (row.prompt_tokens, len(row.token_ids), row.error_code) == (5, 7, None)


def test_row_ends_with_the_context_window(engine: Engine) -> None:
    """Case 3: prompt + max_tokens beyond the window ends with `length`."""
    context = engine.context_length
    row = run(engine, request(num_tokens=context - 3, max_tokens=50))[0]
    assert (row.finish_reason, row.completion_tokens) == ("length", 3)


def test_prompt_that_fills_the_context_window_is_an_error_row(engine: Engine) -> None:
    """Case 1: the row fails with both numbers, its neighbours run."""
    context = engine.context_length
    rows = run(engine, request(0), request(1, num_tokens=context), request(2))
    assert [rows[i].status for i in range(3)] == ["ok", "error", "ok"]
    assert rows[1].error_code == "context_length_exceeded"
    assert str(context) in (rows[1].error_message or "")


def test_empty_prompt_is_an_error_row_and_others_run(engine: Engine) -> None:
    """Case 8."""
    rows = run(engine, *(request(i, num_tokens=0 if i == 50 else 3) for i in range(101)))
    assert rows[50].error_code == "empty_prompt"
    assert sum(row.status == "ok" for row in rows.values()) == 100


def test_bad_parameters_are_an_error_row(engine: Engine) -> None:
    row = run(engine, request(temperature=float("nan")))[0]
    assert row.error_code == "invalid_parameter"
    assert "temperature" in (row.error_message or "")


def test_row_too_long_for_the_whole_cache_is_an_error_and_others_wait_their_turn() -> None:
    with Engine(MODEL, EngineConfig(kv_memory_nbytes=64 << 20)) as probe:
        budget = 6 * page_nbytes(probe)
    with Engine(MODEL, EngineConfig(kv_memory_nbytes=budget)) as engine:
        assert engine.plan.kv_pages == 6
        fits = [request(i, num_tokens=3 * PAGE_TOKENS, max_tokens=2) for i in range(5)]
        too_long = request(9, num_tokens=6 * PAGE_TOKENS, max_tokens=8)
        rows = run(engine, too_long, *fits)
        assert num_unused(engine) == engine._cache.num_unreserved == 6
    assert rows[9].error_code == "kv_cache_exceeded"
    assert all(rows[i].status == "ok" for i in range(5))


def test_end_of_generation_token_ends_the_row_without_its_text(engine: Engine) -> None:
    """Case 5: the token is forced as the fifth one."""
    eos = min(engine.tokenizer.eog_ids)
    row = run(
        engine,
        request(max_tokens=9, min_tokens=4, ignore_eos=False, logit_bias=((eos, 1e4),)),
    )[0]
    assert (row.finish_reason, row.completion_tokens) == ("stop", 5)
    assert row.token_ids[-1] == eos
    assert engine.tokenizer.token_text(eos) not in row.text


def test_memory_of_ended_rows_is_given_back(engine: Engine) -> None:
    run(engine, *(request(i, num_tokens=40) for i in range(30)))
    assert num_unused(engine) == engine._cache.num_unreserved == engine.plan.kv_pages
    assert engine.num_running == engine.num_waiting == 0


def test_cancel_all_drops_rows_and_their_pages(engine: Engine) -> None:
    for index in range(10):
        engine.add(request(index, max_tokens=50))
    engine.sweep()
    assert engine.cancel_all() == 10
    assert not engine.has_work
    assert num_unused(engine) == engine.plan.kv_pages
    assert run(engine, request(3))[3].status == "ok"


def test_stale_values_of_an_earlier_row_do_not_reach_the_next() -> None:
    """Pages that held non-finite values are handed on; the next row must not see them."""
    config = EngineConfig(kv_memory_nbytes=64 << 20, reuse_prefixes=False)
    with Engine(MODEL, config) as engine:
        fresh = run(engine, request(1, num_tokens=45))[1]
        pool = engine._cache.pool
        for array in (pool.keys, pool.values):  # type: ignore[union-attr]
            array.fill(np.nan)
        assert run(engine, request(1, num_tokens=45))[1] == fresh


def test_record_names_device_threads_and_layout(engine: Engine) -> None:
    record = engine.record()
    assert record["device"] == "cpu"
    assert record["num_threads"] >= 1
    assert record["weight_layout"] == "f32-panels"
    assert record["reader"] == "mmap"


def test_sweep_tokens_below_one_are_refused() -> None:
    with pytest.raises(MemoryBudgetError, match="sweep-tokens"):
        Engine(MODEL, EngineConfig(sweep_tokens=-1))


def test_kv_memory_below_one_page_is_refused_with_the_page_size() -> None:
    with pytest.raises(MemoryBudgetError, match="one page takes"):
        Engine(MODEL, EngineConfig(kv_memory_nbytes=100))
