"""Decisions about memory and sweeps, as pure functions of sizes, rates and the work to do.

A sweep takes max(S / W, C): S bytes streamed over W bytes/s, C seconds of computing, a pass over
all weights and more for each token. Rows on board are limited by KV memory, so where the model
does not fit, every number of resident layers and every sweep budget is tried, and the pair with
the shortest job by a formula wins, unless by the forecast a neighbour of it does. Of what streams,
host memory keeps as much as it holds; what it has left may hold KV pages, for more rows on board,
which travel with the weights: sweeps get longer, and there are fewer of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from engine.costs import DEFAULT_RATES, EXPANDED, Rates, SweepCost
from engine.division import (
    Divider,
    Placed,
    activations_nbytes,
    kv_staging_nbytes,
    row_activations_nbytes,
)
from engine.forecast import Workload
from engine.hparams import Hparams
from engine.kv_cache import pages_for
from engine.plan import FIXED_NBYTES, Budget, Plan
from engine.prediction import Predictor
from engine.requests import EngineConfig, MemoryBudgetError
from engine.sizes import ModelSizes, Part
from engine.ways import SWEEP_TOKENS_TRIED, Way, Ways, way_of
from kernels.ops import PAGE_TOKENS, STAGED_LAYERS, shares_partial_pages

__all__ = [
    "DEFAULT_RATES",
    "FIXED_NBYTES",
    "Budget",
    "ModelSizes",
    "Part",
    "Plan",
    "Planner",
    "Rates",
    "Workload",
]

DEFAULT_KV_NBYTES = 8 << 30  # more rows than this holds fill no core any further
SPARE_ROWS = 1.5  # most rows on board, times those of the mean length: some rows are shorter
AS_GOOD = 1.02  # times the shortest time: what a prediction cannot tell apart
MAX_MOVES = 12  # from neighbour to neighbour; each must pay
LOCKED_NBYTES_PER_S = 3e9  # of host memory that is taken for KV pages before a job's first sweep


@dataclass(frozen=True, kw_only=True, slots=True)
class _Need:
    """The least bytes of the device's memory that one way takes.

    work: buffers, without those of rows; rows: of one row; staging: of KV pages in host memory
    """

    weights: int
    ring: int
    work: int
    rows: int
    kv: int
    staging: int

    @property
    def fixed(self) -> int:
        return self.weights + self.ring + self.work + self.staging

    @property
    def total(self) -> int:
        return self.fixed + self.rows + self.kv


class Planner:
    """Tries ways to divide the memory of `budget` and predicts what each gives.

    rates, workload: what the machine does, and what is to be done; usual ones where not known
    """

    def __init__(
        self,
        hparams: Hparams,
        config: EngineConfig,
        sizes: ModelSizes,
        *,
        budget: Budget,
        rates: Rates = DEFAULT_RATES,
        workload: Workload | None = None,
    ) -> None:
        self._hparams, self._config, self._sizes = hparams, config, sizes
        self._budget, self._rates = budget, rates
        self._divider = Divider(config, sizes, budget)
        self.ways = Ways(config, sizes, budget)
        shares_parts = config.kv_type is None or shares_partial_pages(config.kv_type)
        work = (workload or Workload()).with_reuse(
            reuses=config.reuse_prefixes, shares_parts=shares_parts
        )
        page_tokens = 1 if shares_parts else PAGE_TOKENS
        self._predictor = Predictor(sizes, rates, work, page_tokens=page_tokens)
        # Of rows that nobody has seen, any number may be on board.
        seen = workload is not None
        self._may_travel = (
            seen
            and config.host_kv == "auto"
            and config.kv_memory_nbytes is None
            and config.expand != "always"
            and budget.host_nbytes is not None
            and rates.link_nbytes_per_s is not None
        )
        self._useful_pages = work.num_rows * self._predictor.row_pages
        self._row_pages = self._predictor.row_pages if seen else 1
        self._shared_pages = self._predictor.shared_pages if seen else 0.0
        self._held_pages = max(self._row_pages, pages_for(work.longest_tokens))
        self._placed: dict[tuple[bool, int, bool], Placed | None] = {}
        if config.sweep_tokens is not None and config.sweep_tokens < 1:
            raise MemoryBudgetError(f"--sweep-tokens {config.sweep_tokens}: at least 1 is needed")
        if (config.kv_memory_nbytes or sizes.page_nbytes) < sizes.page_nbytes:
            raise MemoryBudgetError(
                f"--kv-memory {config.kv_memory_nbytes:,} bytes makes no KV cache: one page takes "
                f"{sizes.page_nbytes:,}"
            )

    def best(self) -> Plan:
        """The plan with the shortest predicted job; of those as good, the one that streams least.

        Raises MemoryBudgetError: nothing fits; says the smallest memory that does.
        """
        best = self.best_on_device()
        travelling = self._travelling() if best.streams else None
        return self._shorter(best, self._settled(travelling)) if travelling else best

    def best_on_device(self) -> Plan:
        """The same of those that have no KV pages in host memory."""
        plans = self._plans()
        if not plans and self._held_pages > self._row_pages:
            # Better a plan for most rows than none; the longest ones will be told so.
            self._held_pages = self._row_pages
            plans = self._plans()
        if not plans:
            raise MemoryBudgetError(self._refusal())
        return self._settled(self._shortest(plans))

    def _plans(self) -> list[Plan]:
        return self._fitting(self.ways.all(self._fits))

    def _travelling(self) -> Plan | None:
        """The shortest with KV pages in host memory, by the forecast, of one for each sweep budget.

        The formula knows little of how rows come on board, which long sweeps are for. Of budgets as
        good, the longest: rows that end before they are expected to make room for more prompts.
        """
        by_sweep: dict[int, list[Plan]] = {}
        for plan in self._fitting(self.ways.with_host_kv(self._most_host_pages)):
            by_sweep.setdefault(plan.sweep_tokens, []).append(plan)
        found = [self.predicted(self._shortest(plans)) for plans in by_sweep.values()]
        enough = AS_GOOD * min(map(_whole_s, found), default=0.0)
        good = [plan for plan in found if _whole_s(plan) <= enough]
        return max(good, key=lambda plan: plan.sweep_tokens, default=None)

    def _fitting(self, ways: Iterable[Way]) -> list[Plan]:
        return [plan for way in ways if (plan := self.plan_of(way)) is not None]

    def _shortest(self, plans: Sequence[Plan]) -> Plan:
        """By the formula; of those as good, what streams least and takes the least host memory."""
        job_s = [self.estimated_job_s(plan) + _locking_s(plan) for plan in plans]
        enough = AS_GOOD * min(job_s)
        good = [found for found in zip(plans, job_s, strict=True) if found[1] <= enough]

        def taken(found: tuple[Plan, float]) -> tuple[int, int, float]:
            plan, seconds = found
            return plan.streamed_nbytes, plan.host_kv_pages, seconds

        return min(good, key=taken)[0]

    def _settled(self, plan: Plan) -> Plan:
        """The plan with its predictions, or one near it that by these is shorter for certain."""
        plan = self.predicted(plan)
        for _ in range(MAX_MOVES):
            ways = self.ways.near(plan)
            if plan.host_kv_pages:
                ways += self.other_host_kv(plan)
            near = [self.predicted(found) for found in self._fitting(ways)]
            shortest = self._shorter(plan, min(near, key=_whole_s, default=plan))
            if shortest is plan:
                break
            plan = shortest
        return plan

    def _shorter(self, plan: Plan, other: Plan) -> Plan:
        """The other one where its predicted job is shorter for certain."""
        return other if _whole_s(other) * AS_GOOD < _whole_s(plan) else plan

    def other_host_kv(self, plan: Plan) -> list[Way]:
        """With other numbers of KV pages in host memory, where there is room and rows are known."""
        way = way_of(plan)
        return self.ways.other_host_kv(way, self._most_host_pages(way))

    def _most_host_pages(self, way: Way) -> int:
        """KV pages that host memory and the device leave room for, and that rows could fill."""
        placed = self._place(way)
        if (
            not self._may_travel
            or placed is None
            or placed.disk_nbytes
            or not placed.streamed_nbytes
        ):
            return 0
        budget, page_nbytes = self._budget, self._sizes.page_nbytes
        assert budget.host_nbytes is not None
        in_host = (budget.host_nbytes - placed.host_nbytes) // page_nbytes
        room_nbytes = budget.device_nbytes - self._need(way, placed, 0).total
        staged = room_nbytes * len(self._sizes.layers) // (STAGED_LAYERS * page_nbytes) - 1
        return max(0, min(in_host, staged, self._useful_pages))

    def predicted(self, plan: Plan, cost: SweepCost | None = None) -> Plan:
        """A plan made otherwise, with the predictions of these rates and this workload.

        cost: of a sweep's computing, where that is known better than by the rates
        """
        return replace(plan, predicted=self._predictor.predict(plan, cost))

    def estimated_job_s(self, plan: Plan) -> float:
        """Seconds of the job by the formula that plans are compared by."""
        return self._predictor.estimated_job_s(plan)

    @property
    def budget(self) -> Budget:
        return self._budget

    @property
    def config(self) -> EngineConfig:
        return self._config

    def has_measured(self, *, expand: bool) -> bool:
        """Whether the rates are of weights that are kept expanded, or of those that are not."""
        names = {name for part in self._sizes.layers for name in part.values}
        known = self._rates.layer_s.keys() | self._rates.values_per_s.keys()
        return ({EXPANDED} if expand else names) <= known

    def with_pages(self, plan: Plan, kv_pages: int) -> tuple[Plan | None, str]:
        """The plan with more or fewer KV pages, and as many more or fewer rows on board.

        Returns it with its predictions, or None and why it does not fit.
        """
        if kv_pages < self._held_pages:
            return None, f"a row may take {self._held_pages} pages"
        num_pages = kv_pages + plan.host_kv_pages
        max_rows = max(1, min(plan.sweep_tokens, plan.max_rows * num_pages // plan.total_kv_pages))
        row_nbytes = row_activations_nbytes(self._hparams) + self._sizes.row_nbytes
        changed = replace(
            plan,
            kv_pages=kv_pages,
            kv_nbytes=kv_pages * self._sizes.page_nbytes,
            max_rows=max_rows,
            activations_nbytes=plan.activations_nbytes + (max_rows - plan.max_rows) * row_nbytes,
        )
        over_nbytes = changed.device_nbytes - self._budget.device_nbytes
        if over_nbytes > 0:
            return None, f"{over_nbytes:,} bytes more than there are"
        return self.predicted(changed), ""

    def shortfall(self, way: Way) -> str:
        """Why one way does not fit."""
        placed = self._place(way)
        if placed is None:
            host_nbytes, least = self._budget.host_nbytes, self._divider.least_host_nbytes
            if host_nbytes is not None and host_nbytes < least:
                return f"host memory of {host_nbytes:,} bytes passes nothing on; {least:,} would"
            return "the ring holds no whole layer"
        need = self._need(way, placed, way.host_kv_pages)
        over_nbytes = need.total - self._budget.device_nbytes
        return f"{over_nbytes:,} bytes more than there are"

    @property
    def _has_host_tier(self) -> bool:
        return self._budget.host_nbytes is not None

    def _fits(self, way: Way) -> bool:
        return self.plan_of(way) is not None

    def plan_of(self, way: Way) -> Plan | None:
        """The plan of one way, or None where it does not fit."""
        placed = self._place(way)
        if placed is None:
            return None
        host_kv_pages = way.host_kv_pages and min(way.host_kv_pages, self._most_host_pages(way))
        need = self._need(way, placed, host_kv_pages)
        if need.total > self._budget.device_nbytes:
            return None
        max_rows, kv_pages = self._rows_and_pages(way, need, host_kv_pages)
        work_nbytes = need.work + max_rows * need.rows
        return Plan(
            expand=way.expand,
            resident=placed.resident,
            head_resident=way.head_resident,
            weights_nbytes=placed.weights_nbytes,
            ring_nbytes=placed.ring_nbytes,
            activations_nbytes=work_nbytes,
            kv_pages=kv_pages,
            kv_nbytes=kv_pages * self._sizes.page_nbytes,
            sweep_tokens=way.sweep_tokens,
            max_rows=max_rows,
            streamed_nbytes=placed.streamed_nbytes,
            disk_nbytes=placed.disk_nbytes,
            host=placed.host,
            head_in_host=placed.head_in_host,
            host_nbytes=placed.host_nbytes + host_kv_pages * self._sizes.page_nbytes,
            host_kv_pages=host_kv_pages,
            kv_staging_nbytes=need.staging,
        )

    def _place(self, way: Way) -> Placed | None:
        key = (way.expand, way.num_resident, way.head_resident)
        if key not in self._placed:
            self._placed[key] = self._divider.place(way)
        return self._placed[key]

    def _need(self, way: Way, placed: Placed, host_kv_pages: int) -> _Need:
        budget, tokens = self._budget, way.sweep_tokens
        return _Need(
            weights=placed.weights_nbytes,
            ring=placed.ring_nbytes,
            work=activations_nbytes(
                self._hparams, tokens, max_rows=0, runs_in_order=self._has_host_tier
            )
            + budget.fixed_nbytes
            + budget.scratch_nbytes(tokens),
            rows=row_activations_nbytes(self._hparams) + self._sizes.row_nbytes,
            kv=self._config.kv_memory_nbytes or self._held_pages * self._sizes.page_nbytes,
            staging=kv_staging_nbytes(self._sizes, host_kv_pages),
        )

    def _rows_and_pages(self, way: Way, need: _Need, host_kv_pages: int) -> tuple[int, int]:
        """Most rows on board and KV pages on the device, out of what its other parts leave."""
        page_nbytes, asked = self._sizes.page_nbytes, self._config.kv_memory_nbytes
        left_nbytes = self._budget.device_nbytes - need.fixed
        shared_nbytes = self._shared_pages * page_nbytes
        row_kv_nbytes = self._row_pages * page_nbytes - shared_nbytes
        if asked is not None:
            most_kv_nbytes, rows = asked, (asked - shared_nbytes) / row_kv_nbytes
        else:
            # Without a budget of our own we leave half of what is free to others.
            share = self._config.memory_nbytes or self._has_host_tier
            left_nbytes = left_nbytes if share else max(left_nbytes // 2, need.rows + need.kv)
            most_kv_nbytes = left_nbytes if self._has_host_tier else DEFAULT_KV_NBYTES
            all_nbytes = left_nbytes + host_kv_pages * page_nbytes
            rows = (all_nbytes - shared_nbytes) / (row_kv_nbytes + SPARE_ROWS * need.rows)
            most_nbytes = most_kv_nbytes + host_kv_pages * page_nbytes
            rows = min(rows, (most_nbytes - shared_nbytes) / row_kv_nbytes)
        room = (left_nbytes - need.kv) // need.rows
        max_rows = max(1, min(way.sweep_tokens, room, int(SPARE_ROWS * rows)))
        kv_nbytes = max(need.kv, min(most_kv_nbytes, left_nbytes - max_rows * need.rows))
        most_pages = max_rows * pages_for(self._hparams.context_length)
        return max_rows, min(kv_nbytes // page_nbytes, most_pages)

    def _refusal(self) -> str:
        """What was asked, what there is, and the smallest that works."""
        config, budget = self._config, self._budget
        sweep_tokens = config.sweep_tokens or SWEEP_TOKENS_TRIED[0]
        ways = [Way(True, len(self._sizes.layers), True, sweep_tokens)]
        if config.expand != "always":
            ways = list(self.ways.divisions(sweep_tokens))
        placed = [(way, found) for way in ways if (found := self._place(way)) is not None]
        if not placed:
            return self._host_refusal()
        need = min((self._need(*each, 0) for each in placed), key=lambda need: need.total)
        given = config.memory_nbytes is not None and config.memory_nbytes <= budget.device_nbytes
        kv = "asked for" if config.kv_memory_nbytes else f"a row of {self._held_pages} pages"
        return (
            f"{'the memory budget is' if given else 'free memory is'} {budget.device_nbytes:,} "
            f"bytes; the smallest that works here is {need.total:,}: weights that must stay "
            f"{need.weights:,}, ring {need.ring:,}, work buffers of {sweep_tokens} tokens "
            f"{need.work + need.rows:,}, KV cache {need.kv:,} ({kv}; a page takes "
            f"{self._sizes.page_nbytes:,}); {'raise --memory' if given else 'free some'}, or "
            + self._smaller_advice()
            + self._host_advice()
        )

    def _smaller_advice(self) -> str:
        """What was asked for and may be lowered, or what may be asked for."""
        config = self._config
        asked = {
            "--kv-memory": config.kv_memory_nbytes,
            "--ring-memory": config.ring_nbytes,
            "--sweep-tokens": config.sweep_tokens,
        }
        lower = [name for name, value in asked.items() if value is not None]
        if lower:
            return "lower " + " or ".join(lower)
        return "give a smaller --ring-memory or --sweep-tokens than this plan's"

    def _host_refusal(self) -> str:
        return (
            f"pinned host memory is {self._budget.host_nbytes:,} bytes; the smallest that works "
            f"here is {self._divider.least_host_nbytes:,}; raise --host-memory"
        )

    def _host_advice(self) -> str:
        """Less weights must stay on the device where host memory can pass them on."""
        host_nbytes, least_nbytes = self._budget.host_nbytes, self._divider.least_host_nbytes
        if host_nbytes is None or host_nbytes >= least_nbytes:
            return ""
        return f"; layers could stream with --host-memory of at least {least_nbytes:,} bytes"


def _whole_s(plan: Plan) -> float:
    """Seconds of the job, and of what its KV pages in host memory take before."""
    return float(plan.predicted["job_s"]) + _locking_s(plan)


def _locking_s(plan: Plan) -> float:
    return plan.host_kv_nbytes / LOCKED_NBYTES_PER_S
