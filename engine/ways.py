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


@dataclass(frozen=True, slots=True)
class Way:
    """One way to divide the memory."""

    expand: bool
    num_resident: int
    head_resident: bool
    sweep_tokens: int


def way_of(plan: Plan) -> Way:
    """The way that a plan follows."""
    return Way(plan.expand, sum(plan.resident), plan.head_resident, plan.sweep_tokens)


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

    def near(self, plan: Plan) -> list[Way]:
        """Those a planner may take that differ from a plan's in one decision.

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

    def other_sweeps(self, way: Way) -> list[Way]:
        """As `neighbouring_sweeps`; none where they are asked for."""
        return [] if self._config.sweep_tokens is not None else self.neighbouring_sweeps(way)

    def neighbouring_sweeps(self, way: Way) -> list[Way]:
        """With the next smaller and the next larger sweeps that are ever tried."""
        tried = sorted(self._sweeps_tried)
        smaller = [n for n in tried if n < way.sweep_tokens][-1:]
        larger = [n for n in tried if n > way.sweep_tokens][:1]
        return [replace(way, sweep_tokens=n) for n in (*smaller, *larger)]
