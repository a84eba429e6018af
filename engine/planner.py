"""Decisions about memory and sweeps, as pure functions of sizes, rates and the work to do.

A sweep takes max(S / W, C): S bytes streamed over W bytes/s, C seconds of computing, a pass over
all weights and more for each token. Rows on board are limited by KV memory, so where the model
does not fit, every number of resident layers and every sweep budget is tried, and the pair with
the shortest job wins.

Plans are compared by a formula, and the job of the best is then run through in numbers. The
formula: R rows of p prompt and o output tokens, r of them on board. A row is on board for o
sweeps, so R·o / r sweeps; r·p / S more, S tokens a sweep, until the last of the first r rows has
come on board. S tokens a sweep bring no more than S·o / (p + o) rows on board.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.costs import DEFAULT_RATES, Load, Rates, SweepCost
from engine.drain import layers_worth_keeping
from engine.forecast import Board, Forecast, Pace, Workload, forecast
from engine.hparams import Hparams
from engine.kv_cache import pages_for
from engine.placement import spread
from engine.requests import EngineConfig, MemoryBudgetError
from engine.sizes import ModelSizes, Part

__all__ = [
    "DEFAULT_RATES",
    "FIXED_NBYTES",
    "ModelSizes",
    "Part",
    "Plan",
    "Planner",
    "Rates",
    "Workload",
]

DEFAULT_SWEEP_TOKENS = 512
SWEEP_TOKENS_TRIED = (64, 128, 256, 512, 1024, 2048)
DEFAULT_KV_NBYTES = 8 << 30  # more rows than this holds fill no core any further
RING_PARCELS = 4  # of the largest size: one in use, the others coming
FIXED_NBYTES = 48 << 20  # stacks, Python objects, scratch of the workers
MAX_BALANCE = 1 << 20  # tokens, where computing never catches up
AS_GOOD = 1.02  # times the shortest time: what a prediction cannot tell apart


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How an engine divides its memory, and what that should give.

    expand: resident weights kept expanded in the product's layout
    resident: for each layer, whether it stays in the device's memory; head_resident: the head
    host: for each layer, whether it streams from pinned host memory; empty: none does. What is
        neither resident nor there streams from disk. head_in_host: the head
    weights_nbytes, ring_nbytes, activations_nbytes, kv_pages, kv_nbytes: where device memory goes
    host_nbytes: pinned host memory, with what disk reads are staged through
    sweep_tokens: most tokens of a sweep
    max_rows: most rows on board
    streamed_nbytes: bytes that come into the ring in each sweep; disk_nbytes: those off the disk
    predicted: figures by name; see `Planner`
    """

    expand: bool
    resident: tuple[bool, ...]
    head_resident: bool
    weights_nbytes: int
    ring_nbytes: int
    activations_nbytes: int
    kv_pages: int
    kv_nbytes: int
    sweep_tokens: int
    max_rows: int
    streamed_nbytes: int
    disk_nbytes: int
    host: tuple[bool, ...] = ()
    head_in_host: bool = False
    host_nbytes: int = 0
    predicted: Mapping[str, Any] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        return self.streamed_nbytes > 0

    @property
    def placement(self) -> str:
        """A letter for each layer, then for the head: r resident, h in host memory, d on disk."""
        resident = (*self.resident, self.head_resident)
        host = (*(self.host or (False,) * len(self.resident)), self.head_in_host)
        letters = [
            "r" if stays else "h" if near else "d"
            for stays, near in zip(resident, host, strict=True)
        ]
        return "".join(letters[:-1]) + " " + letters[-1]

    def record(self) -> dict[str, Any]:
        """The plan without its predictions, as plain JSON values."""
        num_resident = sum(self.resident)
        return {
            "expand": self.expand,
            "layers": len(self.resident),
            "resident_layers": num_resident,
            "head_resident": self.head_resident,
            "streamed_parcels": len(self.resident) - num_resident + (not self.head_resident),
            "placement": self.placement,
            "weights_nbytes": self.weights_nbytes,
            "ring_nbytes": self.ring_nbytes,
            "activations_nbytes": self.activations_nbytes,
            "kv_pages": self.kv_pages,
            "kv_nbytes": self.kv_nbytes,
            "host_nbytes": self.host_nbytes,
            "sweep_tokens": self.sweep_tokens,
            "max_rows": self.max_rows,
            "streamed_nbytes": self.streamed_nbytes,
            "disk_nbytes": self.disk_nbytes,
        }


