"""Output lengths with a heavy tail, unknown to the engine, against an oracle that knows them.

Rows end by a stop token that the backend puts out when a row has come to its length, so that the
engine cannot know. The oracle's rows have their lengths as limits, and the longest start first.
"""

from __future__ import annotations

import argparse

import numpy as np

from engine import Engine, EngineConfig
from engine.devices import open_ops
from engine.kv_cache import pages_for
from scripts.bench_report import Report
from scripts.forced_ends import ForcedOps
from scripts.simulated_job import END_ID, OTHER_ID, Outcome, open_simulated, run_job
from scripts.simulated_ops import RowEnds
from scripts.simulated_rows import Mix, Rows, random_prompts

PROMPT_TOKENS = 64
BOARD_ROWS = 48  # of the longest kind that the KV cache holds
SWEEP_TOKENS = 256


def tailed_rows(num_rows: int, most: int, vocab_size: int) -> Rows:
    """Rows that may all generate `most` tokens, and generate what `Mix` draws."""
    return Rows(
        prompts=random_prompts(num_rows, PROMPT_TOKENS, vocab_size),
        lengths=Mix(tail_from=most / 4).draw(num_rows, most, seed=0),
        max_tokens=np.full(num_rows, most, np.int64),
    )


def bench_tail(options: argparse.Namespace) -> Report:
    """Sweeps and seconds of rows whose lengths are unknown over those of the oracle."""
    report = Report(f"{options.tail_rows} rows with a heavy tail of output lengths")
    with Engine(options.model, _config(options)) as engine:
        context, vocab_size = engine.context_length, engine.hparams.vocab_size
        page_nbytes = engine.kv_page_nbytes
    most = min(1024, context - PROMPT_TOKENS)
    rows = tailed_rows(options.tail_rows, most, vocab_size)
    kv_nbytes = BOARD_ROWS * pages_for(PROMPT_TOKENS + most) * page_nbytes
    report.facts["lengths: mean, median, 99 %, most"] = (
        f"{rows.lengths.mean():.0f}, {np.median(rows.lengths):.0f}, "
        f"{np.percentile(rows.lengths, 99):.0f}, {most}"
    )
    for _ in range(options.repeats):
        oracle = run(options, rows.known, kv_nbytes)
        _add(report, "oracle", oracle, oracle)
        _add(report, "unknown", run(options, rows, kv_nbytes), oracle)
    return report


def run(options: argparse.Namespace, rows: Rows, kv_nbytes: int) -> Outcome:
    """A real job, checked sweep by sweep against the simulated one."""
    config = _config(options, kv_nbytes)
    ops = ForcedOps(open_ops(config), RowEnds(rows.lengths, END_ID, OTHER_ID))
    with Engine(options.model, config, ops=ops) as engine:
        outcome, plan = run_job(engine, rows), engine.plan
    with open_simulated(options.model, config, plan, rows) as engine:
        simulated = run_job(engine, rows)
    assert [sweep.num_tokens for sweep in outcome.sweeps] == [
        sweep.num_tokens for sweep in simulated.sweeps
    ]
    return outcome


def _config(options: argparse.Namespace, kv_nbytes: int | None = None) -> EngineConfig:
    return EngineConfig(
        device=options.device,
        kv_type=options.kv_type,
        num_threads=options.threads,
        kv_memory_nbytes=kv_nbytes,
        sweep_tokens=SWEEP_TOKENS,
    )


def _add(report: Report, name: str, outcome: Outcome, oracle: Outcome) -> None:
    report.add(f"{name}: sweeps", outcome.num_sweeps)
    report.add(f"{name}: thousand tokens computed", outcome.num_tokens / 1000)
    report.add(f"{name}: rows on board", outcome.mean_board)
    report.add(f"{name}: seconds", outcome.seconds)
    report.add(f"{name}: sweeps / oracle's", outcome.num_sweeps / oracle.num_sweeps)
    report.add(f"{name}: seconds / oracle's", outcome.seconds / oracle.seconds)
