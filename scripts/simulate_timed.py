"""Simulate jobs that were timed on a GPU, by the plans that they had: what the costs are worth.

    python -m scripts.simulate_timed --model 70b.gguf --costs COSTS.json RESULT.json ...

A result is one that `scripts.bench_gpu_job` wrote. Of one that was stopped as many sweeps are
simulated as it had.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine import EngineConfig
from engine.plan import Plan
from scripts.simulated_job import Sweep
from scripts.simulated_machine import Machine
from scripts.simulated_rows import Rows, random_prompts
from scripts.simulator import Simulator

HEAD = f"{'job':<44}{'sweeps':>14}{'seconds':>16}{'KV in, GB':>14}{'KV out, GB':>14}"


def plan_of(record: Mapping[str, Any]) -> Plan:
    """The plan that a record tells of, as far as a simulation needs it."""
    placement, head = record["placement"].split()
    return Plan(
        expand=record["expand"],
        resident=tuple(letter == "r" for letter in placement),
        head_resident=head == "r",
        host=tuple(letter == "h" for letter in placement),
        head_in_host=head == "h",
        **{
            name: record[name]
            for name in (
                *("weights_nbytes", "ring_nbytes", "activations_nbytes", "kv_pages", "kv_nbytes"),
                *("host_kv_pages", "kv_staging_nbytes", "host_nbytes", "sweep_tokens", "max_rows"),
                *("streamed_nbytes", "disk_nbytes"),
            )
        },
    )


def simulated(model: Path, machine: Machine, facts: Mapping[str, Any], title: str) -> list[Sweep]:
    """The sweeps of the job that a result is of. title: its rows, as the result names them"""
    num_rows, prefix, prompt, output = (int(word) for word in title.split() if word.isdigit())
    command = facts["command"].split()
    kv_type = command[command.index("--kv-type") + 1]
    machine = replace(machine, link_nbytes_per_s=1e9 * facts["link, GB/s"])
    simulator = Simulator(model, machine, EngineConfig(kv_type=kv_type))
    prompts = random_prompts(
        num_rows,
        prefix + prompt,
        simulator.hparams.vocab_size,
        num_prefixes=bool(prefix),
        prefix_tokens=prefix,
    )
    lengths = np.full(num_rows, output, np.int64)
    rows = Rows(prompts=prompts, lengths=lengths, max_tokens=lengths)
    return simulator.run(plan_of(facts["plan"]), rows).outcome.sweeps[: facts["sweeps"]]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="GGUF; its header will do")
    parser.add_argument("--costs", type=Path, required=True, help="as for scripts.simulate")
    parser.add_argument("results", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    print("timed / simulated", HEAD, sep="\n")
    for path in options.results:
        result = json.loads(path.read_text())
        facts, title = result["facts"], result["title"]
        sweeps = simulated(options.model, Machine.read(options.costs), facts, title)
        gigabytes_per_page = facts["plan"]["kv_nbytes"] / facts["plan"]["kv_pages"] / 1e9
        pairs = [
            (f"{facts['sweeps']}", f"{len(sweeps)}"),
            (
                f"{facts['seconds, first admission to the end']:.1f}",
                f"{sum(sweep.seconds for sweep in sweeps):.1f}",
            ),
            (
                f"{facts['KV in, GB']:.0f}",
                f"{gigabytes_per_page * sum(sweep.travel.read for sweep in sweeps):.0f}",
            ),
            (
                f"{facts['KV out, GB']:.0f}",
                f"{gigabytes_per_page * sum(sweep.travel.written for sweep in sweeps):.0f}",
            ),
        ]
        cells = [f"{timed} / {again}" for timed, again in pairs]
        print(f"{title:<44}{cells[0]:>14}{cells[1]:>16}{cells[2]:>14}{cells[3]:>14}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
