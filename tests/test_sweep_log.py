"""The record of sweeps: bytes, seconds and waits of each, and their sums."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine import EngineConfig, Request, SamplingParams
from engine.costs import Load
from engine.engine import Engine
from engine.links import LinkStats
from engine.planner import Rates, Workload
from engine.scheduler import Chunk
from engine.sweep_log import SweepLog, SweepTotals, load_of
from nvme import ReadStats
from tests import golden

CONFIG = EngineConfig(kv_memory_nbytes=16 << 20, expand="never", reader="direct")
RATES = Rates(disk_nbytes_per_s=1e6, values_per_s={}, flops_per_s=1e12)
PROMPTS = (5, 3)
MAX_TOKENS = 4


def run_rows(engine: Engine) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    for index, length in enumerate(PROMPTS):
        ids = np.arange(10, 10 + length, dtype=np.int32)
        engine.add(Request(row_index=index, token_ids=ids, params=params))
    while engine.has_work:
        engine.sweep()


def test_each_sweep_says_what_it_carried_and_what_streamed() -> None:
    model = golden.load("llama-tied-q4_0").model
    with Engine(model, CONFIG) as engine:
        sizes = engine.plan
        streamed = sum(part.slot_nbytes for part in engine._sizes.layers[:1])
        plan = replace(
            sizes,
            resident=(False, True),
            ring_nbytes=1 << 20,
            streamed_nbytes=streamed,
            disk_nbytes=streamed,
        )
    with Engine(model, CONFIG, plan=plan, rates=RATES) as engine:
        run_rows(engine)
        records, totals = list(engine.sweeps.recent), engine.sweeps.totals
        predicted = engine.predict(Workload(num_rows=2, prompt_tokens=4, output_tokens=4))
    assert [record.num_tokens for record in records] == [8, 2, 2, 2]
    assert {record.num_rows for record in records} == {2}
    # Prompts of 5 and 3 tokens attend to 15 and 6 positions, the tokens after them to 6 and 4.
    assert records[0].load == Load(8, 0, 15 + 6, 2)
    assert [record.load for record in records[1:]] == [Load(2, 10 + 2 * i, 0, 2) for i in range(3)]
    assert totals.moments.num_sweeps == len(records)
    assert {record.streamed_nbytes for record in records} == {streamed}
    assert {record.reader for record in records} == {"direct"}
    assert all(0 <= record.wait_s <= record.seconds for record in records)
    for record in records:
        assert record.disk_nbytes_per_s == streamed / record.seconds
        assert record.probe_share == pytest.approx(record.disk_nbytes_per_s / 1e6)
    assert totals.num_sweeps == len(records)
    assert totals.num_tokens == sum(PROMPTS) + 2 * (MAX_TOKENS - 1)
    assert totals.streamed_nbytes == len(records) * streamed
    assert totals.seconds == pytest.approx(sum(record.seconds for record in records))
    assert predicted is not None
    assert predicted["disk_s"] == streamed / 1e6


def test_a_resident_model_streams_nothing_and_promises_nothing() -> None:
    with Engine(golden.load("llama-tied-q4_0").model, replace(CONFIG, reader="auto")) as engine:
        run_rows(engine)
        record = engine.sweeps.recent[0]
        assert (record.streamed_nbytes, record.wait_s, record.probe_share) == (0, 0.0, None)
        assert record.reader == "page cache"
        assert engine.predict(Workload()) is None


def test_a_piece_of_a_prompt_attends_to_all_before_it_and_gives_no_output() -> None:
    chunks = [Chunk(0, 9, 10, wants_logits=True), Chunk(1, 10, 12, wants_logits=False)]
    assert load_of(chunks) == Load(3, 10, 11 + 12, 1)


def test_totals_of_a_job_are_differences() -> None:
    before = SweepTotals(num_sweeps=2, seconds=1.5, streamed_nbytes=10)
    after = SweepTotals(num_sweeps=5, seconds=2.0, streamed_nbytes=40)
    assert after - before == SweepTotals(num_sweeps=3, seconds=0.5, streamed_nbytes=30)
    assert before.copy() == before


class Counters:
    """A stream's counters, moved by hand."""

    def __init__(self) -> None:
        self.totals, self.read = SimpleNamespace(nbytes=0), 0

    def link_stats(self) -> LinkStats:
        return LinkStats(read=replace(ReadStats(), nbytes_direct=self.read))


def test_what_is_read_ahead_between_two_sweeps_is_of_the_next_one() -> None:
    stream: Any = Counters()
    log = SweepLog(stream, "direct", None)

    def sweep(read: int) -> int:
        log.begin()
        stream.read += read
        stream.totals.nbytes += 100
        log.end([Chunk(0, 0, 1, wants_logits=True)])
        return log.recent[-1].direct_nbytes

    assert sweep(read=70) == 70
    stream.read += 25  # while rows are prepared
    assert sweep(read=80) == 105
    stream.read, stream.totals.nbytes = stream.read + 900, stream.totals.nbytes + 100
    assert sweep(read=60) == 60, "a pass that is no sweep has its own reads"
    assert log.totals.direct_nbytes == 70 + 105 + 60
