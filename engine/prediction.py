"""What a plan gives over a job, as a pure function of sizes, rates and the work to do."""

from __future__ import annotations

from typing import Any

from engine.costs import Load, Rates, SweepCost
from engine.drain import layers_worth_keeping
from engine.forecast import (
    HALF_PAGE,
    STILL,
    Board,
    Forecast,
    Pace,
    Travel,
    Workload,
    forecast,
)
from engine.kv_cache import pages_for
from engine.plan import Plan
from engine.scheduler import SPARE_SWEEPS
from engine.sizes import ModelSizes
from kernels.ops import PAGE_TOKENS

MAX_BALANCE = 1 << 20  # tokens, where computing never catches up


class Predictor:
    """Predicts jobs of one kind of work on one machine.

    Plans are compared by a formula: R rows of p prompt and o output tokens, r of them on board.
    A row is on board for o sweeps, so R·o / r sweeps; r·p / S more, S tokens a sweep, until the
    last of the first r rows has come on board. S tokens a sweep bring no more than S·o / (p + o)
    rows on board. Here p is what is computed of a prompt. The job of the chosen plan, and of its
    neighbours, is run through in numbers.

    Rows on board follow each other in the order of their prompts, and each but the first finds R
    pages that those before it hold: r rows of P pages hold r·(P - R) + R. They are of all ages, so
    P is what a row holds halfway, with the page that it grows into and what stays free beside it.
    Pages that the device has no room for travel in each sweep.

    page_tokens: pieces of prompts end with pages of so many
    """

    def __init__(
        self, sizes: ModelSizes, rates: Rates, work: Workload, *, page_tokens: int = 1
    ) -> None:
        self._sizes, self._rates, self._work = sizes, rates, work
        self._page_tokens = page_tokens
        self._costs: dict[bool, SweepCost] = {}

    @property
    def row_pages(self) -> int:
        """KV pages that a row alone comes to hold."""
        return max(1, pages_for(self._work.whole_prompt + self._work.whole_output - 1))

    @property
    def mean_pages(self) -> float:
        """KV pages to be counted for a row alone, over its time on board."""
        growth = SPARE_SWEEPS / PAGE_TOKENS
        return min(float(self.row_pages), self._halfway_pages + growth)

    @property
    def _halfway_pages(self) -> float:
        halfway = self._work.whole_prompt + self._work.whole_output / 2
        return halfway / PAGE_TOKENS + HALF_PAGE

    @property
    def shared_pages(self) -> float:
        """KV pages that a row finds where another is on board."""
        return min(self._work.reused_pages, self.mean_pages - 0.5)

    def rows_in(self, num_pages: int) -> int:
        """Rows that so many KV pages hold at once."""
        shared = self.shared_pages
        return max(0, int((num_pages - shared) / (self.mean_pages - shared) + 1e-9))

    def _kv_rows(self, plan: Plan) -> int:
        """Rows that the KV cache holds at once.

        With pages in host memory many rows come on board in few sweeps, and so to their ends: when
        the first of them end, the mean row has grown for longer than half of its time.
        """
        rows, shared = self.rows_in(plan.total_kv_pages), self.shared_pages
        if not plan.host_kv_pages or rows <= 1:
            return rows
        prompt, output = self._tokens
        coming = min(rows, self._work.num_rows) * self._computed_tokens / plan.sweep_tokens
        grown = (prompt + output - min(coming, output) / 2) / PAGE_TOKENS + HALF_PAGE
        own = max(self.mean_pages, min(float(self.row_pages), grown)) - shared
        return max(1, int((plan.total_kv_pages - shared) / own + 1e-9))

    def estimated_job_s(self, plan: Plan) -> float:
        """Seconds of the job by the formula."""
        num_sweeps, load = self._mean_sweep(plan)
        pace = self._pace(plan, self._cost(plan.expand))
        travel = self._mean_travel(plan, load) if plan.host_kv_pages else STILL
        return num_sweeps * pace.sweep_s(load, travel=travel)[0]

    def predict(self, plan: Plan, cost: SweepCost | None = None) -> dict[str, Any]:
        """What a plan gives over the whole of the work.

        cost: of a sweep's computing, where that is known better than by the rates

        rows_on_board, rows_limited_by: "rows" (of the job), "kv" or "sweep"
        kv_rows: that the KV cache holds at once
        computed_prompt_tokens: of a row, in the mean
        sweep_used_tokens: mean tokens of a sweep
        host_kv_pages: KV pages in host memory that the mean sweep reads
        tokens_at_balance: T*, tokens at which computing catches up with what streams
        disk_s, link_s, compute_s: of the mean sweep: reading, copying to the device, computing;
            host_kv_s of link_s for KV pages, pass_s of compute_s whatever the tokens, token_s more
            for each
        sweep_s, num_sweeps, tokens_per_s (output), job_s
        limited_by: what most of the time is spent on, "compute", "disk" or "link"
        """
        cost = cost or self._cost(plan.expand)
        work, pace = self._work, self._pace(plan, cost)
        rows, rows_limited_by = self._rows_on_board(plan)
        board = Board(
            sweep_tokens=plan.sweep_tokens,
            max_rows=self._most_rows(plan),
            kv_pages=plan.kv_pages,
            page_tokens=self._page_tokens,
        )
        found = forecast(work, board, pace)
        mean, host_kv_s = _mean_load(found), pace.travel_s(found.travel) / found.num_sweeps
        streams = dict(pace.streams)
        if host_kv_s:
            streams["link"] += host_kv_s
        pass_s, compute_s = cost.compute_s(Load(0, 0, 0, 0)), cost.compute_s(mean)
        return {
            "rows_on_board": int(rows),
            "rows_limited_by": rows_limited_by,
            "kv_rows": self._kv_rows(plan),
            "host_kv_pages": round(found.travel.read / found.num_sweeps, 1),
            "computed_prompt_tokens": round(self._computed_tokens, 1),
            "sweep_used_tokens": round(mean.tokens, 1),
            "tokens_at_balance": round(_balance(cost, mean, max(streams.values())), 1),
            **{f"{name}_s": seconds for name, seconds in streams.items()},
            "host_kv_s": host_kv_s,
            "compute_s": compute_s,
            "pass_s": pass_s,
            "token_s": (compute_s - pass_s) / mean.tokens,
            "sweep_s": found.seconds / found.num_sweeps,
            "num_sweeps": round(found.num_sweeps, 1),
            "tokens_per_s": work.num_rows * work.output_tokens / found.seconds,
            "job_s": found.seconds,
            "limited_by": max(found.limited_s, key=lambda name: found.limited_s[name]),
        }

    def _cost(self, expand: bool) -> SweepCost:
        if expand not in self._costs:
            self._costs[expand] = SweepCost.of(self._sizes, self._rates, expand=expand)
        return self._costs[expand]

    def _pace(self, plan: Plan, cost: SweepCost) -> Pace:
        streams = {"disk": plan.disk_nbytes / self._rates.disk_nbytes_per_s}
        if self._rates.link_nbytes_per_s is not None:
            streams["link"] = plan.streamed_nbytes / self._rates.link_nbytes_per_s
        streamed = [
            layer.slot_nbytes
            for layer, stays in zip(self._sizes.layers, plan.resident, strict=True)
            if not stays
        ]
        shared = self.shared_pages
        own = self.row_pages - shared

        def kept(rows: int, sweeps_left: int) -> float:
            num_layers = layers_worth_keeping(
                num_pages=max(0, int(plan.kv_pages - rows * own - shared)),
                page_nbytes=self._sizes.page_nbytes,
                layer_nbytes=max(streamed),
                num_layers=len(streamed),
                sweeps_left=sweeps_left,
            )
            return num_layers * sum(streamed) / len(streamed) / plan.streamed_nbytes

        # Pages of a device's pool do not come free one by one.
        drains = bool(streamed) and self._rates.link_nbytes_per_s is None
        return Pace(
            cost=cost,
            streams=streams,
            host_page_s=self._host_page_s(plan),
            kept=kept if drains else None,
        )

    def _host_page_s(self, plan: Plan) -> float:
        """Seconds on the link of a KV page in host memory."""
        if not plan.host_kv_pages:
            return 0.0
        assert self._rates.link_nbytes_per_s is not None
        return self._sizes.page_nbytes / self._rates.link_nbytes_per_s

    def _mean_sweep(self, plan: Plan) -> tuple[float, Load]:
        """Number of sweeps by the formula, and what each carries then."""
        prompt, output = self._tokens
        computed = self._computed_tokens
        rows, _ = self._rows_on_board(plan)
        num_rows = self._work.num_rows
        num_sweeps = max(1.0, num_rows * output / rows + rows * computed / plan.sweep_tokens)
        share = num_rows / num_sweeps
        return num_sweeps, Load(
            tokens=share * (computed + output),
            decode_positions=share * output * (prompt + output / 2),
            prefill_positions=share * computed * (prompt - computed / 2),
            outputs=share * output,
        )

    def _mean_travel(self, plan: Plan, load: Load) -> Travel:
        rows, shared = load.outputs, self.shared_pages
        return Travel.beyond(
            plan.kv_pages,
            held=rows * (self._halfway_pages - shared) + shared,
            rows=rows,
            new_pages=(load.tokens - rows) / PAGE_TOKENS,
            closed=self._page_tokens > 1,
        )

    @property
    def _tokens(self) -> tuple[float, float]:
        return self._work.prompt_tokens, max(1.0, self._work.output_tokens)

    @property
    def _computed_tokens(self) -> float:
        work = self._work
        return max(min(1.0, work.prompt_tokens), work.prompt_tokens - work.reused_tokens)

    def _most_rows(self, plan: Plan) -> int:
        return max(1, min(self._kv_rows(plan), plan.max_rows))

    def _rows_on_board(self, plan: Plan) -> tuple[float, str]:
        _, output = self._tokens
        refilled = plan.sweep_tokens * output / max(1.0, self._computed_tokens + output)
        limits = {
            "rows": float(self._work.num_rows),
            "kv": float(self._kv_rows(plan)),
            "sweep": min(refilled, float(plan.max_rows)),
        }
        name = min(limits, key=lambda name: limits[name])
        return max(1.0, limits[name]), name


def _mean_load(found: Forecast) -> Load:
    sweeps = found.num_sweeps
    return Load(
        tokens=found.tokens / sweeps,
        decode_positions=found.decode_positions / sweeps,
        prefill_positions=found.prefill_positions / sweeps,
        outputs=found.outputs / sweeps,
    )


def _balance(cost: SweepCost, mean: Load, streaming_s: float) -> float:
    """Tokens of a sweep of the mean kind, scaled, that computes as long as it streams."""

    def compute_s(tokens: float) -> float:
        scale = tokens / mean.tokens
        positions = mean.decode_positions * scale, mean.prefill_positions * scale
        return cost.compute_s(Load(tokens, *positions, mean.outputs * scale))

    low, high = 0.0, 1.0
    while compute_s(high) < streaming_s and high < MAX_BALANCE:
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_s(middle) < streaming_s else (low, middle)
    return low
