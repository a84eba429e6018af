"""Run whole jobs through the engine's own policy, without weights, by what sweeps cost.

    python -m scripts.simulate --model MODEL --costs COSTS.json --memory 24GiB \\
        --rows 1000 --prompt-tokens 512 --output-tokens 128 --neighbours

Real are the plan, admission, the composition of sweeps, KV pages with their reuse, and the order
of rows. A sweep takes the longer of what streams and what computes. The model's header is all that
is read of it: `scripts.synth_gguf --hollow` makes one of any shape. One line for each plan:

    plan      resident layers + head, sweep tokens, KV pages + those in host memory, most rows
    sweeps    of the whole job; sweep s: the mean
    board     mean rows on board
    host      KV pages that come from host memory in the mean sweep
    link      share of the job in which what streams is on its way; 1 is a full link
    tok/s     generated
    prompt    tokens computed + tokens reused
    job s     and what the planner predicted

`--lengths mix` draws outputs with a heavy tail, `--lengths prefix` such that go with the beginning
of the prompt. Rows do not announce them, they may all generate `--output-tokens`, unless `--known`
makes them known as to an oracle. `--learn` is a rule that jobs have not: it orders rows by what
others with their beginning generated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine import EngineConfig, EngineError
from engine.planner import Workload
from jobs.records import SpecError
from jobs.sharing import SampledRow, estimate_sharing
from jobs.workload import sample_ranges
from ntx_batch.spec import parse_size
from scripts.learned_order import LearnedFeed
from scripts.simulated_job import END_ID, MakeFeed, RowFeed
from scripts.simulated_machine import Machine
from scripts.simulated_ops import Lengths
from scripts.simulated_rows import ByPrefix, Mix, Rows, prefixes_of, random_prompts
from scripts.simulator import HEAD, Simulated, Simulator


def make_rows(options: argparse.Namespace, vocab_size: int) -> Rows:
    prompts = random_prompts(
        options.rows,
        options.prompt_tokens,
        vocab_size,
        num_prefixes=options.prefixes,
        prefix_tokens=options.prefix_tokens,
        seed=options.seed,
    )
    most = np.full(options.rows, options.output_tokens, np.int64)
    rows = Rows(prompts=prompts, lengths=_lengths(options, most), max_tokens=most)
    return rows.known if options.known else rows


def _lengths(options: argparse.Namespace, equal: Lengths) -> Lengths:
    if options.lengths == "mix":
        return Mix().draw(options.rows, options.output_tokens, options.seed)
    if options.lengths == "prefix":
        prefixes = prefixes_of(options.rows, options.prefixes, options.seed)
        return ByPrefix().draw(prefixes, options.output_tokens, options.seed)
    return equal


def make_workload(rows: Rows, output_tokens: float) -> Workload:
    """What a job's sample of these rows says. output_tokens: that the planner expects of a row"""
    runs = [
        [SampledRow(rows.request(index, END_ID), "{}", 0) for index in range(begin, end)]
        for begin, end in sample_ranges(len(rows))
    ]
    found = estimate_sharing(runs, num_rows=len(rows), num_samples=1, dedupe=False)
    return Workload(
        num_rows=len(rows),
        prompt_tokens=found.prompt_tokens,
        output_tokens=output_tokens,
        reused_tokens=found.reused_tokens,
        reused_pages=found.reused_pages,
        longest_tokens=max(len(prompt) for prompt in rows.prompts) + int(rows.max_tokens.max()),
    )


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except SpecError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="GGUF; its header will do")
    parser.add_argument(
        "--costs", type=Path, required=True, help="of sweeps: scripts/simulated_machine.py"
    )
    parser.add_argument("--link", type=float, help="its bytes per second, in place of the file's")
    parser.add_argument("--memory", type=_size, help="of the device, such as 24GiB")
    parser.add_argument("--host-memory", type=_size, help="pinned, less than the machine has")
    parser.add_argument("--host-kv", choices=["auto", "never"], default="auto")
    parser.add_argument("--kv-memory", type=_size, help="of that, for the KV cache")
    parser.add_argument("--kv-type", choices=["f32", "f16", "int8"], default="f16")
    parser.add_argument("--sweep-tokens", type=int, help="most tokens of a sweep")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--prefixes", type=int, default=0, help="different beginnings of prompts")
    parser.add_argument("--prefix-tokens", type=int, default=0, help="of a prompt, its beginning")
    parser.add_argument("--output-tokens", type=int, default=128, help="most tokens of a row")
    parser.add_argument("--lengths", choices=["equal", "mix", "prefix"], default="equal")
    parser.add_argument("--known", action="store_true", help="limits are the lengths themselves")
    parser.add_argument("--learn", action="store_true", help="longest first, as rows have shown")
    parser.add_argument("--planned-tokens", type=float, help="that the planner expects of a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--neighbours", action="store_true", help="other plans too")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(arguments)
    if options.prefix_tokens >= options.prompt_tokens:
        parser.error("--prefix-tokens must be fewer than --prompt-tokens")
    return options


def simulate(options: argparse.Namespace) -> Iterator[Simulated]:
    config = EngineConfig(
        kv_type=options.kv_type,
        memory_nbytes=options.memory,
        host_memory_nbytes=options.host_memory,
        host_kv=options.host_kv,
        kv_memory_nbytes=options.kv_memory,
        sweep_tokens=options.sweep_tokens,
    )
    machine = Machine.read(options.costs)
    if options.link is not None:
        machine = replace(machine, link_nbytes_per_s=options.link)
    simulator = Simulator(options.model, machine, config)
    rows = make_rows(options, simulator.hparams.vocab_size)
    workload = make_workload(rows, options.planned_tokens or options.output_tokens)
    make_feed: MakeFeed = LearnedFeed if options.learn else RowFeed
    plan = simulator.plan(workload)
    yield simulator.run(plan, rows, make_feed=make_feed)
    if options.neighbours:
        for other in simulator.neighbours(workload, plan):
            yield simulator.run(other, rows, make_feed=make_feed)


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    started, records = time.perf_counter(), []
    try:
        for number, simulated in enumerate(simulate(options)):
            if number == 0:
                print(HEAD)
            print(simulated.line(), flush=True)
            records.append(simulated.record())
    except (EngineError, OSError, ValueError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 1
    num_sweeps = sum(record["num_sweeps"] for record in records)
    seconds = time.perf_counter() - started
    print(f"{num_sweeps} sweeps simulated in {seconds:.1f} s", file=sys.stderr)
    if options.json is not None:
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
