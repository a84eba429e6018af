"""The simulator against real sweeps: the same rows on board, and tokens, in each of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.costs import Load
from engine.gguf_file import GgufFile
from kernels.cpu import CpuOps
from scripts import bench, simulate, simulate_timed
from scripts.bench_tail import PROMPT_TOKENS, bench_tail
from scripts.forced_ends import ForcedOps
from scripts.learned_order import LearnedFeed
from scripts.simulated_job import (
    END_ID,
    OTHER_ID,
    MakeFeed,
    Outcome,
    RowFeed,
    open_simulated,
    run_job,
)
from scripts.simulated_machine import Machine
from scripts.simulated_ops import RowEnds
from scripts.simulated_rows import ByPrefix, Mix, Rows, prefixes_of, random_prompts
from scripts.synth_gguf import Shape, write_model
from tests.golden import GOLDEN
from tests.test_row_window import run, start

MODEL = GOLDEN / "llama-q4_0.gguf"
CONFIG = EngineConfig(kv_type="f32", kv_memory_nbytes=1 << 20, sweep_tokens=64, num_threads=1)
COSTS = {"layers_s": [[1, 0.5], [64, 1.0]], "link_nbytes_per_s": 1e6}
NO_ENDS = RowEnds(np.zeros(1, np.int64), END_ID, OTHER_ID)


def shape(outcome: Outcome) -> list[tuple[int, int, int]]:
    return [(sweep.num_board, sweep.num_rows, sweep.num_tokens) for sweep in outcome.sweeps]


def tailed_rows(num_rows: int, median: float = 8, **prefixes: int) -> Rows:
    prompts = random_prompts(num_rows, 70, 500, seed=3, **prefixes)
    lengths = Mix(median=median, tail_from=30).draw(num_rows, 100, seed=4)
    return Rows(prompts=prompts, lengths=lengths, max_tokens=np.full(num_rows, 100))


def run_real(rows: Rows) -> tuple[Engine, Outcome]:
    ops = ForcedOps(CpuOps(1), RowEnds(rows.lengths, END_ID, OTHER_ID))
    with Engine(MODEL, CONFIG, ops=ops) as engine:
        return engine, run_job(engine, rows)


@pytest.mark.parametrize("prefixes", [{}, {"num_prefixes": 3, "prefix_tokens": 40}])
@pytest.mark.parametrize("known", [False, True])
def test_sweeps_are_those_of_a_real_engine(prefixes: dict[str, int], known: bool) -> None:
    rows = tailed_rows(60, **prefixes)
    rows = rows.known if known else rows
    real, outcome = run_real(rows)
    with open_simulated(MODEL, CONFIG, real.plan, rows) as engine:
        simulated = run_job(engine, rows)
    assert shape(simulated) == shape(outcome)
    assert simulated.reused_tokens == outcome.reused_tokens
    assert outcome.num_rows == len(rows)
    assert outcome.output_tokens == rows.lengths.sum()
    assert max(sweep.num_board for sweep in outcome.sweeps) < len(rows), "some had to wait"


def test_sweeps_are_those_of_a_job(tmp_path: Path) -> None:
    """Through the loop of an engine actor, from a Parquet file."""
    texts = ["the " * 40 * (row % 2) + f"row {row} " * (1 + row % 6) for row in range(30)]
    lengths = Mix(median=6, tail_from=30).draw(30, 60, seed=4)
    ops = ForcedOps(CpuOps(1), RowEnds(lengths, END_ID, OTHER_ID))
    params = SamplingParams(max_tokens=60, stop_token_ids=(END_ID,), ignore_eos=True)
    command = start(tmp_path / "in.parquet", {"prompt": texts}, params=params, engine=CONFIG)
    with Engine(MODEL, CONFIG, ops=ops) as real:
        run(real, command)
        prompts = [np.array(real.tokenizer.encode(text), np.int32) for text in texts]
    rows = Rows(prompts=prompts, lengths=lengths, max_tokens=np.full(30, 60))
    with open_simulated(MODEL, CONFIG, real.plan, rows) as engine:
        simulated = run_job(engine, rows)
    swept = [(record.num_rows, record.num_tokens) for record in real.sweeps.recent]
    of_warm_up = 2
    assert swept[of_warm_up:] == [(s.num_rows, s.num_tokens) for s in simulated.sweeps]


def test_a_sweep_takes_the_longer_of_link_and_computing() -> None:
    machine = Machine(layers_s=((0.0, 0.0), (64.0, 1.0)), link_nbytes_per_s=1e6)
    with Engine(MODEL, CONFIG, ops=ForcedOps(CpuOps(1), NO_ENDS)) as engine:
        plan = replace(engine.plan, streamed_nbytes=500_000)
    pace = machine.pace(plan)
    assert pace.sweep_s(Load(16, 0, 0, 16)) == (0.5, "link")
    assert pace.sweep_s(Load(64, 0, 0, 64)) == (1.0, "compute")


def test_prints_the_plan_and_its_neighbours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs, found = tmp_path / "costs.json", tmp_path / "found.json"
    costs.write_text(json.dumps(COSTS))
    arguments = ["--model", str(MODEL), "--costs", str(costs), "--kv-memory", "1MiB"]
    arguments += ["--rows", "20", "--prompt-tokens", "30", "--output-tokens", "10"]
    assert simulate.main([*arguments, "--neighbours", "--json", str(found)]) == 0
    records = json.loads(found.read_text())
    assert len(records) > 3
    assert all(record["computed_tokens"] == 600 for record in records)
    assert len(capsys.readouterr().out.splitlines()) == len(records) + 1


def test_the_planner_knows_what_prompts_share() -> None:
    prompts = random_prompts(500, 120, 500, seed=3, num_prefixes=1, prefix_tokens=100)
    rows = Rows(prompts=prompts, lengths=np.full(500, 9), max_tokens=np.full(500, 20))
    found = simulate.make_workload(rows, 9)
    assert (found.num_rows, found.prompt_tokens, found.output_tokens) == (500, 120, 9)
    assert 98 < found.reused_tokens < 102
    assert 2.9 < found.reused_pages <= 3
    assert found.longest_tokens == 140
    own = Rows(prompts=random_prompts(500, 120, 500), lengths=rows.lengths, max_tokens=rows.lengths)
    assert simulate.make_workload(own, 9).reused_tokens < 2


def test_costs_that_say_something_else_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({**COSTS, "warp_factor": 9}))
    assert simulate.main(["--model", str(MODEL), "--costs", str(costs)]) == 1
    assert "warp_factor" in capsys.readouterr().err


def test_a_hollow_model_has_the_header_and_the_size_of_a_whole_one(tmp_path: Path) -> None:
    shape = Shape(num_layers=2, hidden=64, ffn=128, num_heads=4, vocab_size=400)
    whole, hollow = tmp_path / "whole.gguf", tmp_path / "hollow.gguf"
    write_model(whole, shape)
    write_model(hollow, shape, hollow=True)
    assert hollow.stat().st_size == whole.stat().st_size
    assert GgufFile.open(hollow).tensors == GgufFile.open(whole).tensors


def test_a_timed_job_is_simulated_by_the_plan_that_it_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(MODEL, CONFIG, ops=ForcedOps(CpuOps(1), NO_ENDS)) as engine:
        plan = replace(engine.plan, expand=False, streamed_nbytes=500_000)
    assert simulate_timed.plan_of(plan.record()).record() == plan.record()
    facts = {
        "command": "--rows 20 --kv-type f32",
        "link, GB/s": 0.001,
        "plan": plan.record(),
        "sweeps": 12,
        "seconds, first admission to the end": 7.0,
        "KV in, GB": 0.0,
        "KV out, GB": 0.0,
    }
    costs, result = tmp_path / "costs.json", tmp_path / "result.json"
    costs.write_text(json.dumps(COSTS))
    result.write_text(json.dumps({"title": "20 rows of 0 + 5 + 30", "facts": facts}))
    arguments = ["--model", str(MODEL), "--costs", str(costs), str(result)]
    assert simulate_timed.main(arguments) == 0
    shown = capsys.readouterr().out.splitlines()[-1]
    assert "12 / 12" in shown
    seconds = float(shown.split(" 7.0 / ")[1].split()[0])
    assert 12 * 0.5 < seconds < 12 * 1.0, "each waits half a second for the link, at least"


def test_an_order_that_learns_lengths_leaves_a_shorter_tail() -> None:
    prompts = random_prompts(300, 70, 500, num_prefixes=12, prefix_tokens=40)
    lengths = ByPrefix(median=12).draw(prefixes_of(300, 12), 100, seed=0)
    rows = Rows(prompts=prompts, lengths=lengths, max_tokens=np.full(300, 100))
    config = replace(CONFIG, kv_memory_nbytes=8 << 20, sweep_tokens=256)
    with Engine(MODEL, config, ops=ForcedOps(CpuOps(1), NO_ENDS)) as engine:
        plan = engine.plan

    def num_sweeps(rows: Rows, make_feed: MakeFeed) -> int:
        with open_simulated(MODEL, config, plan, rows) as engine:
            return run_job(engine, rows, make_feed=make_feed).num_sweeps

    learned = num_sweeps(rows, LearnedFeed)
    assert num_sweeps(rows.known, RowFeed) < learned < num_sweeps(rows, RowFeed)


def test_benchmark_of_tails_runs_each_policy() -> None:
    options = bench.parse_arguments(
        ["tail", "--model", str(MODEL), "--repeats", "1", "--tail-rows", "20", "--threads", "1"]
    )
    report = bench_tail(options)
    assert 1 <= report.median("unknown: sweeps / oracle's") < 1.5
    assert report.median("unknown: thousand tokens computed") > 20 * PROMPT_TOKENS / 1000
