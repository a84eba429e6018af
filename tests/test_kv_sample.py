"""A job whose KV cache approximates says what that changed on its own first rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine import Engine, FinishedRow, Request, SamplingParams
from jobs.kv_sample import MOST_TOKENS, ROWS, KvSample
from jobs.messages import AddShard
from jobs.records import Shard
from jobs.store import JobStore
from ntx_batch.render import _kv_facts
from tests.job_factories import make_job
from tests.runner_helpers import MODEL, SMALL_ENGINE, make_home, queue_job
from tests.test_engine_loop import Loop, start


def request(row: int, num_tokens: int = 5) -> Request:
    ids = np.arange(3, 3 + num_tokens, dtype=np.int32)
    return Request(row_index=row, token_ids=ids, params=SamplingParams())


def finished(row: int) -> FinishedRow:
    return FinishedRow(row_index=row, token_ids=(7, 8, 9))


@pytest.mark.parametrize("num_rows, kv_type", [(40, "int8"), (3, "int8"), (40, "f16")])
def test_a_job_tells_what_eight_bits_changed(tmp_path: Path, num_rows: int, kv_type: str) -> None:
    """Few rows or many; the rows come back all the same, and others tell nothing."""
    with JobStore(make_home(tmp_path / "home").state_path) as store:
        long = " and more of it" * 12  # several pages: what is rounded are those before the last
        prompts: list[str | None] = [f"prompt {row}{long}" for row in range(num_rows)]
        job = queue_job(store, tmp_path / "in.parquet", prompts)
    with Engine(MODEL, replace(SMALL_ENGINE, kv_type=kv_type)) as engine:
        loop = Loop(lambda command: (engine, {}))
        loop.send(start(job, 1))
        loop.send(AddShard(1, Shard(number=0, begin=0, end=num_rows)))
        batches = loop.until_shards(1)
    assert sum(len(event.batch.row_indices) for event in batches if event.batch) == num_rows
    found = batches[-1].progress.kv_accuracy
    if kv_type == "f16":
        assert found is None
        return
    assert found is not None and "error" not in found
    assert (found["kv_type"], found["reference"]) == ("int8", "f16")
    assert found["num_rows"] == min(num_rows, ROWS)
    assert 0.8 < found["greedy_agreement"] <= 1
    assert 0 < found["mean_logprob_difference"] < 0.1
    assert found["measure_s"] > 0


def test_a_sample_is_complete_when_its_rows_have_ended() -> None:
    sample = KvSample()
    assert not sample.is_complete(no_more=True)
    for row in range(ROWS + 3):
        sample.add(request(row))
    for row in range(1, ROWS + 3):
        sample.finish(finished(row))
    assert not sample.is_complete(no_more=True)
    sample.finish(finished(0))
    assert sample.is_complete(no_more=False)


def test_rows_of_which_nothing_follows_are_no_figure() -> None:
    sample = KvSample()
    sample.add(request(0, num_tokens=1))
    sample.finish(FinishedRow(row_index=0, status="error"))
    with Engine(MODEL, replace(SMALL_ENGINE, kv_type="int8")) as engine:
        assert "error" in sample.measure(engine, "int8")


def test_long_rows_are_compared_at_their_beginning() -> None:
    sample = KvSample()
    sample.add(request(0, num_tokens=MOST_TOKENS + 100))
    sample.finish(finished(0))
    assert [len(ids) for ids in sample._rows] == [MOST_TOKENS]


def test_status_says_it_in_words(tmp_path: Path) -> None:
    with JobStore(tmp_path / "state.sqlite") as store:
        job = make_job(store)
    assert _kv_facts(job) == {}
    figures = {"num_tokens": 512, "greedy_agreement": 0.9941, "mean_logprob_difference": 0.0081}
    record = {"kv_type": "int8", "reference": "f16", "num_rows": 8, "measure_s": 2.3, **figures}
    (text,) = _kv_facts(replace(job, record={"kv_accuracy": record})).values()
    assert text == (
        "int8; of the last 512 tokens of 8 rows 99.4% have the same most likely one as with f16, "
        "log-probabilities differ by 0.0081 in the mean (2 s to measure)"
    )
    failed = {"kv_type": "int8", "error": "disk gone"}
    (text,) = _kv_facts(replace(job, record={"kv_accuracy": failed})).values()
    assert text == "int8; what it changes is not known: disk gone"
