"""Plans of one model on one machine, and the jobs that they would run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine import EngineConfig, EngineError
from engine.gguf_file import GgufFile
from engine.hparams import read_hparams
from engine.loading import model_sizes
from engine.model import kv_shape
from engine.plan import Plan
from engine.planner import Planner, Workload
from kernels.cpu.pages import page_nbytes, row_nbytes
from scripts.simulated_job import MakeFeed, Outcome, RowFeed, open_simulated, run_job
from scripts.simulated_machine import Machine
from scripts.simulated_rows import Rows

SWEEP_TOKENS_TRIED = (512, 1024, 1536, 2048, 3072, 4096)
KV_SHARES_TRIED = (0.9, 0.95, 1.05)  # of the KV memory that the planner chose
HEAD = (
    f"{'plan':<40}{'sweeps':>8}{'sweep s':>9}{'board':>8}{'host':>8}{'link':>6}{'tok/s':>8}"
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
            f"{plan.kv_pages}+{plan.host_kv_pages} pages, {plan.max_rows}"
        )
        prompt = f"{outcome.computed_tokens}+{outcome.reused_tokens}"
        return (
            f"{name:<40}{outcome.num_sweeps:>8}{outcome.seconds / outcome.num_sweeps:>9.3f}"
            f"{outcome.mean_board:>8.1f}{outcome.mean_host_pages:>8.0f}{self.link_share:>6.2f}{outcome.tokens_per_s:>8.1f}"
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
            "mean_host_pages": outcome.mean_host_pages,
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
        return self.planner(workload, **changes).best()

    def planner(self, workload: Workload, **changes: Any) -> Planner:
        """As above."""
        machine = self._machine
        return Planner(
            self.hparams,
            replace(self._config, **changes),
            self._sizes,
            budget=machine.budget(self._config.memory_nbytes, self._config.host_memory_nbytes),
            rates=machine.rates(self._sizes),
            workload=workload,
        )

    def neighbours(self, workload: Workload, plan: Plan) -> Iterator[Plan]:
        """Other plans: by the most tokens of a sweep, and by KV memory. Those that fit."""
        asked: list[dict[str, Any]] = [
            {"sweep_tokens": tokens} for tokens in SWEEP_TOKENS_TRIED if tokens != plan.sweep_tokens
        ]
        if plan.host_kv_pages:
            planner = self.planner(workload)
            found = (planner.plan_of(way) for way in planner.other_host_kv(plan))
            yield from (planner.predicted(other) for other in found if other is not None)
            asked.append({"host_kv": "never"})
        else:
            asked += [
                {"sweep_tokens": plan.sweep_tokens, "kv_memory_nbytes": int(share * plan.kv_nbytes)}
                for share in KV_SHARES_TRIED
            ]
        for changes in asked:
            try:
                yield self.plan(workload, **changes)
            except EngineError as error:
                print(f"{changes}: {error}", file=sys.stderr)

    def run(self, plan: Plan, rows: Rows, *, make_feed: MakeFeed = RowFeed) -> Simulated:
        """The whole job by a plan. make_feed: the order of rows, as in `run_job`"""
        pace = self._machine.pace(plan)
        with open_simulated(self._model, self._config, plan, rows) as engine:
            outcome = run_job(engine, rows, pace, make_feed=make_feed)
        travel_s = sum(pace.travel_s(sweep.travel) for sweep in outcome.sweeps)
        streaming_s = outcome.num_sweeps * max(pace.streams.values()) + travel_s
        return Simulated(plan, outcome, streaming_s / outcome.seconds)
