"""One job through the engine's own policy: rows in a job's order, sweeps with their seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, cast

from engine import Engine, EngineConfig, FinishedRow, Request
from engine.forecast import Pace, Travel
from engine.plan import Plan
from jobs.engine_loop import MIN_WAITING
from jobs.expected_length import ExpectedLength
from jobs.prefix_queue import PrefixQueue
from kernels.ops import Ops
from scripts.simulated_ops import BlankReader, RowEnds, SimulatedOps
from scripts.simulated_rows import LOWEST_ID, Rows

OTHER_ID = LOWEST_ID
END_ID = LOWEST_ID + 1


@dataclass(frozen=True, slots=True)
class Sweep:
    """One sweep.

    num_board: rows on board; num_rows, num_tokens: that rode along
    travel: KV pages that were copied from host memory and back
    seconds: it took
    """

    num_board: int
    num_rows: int
    num_tokens: int
    travel: Travel
    seconds: float


@dataclass(slots=True)
class Outcome:
    """A whole job.

    computed_tokens, reused_tokens: of prompts; limited_s: seconds by what they are spent on
    """

    sweeps: list[Sweep] = field(default_factory=list)
    num_rows: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    reused_tokens: int = 0
    limited_s: dict[str, float] = field(default_factory=dict)

    @property
    def num_sweeps(self) -> int:
        return len(self.sweeps)

    @property
    def num_tokens(self) -> int:
        return sum(sweep.num_tokens for sweep in self.sweeps)

    @property
    def seconds(self) -> float:
        return sum(sweep.seconds for sweep in self.sweeps)

    @property
    def mean_board(self) -> float:
        return sum(sweep.num_board for sweep in self.sweeps) / len(self.sweeps)

    @property
    def mean_host_pages(self) -> float:
        return sum(sweep.travel.read for sweep in self.sweeps) / len(self.sweeps)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds


class Feed(Protocol):
    """Rows in some order."""

    def fill(self, engine: Engine) -> None:
        """Let as many rows wait in the engine as it may admit soon."""

    def finish(self, row: FinishedRow) -> None:
        """A row has ended."""


MakeFeed = Callable[[Rows, int, int], Feed]


class RowFeed:
    """Rows in the order in which a job hands them to its engine, as fast as they are wanted."""

    def __init__(self, rows: Rows, context_length: int, end_id: int) -> None:
        self._expected = ExpectedLength()
        self._queue: PrefixQueue[Request] = PrefixQueue()
        for index in range(len(rows)):
            request = rows.request(index, end_id)
            room = context_length - len(request.token_ids)
            expected = self._expected.of(min(request.params.max_tokens, room))
            self._queue.push(request, request.token_ids, expected)

    def fill(self, engine: Engine) -> None:
        target = max(MIN_WAITING, 2 * engine.num_running)
        while engine.num_waiting < target and len(self._queue):
            engine.add(self._queue.pop())

    def finish(self, row: FinishedRow) -> None:
        self._expected.add(row.completion_tokens)


def open_simulated(model: str | Path, config: EngineConfig, plan: Plan, rows: Rows) -> Engine:
    """An engine that computes nothing, by the board and the KV pages of a plan.

    model: of which the header alone is read
    """
    resident = replace(
        plan,
        resident=(True,) * len(plan.resident),
        head_resident=True,
        streamed_nbytes=0,
        disk_nbytes=0,
        expand=False,
    )
    ends = RowEnds(rows.lengths, END_ID, OTHER_ID)
    return Engine(
        model, config, ops=cast(Ops, SimulatedOps(ends)), reader_factory=BlankReader, plan=resident
    )


def run_job(
    engine: Engine,
    rows: Rows,
    pace: Pace | None = None,
    *,
    make_feed: MakeFeed = RowFeed,
) -> Outcome:
    """Run rows through an engine, as a job does.

    pace: what sweeps take; None: what the engine measured
    make_feed: out of rows, the engine's context length, and the token that ends rows
    """
    feed, outcome = make_feed(rows, engine.context_length, END_ID), Outcome()
    before = replace(engine.totals)
    while True:
        feed.fill(engine)
        if not engine.has_work:
            break
        engine.admit()
        num_board, num_sweeps = engine.num_running, engine.sweeps.totals.num_sweeps
        finished = engine.sweep()
        if engine.sweeps.totals.num_sweeps > num_sweeps:
            _count(outcome, engine, num_board, pace)
        for row in finished:
            assert row.completion_tokens == rows.lengths[row.row_index], row
            outcome.num_rows += 1
            outcome.output_tokens += row.completion_tokens
            feed.finish(row)
    totals = engine.totals
    outcome.reused_tokens = totals.reused_tokens - before.reused_tokens
    prompt_tokens = totals.prompt_tokens - before.prompt_tokens
    outcome.computed_tokens = prompt_tokens - outcome.reused_tokens
    return outcome


def _count(outcome: Outcome, engine: Engine, num_board: int, pace: Pace | None) -> None:
    record = engine.sweeps.recent[-1]
    page_nbytes = engine.kv_page_nbytes
    travel = Travel(record.kv_in_nbytes / page_nbytes, record.kv_out_nbytes / page_nbytes)
    if pace is None:
        seconds, name = record.seconds, "measured"
    else:
        seconds, name = pace.sweep_s(record.load, travel=travel)
    sweep = Sweep(num_board, record.num_rows, record.num_tokens, travel, seconds)
    outcome.sweeps.append(sweep)
    outcome.limited_s[name] = outcome.limited_s.get(name, 0.0) + seconds
