"""What a sweep's computing costs, estimated from the sweeps that were run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.costs import Curve, Load, SweepCost

_NUM_CAUSES = 4  # of a sweep's seconds: itself, its tokens, their positions, its outputs
MIN_SWEEPS = 8
_PAIRS = tuple(itertools.combinations_with_replacement(range(_NUM_CAUSES + 1), 2))


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over sweeps of the products of what each carried and took, of any two of them."""

    sums: tuple[float, ...] = (0.0,) * len(_PAIRS)

    @classmethod
    def of(cls, load: Load, compute_s: float) -> Moments:
        positions = load.decode_positions + load.prefill_positions
        amounts = (1.0, load.tokens, positions, load.outputs, compute_s)
        return cls(tuple(amounts[i] * amounts[j] for i, j in _PAIRS))

    def __add__(self, other: Moments) -> Moments:
        return Moments(tuple(a + b for a, b in zip(self.sums, other.sums, strict=True)))

    def __sub__(self, other: Moments) -> Moments:
        return Moments(tuple(a - b for a, b in zip(self.sums, other.sums, strict=True)))

    @property
    def num_sweeps(self) -> int:
        return round(self.sums[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedCost:
    """Seconds of any sweep, and more for each token, position attended to, and output."""

    fixed_s: float
    token_s: float
    position_s: float
    output_s: float

    @property
    def sweep_cost(self) -> SweepCost:
        return SweepCost(
            layers=Curve.line(self.fixed_s, self.token_s),
            head=Curve.line(0.0, self.output_s),
            decode_position_s=self.position_s,
            prefill_position_s=self.position_s,
        )


def fit(moments: Moments) -> FittedCost | None:
    """The costs, none of them negative, with the least squared error; None of too few sweeps."""
    if moments.num_sweeps < MIN_SWEEPS:
        return None
    products = np.zeros((_NUM_CAUSES + 1, _NUM_CAUSES + 1))
    for (i, j), value in zip(_PAIRS, moments.sums, strict=True):
        products[i, j] = products[j, i] = value
    scale = np.sqrt(np.maximum(np.diag(products), 1e-300))
    products /= np.outer(scale, scale)
    causes = range(_NUM_CAUSES)
    found = [
        _solved(products, chosen)
        for count in range(1, _NUM_CAUSES + 1)
        for chosen in itertools.combinations(causes, count)
    ]
    costs = min((f for f in found if min(f[1]) >= 0), key=lambda f: f[0])[1]
    fixed_s, token_s, position_s, output_s = (costs * scale[-1] / scale[:-1]).tolist()
    return FittedCost(fixed_s=fixed_s, token_s=token_s, position_s=position_s, output_s=output_s)


def _solved(products: np.ndarray, chosen: Sequence[int]) -> tuple[float, np.ndarray]:
    """Squared error and costs where only the chosen causes have any."""
    index = np.array(chosen)
    normal, target = products[np.ix_(index, index)], products[index, -1]
    part, *_ = np.linalg.lstsq(normal, target, rcond=1e-10)
    costs = np.zeros(_NUM_CAUSES)
    costs[index] = part
    error = products[-1, -1] - 2 * target @ part + part @ normal @ part
    return float(error), costs
