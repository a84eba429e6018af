"""Which ways to divide memory a planner tries, and which are a decision away from one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.plan import Budget, Plan
from engine.requests import EngineConfig
from engine.sizes import ModelSizes

DEFAULT_SWEEP_TOKENS = 512
SWEEP_TOKENS_TRIED = (64, 128, 256, 512, 1024, 2048)
DEVICE_SWEEP_TOKENS_TRIED = (*SWEEP_TOKENS_TRIED, 1536, 2560, 3072, 4096)  # beside a host tier
LONG_SWEEP_TOKENS_TRIED = (5120, 6144, 8192)  # where KV pages travel, and sweeps take longer
HOST_KV_PARTS = 8  # steps in which host memory is given to KV pages


@dataclass(frozen=True, slots=True)
class Way:
    """One way to divide the memory. host_kv_pages: KV pages in host memory, if there is room"""

    expand: bool
    num_resident: int
    head_resident: bool
    sweep_tokens: int
    host_kv_pages: int = 0


def way_of(plan: Plan) -> Way:
    """The way that a plan follows."""
    return Way(
        plan.expand,
        sum(plan.resident),
        plan.head_resident,
        plan.sweep_tokens,
        plan.host_kv_pages,
    )


class Ways:
    """The ways that there are for a model and what was asked for."""

    def __init__(self, config: EngineConfig, sizes: ModelSizes, budget: Budget) -> None:
        self._config, self._sizes, self._budget = config, sizes, budget

    def all(self, fits: Callable[[Way], bool]) -> Iterator[Way]:
        """Everything resident where it fits; otherwise each number of resident layers.

        fits: whether a way does
        """
        asked = self._config.sweep_tokens
        sweeps = asked or DEFAULT_SWEEP_TOKENS
        num_layers = len(self._sizes.layers)
        whole = Way(False, num_layers, True, sweeps)
        expanded = Way(True, num_layers, True, sweeps)
        if self._config.expand == "always":
            smaller = [n for n in SWEEP_TOKENS_TRIED if n < sweeps] if asked is None else []
            yield from (replace(expanded, sweep_tokens=n) for n in (*smaller, sweeps))
            return
        if self._may_expand and fits(expanded):
            yield expanded
            return
        # More tokens at once fill a device better, not a few cores.
        one_will_do = not self._has_host_tier and fits(whole)
        settled = asked is not None or one_will_do
        tried: Sequence[int] = [sweeps] if settled else self._sweeps_tried
        for sweep_tokens in tried:
            yield from self.divisions(sweep_tokens)

    @property
    def _has_host_tier(self) -> bool:
        return self._budget.host_nbytes is not None

    @property
    def _sweeps_tried(self) -> Sequence[int]:
        return DEVICE_SWEEP_TOKENS_TRIED if self._has_host_tier else SWEEP_TOKENS_TRIED

    @property
    def _may_expand(self) -> bool:
        if self._config.expand != "auto" or self._has_host_tier:
            return False
        return self._sizes.expanded_nbytes <= self._budget.device_nbytes // 2

    def divisions(self, sweep_tokens: int) -> Iterator[Way]:
        """Each number of layers in the device's memory, with the head there and without."""
        for num_resident in range(len(self._sizes.layers) + 1):
            for head_resident in (True, False) if self._sizes.head else (True,):
                yield Way(False, num_resident, head_resident, sweep_tokens)

    def with_host_kv(self, most_pages: Callable[[Way], int]) -> Iterator[Way]:
        """Those with KV pages in host memory, too: a quarter of the most, and more of it.

        most_pages: that a way leaves room for; none where nothing streams to a device
        """
        asked = self._config.sweep_tokens
        tried = (*self._sweeps_tried, *LONG_SWEEP_TOKENS_TRIED) if asked is None else (asked,)
        for sweep_tokens in tried:
            for way in self.divisions(sweep_tokens):
                most = most_pages(way)
                sizes = {-(-most * part // HOST_KV_PARTS) for part in (2, 4, 6, 8)} - {0}
                yield from (replace(way, host_kv_pages=pages) for pages in sorted(sizes))

    def near(self, plan: Plan) -> list[Way]:
        """Those a planner may take that differ from a plan's in one decision; see `other_host_kv`.

        None where all of the weights fit, on a machine where that settles everything.
        """
        way = way_of(plan)
        if way.expand or not (plan.streams or self._has_host_tier):
            return []
        return [*self.other_layers(way), *self.other_heads(way), *self.other_sweeps(way)]

    def other_layers(self, way: Way) -> list[Way]:
        """A layer fewer and more in the device's memory, and an eighth of all fewer and more."""
        num_layers = len(self._sizes.layers)
        steps = sorted({1, max(1, num_layers // 8)})
        counts = [way.num_resident + sign * step for sign in (-1, 1) for step in steps]
        return [replace(way, num_resident=n) for n in counts if 0 <= n <= num_layers]

    def other_heads(self, way: Way) -> list[Way]:
        return [replace(way, head_resident=not way.head_resident)] if self._sizes.head else []

    def other_host_kv(self, way: Way, most_pages: int) -> list[Way]:
        """With an eighth or a quarter of the most KV pages in host memory more or less.

        most_pages: that the way leaves room for
        """
        step = -(-most_pages // HOST_KV_PARTS)
        sizes = {way.host_kv_pages + step * part for part in (-2, -1, 1, 2)}
        sizes = {min(pages, most_pages) for pages in sizes if pages > 0}
        return [replace(way, host_kv_pages=n) for n in sorted(sizes - {0, way.host_kv_pages})]

    def other_sweeps(self, way: Way) -> list[Way]:
        """As `neighbouring_sweeps`; none where they are asked for."""
        return [] if self._config.sweep_tokens is not None else self.neighbouring_sweeps(way)

    def neighbouring_sweeps(self, way: Way) -> list[Way]:
        """With the next smaller and the next larger sweeps that are ever tried."""
        tried = sorted(
            [*self._sweeps_tried, *(LONG_SWEEP_TOKENS_TRIED if way.host_kv_pages else ())]
        )
        smaller = [n for n in tried if n < way.sweep_tokens][-1:]
        larger = [n for n in tried if n > way.sweep_tokens][:1]
        return [replace(way, sweep_tokens=n) for n in (*smaller, *larger)]
