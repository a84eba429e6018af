"""Prompts that begin alike, with their KV pages reused and without: tokens computed, time, text."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engine import EngineConfig, Request, SamplingParams
from engine.engine import Engine
from scripts.bench_report import Report

PREFIX_TOKENS = 1000
TEMPLATE_TOKENS = 300
END_TOKENS, NEW_TOKENS = 20, 16

Texts = dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run: prompt tokens that went through the model, seconds, and what came out."""

    computed: int
    seconds: float
    tokens: Texts


def prompts(engine: Engine, prefixes: int, prefix_tokens: int, rows: int) -> list[list[int]]:
    """Random prompts, grouped by prefix."""
    rng = np.random.default_rng(11)
    low, high = 10, engine.tokenizer.num_tokens - 10
    shared = rng.integers(low, high, (prefixes, prefix_tokens))
    ends = rng.integers(low, high, (rows, END_TOKENS))
    return [
        [*shared[row * prefixes // rows].tolist(), *end.tolist()] for row, end in enumerate(ends)
    ]


def shuffled(rows: Sequence[list[int]]) -> list[list[int]]:
    order = np.random.default_rng(12).permutation(len(rows))
    return [rows[index] for index in order]


def distinct_tokens(rows: Iterable[Sequence[int]]) -> int:
    """Tokens that differ, or have something else before them: what must be computed at least."""
    seen = set()
    for tokens in rows:
        past = 0
        for token in tokens:
            past = hash((past, token))
            seen.add(past)
    return len(seen)


def run(engine: Engine, rows: Sequence[list[int]]) -> Outcome:
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    before = engine.totals.prompt_tokens - engine.totals.reused_tokens
    started = time.perf_counter()
    for index, tokens in enumerate(rows):
        ids = np.asarray(tokens, np.int32)
        engine.add(Request(row_index=index, token_ids=ids, params=params))
    finished: Texts = {}
    while engine.has_work:
        finished |= {row.row_index: row.token_ids for row in engine.sweep()}
    seconds = time.perf_counter() - started
    computed = engine.totals.prompt_tokens - engine.totals.reused_tokens - before
    assert len(finished) == len(rows)
    return Outcome(computed, seconds, finished)


def run_fresh(options: argparse.Namespace, rows: Sequence[list[int]], *, reuse: bool) -> Outcome:
    """In an engine of its own, warm but with nothing cached of these rows."""
    config = EngineConfig(
        kv_type=options.kv_type,
        num_threads=options.threads,
        device=options.device,
        reuse_prefixes=reuse,
    )
    with Engine(options.model, config) as engine:
        run(engine, [[1, 2, 3], [4, 5]])
        return run(engine, rows)


def bench_reuse(options: argparse.Namespace) -> Report:
    """One long prefix, and templates in order and shuffled, straight into the engine's queue."""
    rows, templates = options.reuse_rows, options.reuse_templates
    report = Report(f"reuse of prompts, {rows} rows with {END_TOKENS} own tokens, {NEW_TOKENS} out")
    with Engine(options.model, EngineConfig(device=options.device)) as engine:
        one = prompts(engine, 1, PREFIX_TOKENS, rows)
        grouped = prompts(engine, templates, TEMPLATE_TOKENS, rows)
    workloads = {
        f"one prefix of {PREFIX_TOKENS}": one,
        f"{templates} templates, grouped": grouped,
        f"{templates} templates, shuffled": shuffled(grouped),
    }
    for _ in range(options.repeats):
        for name, prompts_of in workloads.items():
            _compare(report, options, name, prompts_of)
    return report


def _compare(
    report: Report, options: argparse.Namespace, name: str, rows: Sequence[list[int]]
) -> None:
    on = run_fresh(options, rows, reuse=True)
    off = run_fresh(options, rows, reuse=False)
    distinct = distinct_tokens(rows)
    report.add(f"{name}: computed / distinct", on.computed / distinct)
    report.add(f"{name}: without reuse / distinct", off.computed / distinct)
    report.add(f"{name}: seconds", on.seconds)
    report.add(f"{name}: seconds without reuse", off.seconds)
    report.add(f"{name}: seconds / without reuse", on.seconds / off.seconds)
    report.facts[f"{name}: texts equal"] = on.tokens == off.tokens
