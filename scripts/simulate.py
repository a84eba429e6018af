"""Run whole jobs through the engine's own policy, without weights, by what sweeps cost.

    python -m scripts.simulate --model MODEL --costs COSTS.json --memory 24GiB \\
        --rows 1000 --prompt-tokens 512 --output-tokens 128

Real are the plan, admission, the composition of sweeps, KV pages with their reuse, and the order
of rows. A sweep takes the longer of what streams and what computes. The model's header is all that
is read of it: `scripts.synth_gguf --hollow` makes one of any shape. One line for each plan:

    plan      resident layers + head, sweep tokens, KV pages, most rows
    sweeps    of the whole job; sweep s: the mean
    board     mean rows on board
    link      share of the job in which what streams is on its way, 1 is a full link
    tok/s     generated
    prompt    tokens computed + tokens reused
    job s     and what the planner predicted

`--neighbours` adds the plans of other sweep budgets and KV budgets. `--lengths mix` draws outputs
with a heavy tail, which rows then do not announce: they may generate `--output-tokens`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine import EngineConfig, EngineError
from engine.gguf_file import GgufFile
from engine.hparams import read_hparams
from engine.loading import model_sizes
from engine.model import kv_shape
from engine.plan import Plan
from engine.planner import Planner, Workload
from jobs.records import SpecError
from kernels.cpu.pages import page_nbytes, row_nbytes
from ntx_batch.spec import parse_size
from scripts.simulated_job import Outcome, open_simulated, run_job
from scripts.simulated_machine import Machine
from scripts.simulated_rows import Mix, Rows, random_prompts

SWEEP_TOKENS_TRIED = (512, 1024, 1536, 2048, 3072)
KV_SHARES_TRIED = (0.9, 0.95, 1.05)  # of the KV memory that the planner chose
HEAD = (
    f"{'plan':<34}{'sweeps':>8}{'sweep s':>9}{'board':>8}{'link':>6}{'tok/s':>8}"
    f"{'prompt':>18}{'job s':>9}{'predicted':>10}"
)


@dataclass(frozen=True, slots=True)
class Simulated:
    """A plan, and the job that was run by it."""

    plan: Plan
    outcome: Outcome
    link_share: float

    def line(self) -> str:
        plan, outcome = self.plan, self.outcome
        head = "+head" if plan.head_resident else ""
        name = (
            f"{sum(plan.resident)}{head}, {plan.sweep_tokens} tok, "
            f"{plan.kv_pages} pages, {plan.max_rows}"
        )
        prompt = f"{outcome.computed_tokens}+{outcome.reused_tokens}"
        return (
            f"{name:<34}{outcome.num_sweeps:>8}{outcome.seconds / outcome.num_sweeps:>9.3f}"
            f"{outcome.mean_board:>8.1f}{self.link_share:>6.2f}{outcome.tokens_per_s:>8.1f}"
            f"{prompt:>18}{outcome.seconds:>9.0f}{plan.predicted['job_s']:>10.0f}"
        )

    def record(self) -> dict[str, Any]:
        outcome = self.outcome
        return {
            "plan": self.plan.record(),
            "predicted": dict(self.plan.predicted),
            "num_sweeps": outcome.num_sweeps,
            "seconds": outcome.seconds,
            "mean_board": outcome.mean_board,
            "link_share": self.link_share,
            "tokens_per_s": outcome.tokens_per_s,
            "computed_tokens": outcome.computed_tokens,
            "reused_tokens": outcome.reused_tokens,
            "limited_s": outcome.limited_s,
        }


class Simulator:
    """Plans and runs jobs of one model on one machine.

    model: GGUF file, of which the header alone is read

    Raises GgufError, UnsupportedModelError.
    """

    def __init__(self, model: Path, machine: Machine, config: EngineConfig) -> None:
        file = GgufFile.open(model)
        self.hparams = read_hparams(file)
        kv_type = config.kv_type or "f16"
        self._model, self._machine = model, machine
        self._config = replace(config, kv_type=kv_type)
        shape = kv_shape(self.hparams)
        self._sizes = model_sizes(
            file, self.hparams, page_nbytes(shape, kv_type), row_nbytes(shape, kv_type)
        )

    def plan(self, workload: Workload, **changes: Any) -> Plan:
        """What the planner chooses. changes: of the configuration

        Raises MemoryBudgetError.
        """
        machine = self._machine
        planner = Planner(
            self.hparams,
            replace(self._config, **changes),
            self._sizes,
            budget=machine.budget(self._config.memory_nbytes),
            rates=machine.rates(self._sizes),
            workload=workload,
        )
        return planner.best()

    def neighbours(self, workload: Workload, plan: Plan) -> Iterator[Plan]:
        """Other plans: by the most tokens of a sweep, and by KV memory. Those that fit."""
        asked: list[dict[str, int]] = [
            {"sweep_tokens": tokens} for tokens in SWEEP_TOKENS_TRIED if tokens != plan.sweep_tokens
        ]
        asked += [
            {"sweep_tokens": plan.sweep_tokens, "kv_memory_nbytes": int(share * plan.kv_nbytes)}
            for share in KV_SHARES_TRIED
        ]
        for changes in asked:
            try:
                yield self.plan(workload, **changes)
            except EngineError as error:
                print(f"{changes}: {error}", file=sys.stderr)

    def run(self, plan: Plan, rows: Rows) -> Simulated:
        """The whole job by a plan."""
        pace = self._machine.pace(plan)
        with open_simulated(self._model, self._config, plan, rows) as engine:
            outcome = run_job(engine, rows, pace)
        streaming_s = outcome.num_sweeps * max(pace.streams.values())
        return Simulated(plan, outcome, streaming_s / outcome.seconds)


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
    drawn = options.lengths == "mix"
    lengths = Mix().draw(options.rows, options.output_tokens, options.seed) if drawn else most
    return Rows(prompts=prompts, lengths=lengths, max_tokens=most)


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
    parser.add_argument("--memory", type=_size, help="of the device, such as 24GiB")
    parser.add_argument("--kv-memory", type=_size, help="of that, for the KV cache")
    parser.add_argument("--kv-type", choices=["f32", "f16", "int8"], default="f16")
    parser.add_argument("--sweep-tokens", type=int, help="most tokens of a sweep")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--prefixes", type=int, default=0, help="different beginnings of prompts")
    parser.add_argument("--prefix-tokens", type=int, default=0, help="of a prompt, its beginning")
    parser.add_argument("--output-tokens", type=int, default=128, help="most tokens of a row")
    parser.add_argument("--lengths", choices=["equal", "mix"], default="equal")
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
        kv_memory_nbytes=options.kv_memory,
        sweep_tokens=options.sweep_tokens,
    )
    simulator = Simulator(options.model, Machine.read(options.costs), config)
    rows = make_rows(options, simulator.hparams.vocab_size)
    workload = Workload(
        num_rows=options.rows,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
    )
    plan = simulator.plan(workload)
    yield simulator.run(plan, rows)
    if options.neighbours:
        for other in simulator.neighbours(workload, plan):
            yield simulator.run(other, rows)


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