def activations_nbytes(hparams: Hparams, sweep_tokens: int) -> int:
    """Bytes of the work buffers of a sweep, logits of one token per row included."""
    q = hparams.num_heads * hparams.key_length
    kv = hparams.num_kv_heads * (hparams.key_length + hparams.value_length)
    attention = hparams.num_heads * hparams.value_length
    width = 3 * hparams.hidden + 2 * q + kv + attention + 3 * hparams.ffn + hparams.vocab_size
    return 4 * sweep_tokens * width


@dataclass(frozen=True, slots=True)
class _Try:
    """One way to divide the memory."""

    expand: bool
    num_resident: int
    head_resident: bool
    sweep_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Need:
    """The least bytes that one way takes."""

    weights: int
    ring: int
    work: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.ring + self.work + self.kv


class Planner:
    """Tries ways to divide `free_nbytes` and predicts what each gives."""

    def __init__(
        self,
        hparams: Hparams,
        config: EngineConfig,
        sizes: ModelSizes,
        *,
        free_nbytes: int,
        rates: Rates = DEFAULT_RATES,
        workload: Workload | None = None,
    ) -> None:
        self._hparams = hparams
        self._config = config
        self._sizes = sizes
        self._free_nbytes = free_nbytes
        self._rates = rates
        self._workload = workload or Workload()
        self._costs: dict[bool, SweepCost] = {}
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
        plans = [plan for way in self._ways() if (plan := self._plan(way)) is not None]
        if not plans:
            raise MemoryBudgetError(self._refusal())
        job_s = [self.estimated_job_s(plan) for plan in plans]
        enough = AS_GOOD * min(job_s)
        good = [found for found in zip(plans, job_s, strict=True) if found[1] <= enough]
        best, _ = min(good, key=lambda found: (found[0].streamed_nbytes, found[1]))
        return self.predicted(best)

    def predicted(self, plan: Plan, cost: SweepCost | None = None) -> Plan:
        """A plan made otherwise, with the predictions of these rates and this workload.

        cost: of a sweep's computing, where that is known better than by the rates
        """
        return replace(plan, predicted=self._predict(plan, cost or self._cost(plan.expand)))

    def estimated_job_s(self, plan: Plan) -> float:
        """Seconds of the job by the formula that plans are compared by."""
        num_sweeps, load = self._mean_sweep(plan)
        return num_sweeps * self._pace(plan, self._cost(plan.expand)).sweep_s(load)[0]

    def _ways(self) -> Iterator[_Try]:
        """Everything resident where it fits; otherwise each number of resident layers."""
        sweeps_free = self._config.sweep_tokens is None
        sweeps = self._config.sweep_tokens or DEFAULT_SWEEP_TOKENS
        num_layers = len(self._sizes.layers)
        whole = _Try(False, num_layers, True, sweeps)
        expanded = _Try(True, num_layers, True, sweeps)
        if self._config.expand == "always":
            smaller = [n for n in SWEEP_TOKENS_TRIED if n < sweeps] if sweeps_free else []
            yield from (replace(expanded, sweep_tokens=n) for n in (*smaller, sweeps))
            return
        fits = self._sizes.expanded_nbytes <= self._free_nbytes // 2
        if self._config.expand == "auto" and fits and self._plan(expanded) is not None:
            yield expanded
            return
        tried: Sequence[int] = SWEEP_TOKENS_TRIED
        if not sweeps_free or self._plan(whole) is not None:
            tried = [sweeps]
        for sweep_tokens in tried:
            yield from self._divisions(sweep_tokens)

    def _divisions(self, sweep_tokens: int) -> Iterator[_Try]:
        for num_resident in range(len(self._sizes.layers) + 1):
            for head_resident in (True, False) if self._sizes.head else (True,):
                yield _Try(False, num_resident, head_resident, sweep_tokens)

    def _plan(self, way: _Try) -> Plan | None:
        """The plan of one way, or None where it does not fit."""
        page_nbytes = self._sizes.page_nbytes
        need = self._need(way)
        if need is None or need.total > self._free_nbytes:
            return None
        kv_nbytes = self._config.kv_memory_nbytes
        if kv_nbytes is None:
            left_nbytes = self._free_nbytes - need.total + need.kv
            # Without a budget of our own we leave half of what is free to others.
            share = left_nbytes if self._config.memory_nbytes else left_nbytes // 2
            kv_nbytes = max(page_nbytes, min(share, DEFAULT_KV_NBYTES))
        most_pages = way.sweep_tokens * pages_for(self._hparams.context_length)
        kv_pages = min(kv_nbytes // page_nbytes, most_pages)
        streamed_nbytes = sum(part.slot_nbytes for part in self._streamed(way))
        return Plan(
            expand=way.expand,
            resident=spread(way.num_resident, len(self._sizes.layers)),
            head_resident=way.head_resident,
            weights_nbytes=need.weights,
            ring_nbytes=need.ring,
            activations_nbytes=need.work,
            kv_pages=kv_pages,
            kv_nbytes=kv_pages * page_nbytes,
            sweep_tokens=way.sweep_tokens,
            max_rows=way.sweep_tokens,
            streamed_nbytes=streamed_nbytes,
            disk_nbytes=streamed_nbytes,
        )

    def _need(self, way: _Try) -> _Need | None:
        """None where the ring that was asked for does not hold a parcel of it."""
        streamed = self._streamed(way)
        ring_nbytes = self._ring_nbytes(streamed)
        if streamed and ring_nbytes < max(part.slot_nbytes for part in streamed):
            return None
        return _Need(
            weights=self._weights_nbytes(way),
            ring=ring_nbytes,
            work=activations_nbytes(self._hparams, way.sweep_tokens) + FIXED_NBYTES,
            kv=self._config.kv_memory_nbytes or self._sizes.page_nbytes,
        )

    def _weights_nbytes(self, way: _Try) -> int:
        sizes, resident = self._sizes, spread(way.num_resident, len(self._sizes.layers))
        if way.expand:
            return sizes.expanded_nbytes
        kept = [part for part, stays in zip(sizes.layers, resident, strict=True) if stays]
        if sizes.head is not None and way.head_resident:
            kept.append(sizes.head)
        fixed = sizes.vectors_nbytes + sizes.embedding.stored_nbytes
        return fixed + sum(part.stored_nbytes for part in kept)

    def _streamed(self, way: _Try) -> list[Part]:
        if way.expand:
            return []
        resident = spread(way.num_resident, len(self._sizes.layers))
        layers = zip(self._sizes.layers, resident, strict=True)
        parts = [part for part, stays in layers if not stays]
        if self._sizes.head is not None and not way.head_resident:
            parts.append(self._sizes.head)
        return parts

    def _ring_nbytes(self, streamed: list[Part]) -> int:
        if not streamed:
            return 0
        if self._config.ring_nbytes is not None:
            return self._config.ring_nbytes
        largest = max(part.slot_nbytes for part in streamed)
        return min(RING_PARCELS, len(streamed) + 1) * largest

    def _predict(self, plan: Plan, cost: SweepCost) -> dict[str, Any]:
        """What a plan gives over the whole of the workload.

        rows_on_board, rows_limited_by: "rows" (of the job), "kv" or "sweep"
        sweep_used_tokens: mean tokens of a sweep
        tokens_at_balance: T*, tokens at which computing catches up with what streams
        disk_s, compute_s: of the mean sweep: reading, computing; pass_s of that whatever the
            tokens, token_s more for each
        sweep_s, num_sweeps, tokens_per_s (output), job_s
        limited_by: what most of the time is spent on, "compute" or "disk"
        """
        work, pace = self._workload, self._pace(plan, cost)
        rows, rows_limited_by = self._rows_on_board(plan)
        board = Board(sweep_tokens=plan.sweep_tokens, max_rows=self._most_rows(plan))
        found = forecast(work, board, pace)
        mean = _mean_load(found)
        pass_s, compute_s = cost.compute_s(Load(0, 0, 0, 0)), cost.compute_s(mean)
        return {
            "rows_on_board": int(rows),
            "rows_limited_by": rows_limited_by,
            "sweep_used_tokens": round(mean.tokens, 1),
            "tokens_at_balance": round(_balance(cost, mean, max(pace.streams.values())), 1),
            **{f"{name}_s": seconds for name, seconds in pace.streams.items()},
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
        streamed = [
            layer.slot_nbytes
            for layer, stays in zip(self._sizes.layers, plan.resident, strict=True)
            if not stays
        ]
        row_pages = self._row_pages

        def kept(rows: int, sweeps_left: int) -> float:
            num_layers = layers_worth_keeping(
                num_pages=max(0, plan.kv_pages - rows * row_pages),
                page_nbytes=self._sizes.page_nbytes,
                layer_nbytes=max(streamed),
                num_layers=len(streamed),
                sweeps_left=sweeps_left,
            )
            return num_layers * sum(streamed) / len(streamed) / plan.streamed_nbytes

        return Pace(cost=cost, streams=streams, kept=kept if streamed else None)

    def _mean_sweep(self, plan: Plan) -> tuple[float, Load]:
        """Number of sweeps by the formula, and what each carries then."""
        work = self._workload
        prompt, output = work.prompt_tokens, max(1.0, work.output_tokens)
        rows, _ = self._rows_on_board(plan)
        num_sweeps = max(1.0, work.num_rows * output / rows + rows * prompt / plan.sweep_tokens)
        share = work.num_rows / num_sweeps
        return num_sweeps, Load(
            tokens=share * (prompt + output),
            decode_positions=share * output * (prompt + output / 2),
            prefill_positions=share * prompt * prompt / 2,
            outputs=share * output,
        )

    @property
    def _row_pages(self) -> int:
        work = self._workload
        return max(1, pages_for(work.whole_prompt + work.whole_output - 1))

    def _most_rows(self, plan: Plan) -> int:
        return max(1, min(plan.kv_pages // self._row_pages, plan.max_rows))

    def _rows_on_board(self, plan: Plan) -> tuple[float, str]:
        work = self._workload
        row_tokens = max(1.0, work.prompt_tokens + work.output_tokens)
        refilled = plan.sweep_tokens * max(1.0, work.output_tokens) / row_tokens
        limits = {
            "rows": float(work.num_rows),
            "kv": float(plan.kv_pages // self._row_pages),
            "sweep": min(refilled, float(plan.max_rows)),
        }
        name = min(limits, key=lambda name: limits[name])
        return max(1.0, limits[name]), name

    def _refusal(self) -> str:
        """What was asked, what there is, and the smallest that works."""
        config, page_nbytes = self._config, self._sizes.page_nbytes
        sweep_tokens = config.sweep_tokens or SWEEP_TOKENS_TRIED[0]
        ways = [_Try(True, len(self._sizes.layers), True, sweep_tokens)]
        if config.expand != "always":
            ways = list(self._divisions(sweep_tokens))
        needs = [need for way in ways if (need := self._need(way)) is not None]
        need = min(needs, key=lambda need: need.total)
        given = config.memory_nbytes is not None and config.memory_nbytes <= self._free_nbytes
        kv = "asked for" if config.kv_memory_nbytes else "one page"
        return (
            f"{'the memory budget is' if given else 'free memory is'} {self._free_nbytes:,} bytes; "
            f"the smallest that works here is {need.total:,}: weights that must stay "
            f"{need.weights:,}, ring {need.ring:,}, work buffers of {sweep_tokens} tokens "
            f"{need.work:,}, KV cache {need.kv:,} ({kv}; a page takes {page_nbytes:,}); "
            f"{'raise --memory' if given else 'free some'}, or lower --kv-memory, --ring-memory or "
            "--sweep-tokens"
        )


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
