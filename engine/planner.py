"""Decisions about memory and sweeps, as pure functions of sizes, rates and the work to do.

A sweep takes max(S / W, D + c·tokens): S bytes streamed over W bytes/s, D seconds that a pass
over all weights costs whatever the tokens, c seconds of products per token. Rows on board are
limited by KV memory, so where the model does not fit, every number of resident layers and every
sweep budget is tried, and the pair with the shortest predicted job wins.

The number of sweeps: R rows of p prompt and o output tokens, r of them on board. A row is on board
for o sweeps, so R·o / r sweeps; r·p / S more, S tokens a sweep, until the last of the first r rows
has come on board. S tokens a sweep bring no more than S·o / (p + o) rows on board.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.hparams import Hparams
from engine.kv_cache import pages_for
from engine.placement import spread
from engine.requests import EngineConfig, MemoryBudgetError

DEFAULT_SWEEP_TOKENS = 512
SWEEP_TOKENS_TRIED = (64, 128, 256, 512, 1024, 2048)
DEFAULT_KV_NBYTES = 8 << 30  # more rows than this holds fill no core any further
RING_PARCELS = 4  # of the largest size: one in use, the others coming
FIXED_NBYTES = 48 << 20  # stacks, Python objects, scratch of the workers
AS_GOOD = 1.02  # times the shortest time: what a prediction cannot tell apart
EXPANDED = "expanded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A layer, the head or the embedding.

    stored_nbytes: as the file has it
    slot_nbytes: of its place in the ring, alignment included
    values: number of weights by type name
    """

    stored_nbytes: int
    slot_nbytes: int
    values: Mapping[str, int]

    @property
    def num_values(self) -> int:
        return sum(self.values.values())

    @property
    def expanded_nbytes(self) -> int:
        return 4 * self.num_values


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """What a model takes. head: None where it is the embedding. page_nbytes: a KV page."""

    embedding: Part
    layers: tuple[Part, ...]
    head: Part | None
    vectors_nbytes: int
    page_nbytes: int

    @property
    def stored_nbytes(self) -> int:
        parts = [self.embedding, *self.layers, *([self.head] if self.head else [])]
        return self.vectors_nbytes + sum(part.stored_nbytes for part in parts)

    @property
    def expanded_nbytes(self) -> int:
        """Layers and head as float32; a separate embedding stays as it is."""
        products = [*self.layers, self.head or self.embedding]
        separate = self.embedding.stored_nbytes if self.head else 0
        return self.vectors_nbytes + separate + sum(part.expanded_nbytes for part in products)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What the machine does, measured.

    disk_nbytes_per_s: reads of model files
    values_per_s: weights that one pass takes, whatever the tokens, by type name; "expanded" too
    flops_per_s: of products of many tokens
    """

    disk_nbytes_per_s: float
    values_per_s: Mapping[str, float]
    flops_per_s: float


# A slow laptop's; only the choice between plans depends on them, and a probe replaces them.
DEFAULT_RATES = Rates(disk_nbytes_per_s=1e9, values_per_s={}, flops_per_s=1e11)
_DEFAULT_VALUES_PER_S = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The rows to run: their number, and mean tokens of prompts and outputs."""

    num_rows: int = 1000
    prompt_tokens: float = 256.0
    output_tokens: float = 128.0


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
        """A letter for each layer, then one for the head: r resident, h in host memory, d on disk."""
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
        enough = AS_GOOD * min(plan.predicted["job_s"] for plan in plans)
        good = [plan for plan in plans if plan.predicted["job_s"] <= enough]
        return min(good, key=lambda plan: (plan.streamed_nbytes, plan.predicted["job_s"]))

    def predicted(self, plan: Plan) -> Plan:
        """A plan made otherwise, with the predictions of these rates and this workload."""
        return replace(plan, predicted=self._predict(plan))

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
        plan = Plan(
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
        return self.predicted(plan)

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

    def _predict(self, plan: Plan) -> dict[str, Any]:
        """What a plan gives over the whole of the workload.

        rows_on_board, rows_limited_by: "rows" (of the job), "kv" or "sweep"
        sweep_used_tokens: mean tokens of a sweep
        tokens_at_balance: T*, tokens at which computing catches up with the link
        disk_s, pass_s, token_s: of one sweep: reading, a pass over the weights, products per token
        sweep_s, num_sweeps, tokens_per_s (output), job_s, limited_by
        """
        work = self._workload
        rows, rows_limited_by = self._rows_on_board(plan)
        ramp = rows * work.prompt_tokens / plan.sweep_tokens
        num_sweeps = max(1.0, work.num_rows * max(1.0, work.output_tokens) / rows + ramp)
        used = work.num_rows * (work.prompt_tokens + work.output_tokens) / num_sweeps
        disk_s = plan.streamed_nbytes / self._rates.disk_nbytes_per_s
        pass_s, token_s = self._compute_s(plan.expand)
        sweep_s = max(disk_s, pass_s + token_s * used)
        job_s = num_sweeps * sweep_s
        balance = max(0.0, (disk_s - pass_s) / token_s) if disk_s else 0.0
        return {
            "rows_on_board": int(rows),
            "rows_limited_by": rows_limited_by,
            "sweep_used_tokens": round(used, 1),
            "tokens_at_balance": round(balance, 1),
            "disk_s": disk_s,
            "pass_s": pass_s,
            "token_s": token_s,
            "sweep_s": sweep_s,
            "num_sweeps": round(num_sweeps, 1),
            "tokens_per_s": work.num_rows * work.output_tokens / job_s,
            "job_s": job_s,
            "limited_by": "disk" if disk_s > pass_s + token_s * used else "compute",
        }

    def _rows_on_board(self, plan: Plan) -> tuple[float, str]:
        work = self._workload
        row_tokens = max(1.0, work.prompt_tokens + work.output_tokens)
        row_pages = pages_for(math.ceil(row_tokens))
        refilled = plan.sweep_tokens * max(1.0, work.output_tokens) / row_tokens
        limits = {
            "rows": float(work.num_rows),
            "kv": float(plan.kv_pages // row_pages),
            "sweep": refilled,
        }
        name = min(limits, key=lambda name: limits[name])
        return max(1.0, limits[name]), name

    def _compute_s(self, expand: bool) -> tuple[float, float]:
        """Seconds of a pass over all weights, and of the products per token."""
        products = [*self._sizes.layers, self._sizes.head or self._sizes.embedding]
        values: dict[str, int] = {}
        for part in products:
            for name, count in part.values.items():
                key = EXPANDED if expand else name
                values[key] = values.get(key, 0) + count
        rates = self._rates.values_per_s
        pass_s = sum(n / rates.get(name, _DEFAULT_VALUES_PER_S) for name, n in values.items())
        return pass_s, 2 * sum(values.values()) / self._rates.flops_per_s

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
