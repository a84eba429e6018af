"""What a sweep costs: from what a machine was measured to do, or from sweeps that it has done."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.sizes import ModelSizes, Part

EXPANDED = "expanded"


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by amount: straight between its points, flat before the first, straight on after.

    After the last it is no flatter than on the whole way there: a disturbed measurement must not
    make more work cost nothing.

    points: (amount, seconds), amounts ascending
    """

    points: tuple[tuple[float, float], ...]

    @classmethod
    def line(cls, fixed_s: float, each_s: float) -> Curve:
        return cls(((0.0, fixed_s), (1.0, fixed_s + each_s)))

    def at(self, amount: float) -> float:
        points = self.points
        if amount <= points[0][0] or len(points) == 1:
            return points[0][1]
        if amount > points[-1][0]:
            return max(self._onward(points[-2], amount), self._onward(points[0], amount))
        index = min(bisect_right(points, (amount,)), len(points) - 1)
        (x0, y0), (x1, y1) = points[index - 1], points[index]
        return max(0.0, y0 + (y1 - y0) * (amount - x0) / (x1 - x0))

    def _onward(self, earlier: tuple[float, float], amount: float) -> float:
        """On the line from an earlier point through the last."""
        (x0, y0), (x1, y1) = earlier, self.points[-1]
        return max(0.0, y1 + (y1 - y0) * (amount - x1) / (x1 - x0))

    @classmethod
    def total(cls, scaled: Sequence[tuple[Curve, float]]) -> Curve:
        """The sum of curves, each times a number."""
        amounts = sorted({x for curve, _ in scaled for x, _ in curve.points})
        return cls(tuple((x, sum(n * curve.at(x) for curve, n in scaled)) for x in amounts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What the machine does, measured. What has a default costs nothing where it is left out.

    disk_nbytes_per_s: reads of model files
    link_nbytes_per_s: copies from host memory to the device; None where they are the same
    values_per_s: weights that one pass takes, whatever the tokens, by type name; "expanded" too
    default_values_per_s: of types that are not named
    flops_per_s: of products of many tokens
    layer_s: by type name, seconds per weight of a layer by tokens: products and what goes with
        them; of a type that is not here, values_per_s and flops_per_s tell
    head_s: seconds per weight of the head by rows; without it, as if a layer's
    decode_position_s, prefill_position_s: per layer, and position that a token attends to
    choice_s: per row whose next token is chosen
    tile_tokens: tokens are computed in tiles of so many, whole ones
    """

    disk_nbytes_per_s: float
    values_per_s: Mapping[str, float]
    flops_per_s: float
    default_values_per_s: float = 1e9
    link_nbytes_per_s: float | None = None
    layer_s: Mapping[str, Curve] = field(default_factory=dict)
    head_s: Curve | None = None
    decode_position_s: float = 0.0
    prefill_position_s: float = 0.0
    choice_s: float = 0.0
    tile_tokens: int = 1

    def per_value(self, type_name: str) -> Curve:
        """Seconds per weight of a type, by tokens."""
        if type_name in self.layer_s:
            return self.layer_s[type_name]
        pass_s = 1 / self.values_per_s.get(type_name, self.default_values_per_s)
        return Curve.line(pass_s, 2 / self.flops_per_s)


# Of a slow laptop, and of a small GPU; a probe replaces them where more than a choice between
# plans depends on them.
DEFAULT_RATES = Rates(disk_nbytes_per_s=1e9, values_per_s={}, flops_per_s=1e11)
DEFAULT_DEVICE_RATES = Rates(
    disk_nbytes_per_s=1e9,
    values_per_s={},
    default_values_per_s=1e12,
    flops_per_s=3e13,
    link_nbytes_per_s=1.2e10,
    tile_tokens=256,
)


@dataclass(frozen=True, slots=True)
class Load:
    """What a sweep carries.

    tokens: of all rows
    decode_positions, prefill_positions: that these attend to, summed over the tokens
    outputs: rows whose next token is chosen
    """

    tokens: float
    decode_positions: float
    prefill_positions: float
    outputs: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepCost:
    """Seconds of computing in a sweep.

    layers: by tokens; head: by outputs, nothing without any
    decode_position_s, prefill_position_s: of all layers
    """

    layers: Curve
    head: Curve
    decode_position_s: float = 0.0
    prefill_position_s: float = 0.0
    tile_tokens: int = 1

    @classmethod
    def of(cls, sizes: ModelSizes, rates: Rates, *, expand: bool) -> SweepCost:
        """The cost by measured rates. expand: weights are kept expanded"""
        num_layers, head = len(sizes.layers), sizes.head or sizes.embedding
        if rates.head_s is not None:
            products = [(rates.head_s, float(head.num_values))]
        else:
            products = _scaled(rates, [head], expand)
        return cls(
            layers=Curve.total(_scaled(rates, sizes.layers, expand)),
            head=Curve.total([*products, (Curve.line(0.0, rates.choice_s), 1.0)]),
            decode_position_s=num_layers * rates.decode_position_s,
            prefill_position_s=num_layers * rates.prefill_position_s,
            tile_tokens=rates.tile_tokens,
        )

    def compute_s(self, load: Load) -> float:
        tile = self.tile_tokens
        tokens = load.tokens if tile == 1 else -(-load.tokens // tile) * tile
        positions_s = (
            load.decode_positions * self.decode_position_s
            + load.prefill_positions * self.prefill_position_s
        )
        head_s = self.head.at(load.outputs) if load.outputs else 0.0
        return self.layers.at(tokens) + head_s + positions_s


def _scaled(rates: Rates, parts: Iterable[Part], expand: bool) -> list[tuple[Curve, float]]:
    """A curve for each type of weights, and how many of them there are."""
    values: dict[str, int] = {}
    for name, count in itertools.chain.from_iterable(part.values.items() for part in parts):
        key = EXPANDED if expand else name
        values[key] = values.get(key, 0) + count
    return [(rates.per_value(name), float(count)) for name, count in values.items()]
