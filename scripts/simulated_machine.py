"""A machine out of measured curves: what sweeps cost there, what memory it has, how it is planned.

A file of costs is JSON, all seconds and bytes:

    {"layers_s": [[96, 0.131], [2560, 0.703]],  computing of a sweep by its tokens
     "head_s": [[1, 0.0005], [96, 0.001]],      and by the rows that get a token; may be left out
     "decode_position_s": 0.0,                  more for each position that is attended to,
     "prefill_position_s": 0.0,                 by decoding rows, by prompts
     "link_nbytes_per_s": 5.52e10,              null: weights stream from the disk
     "disk_nbytes_per_s": 2e9,
     "device_nbytes": 2.5e10, "host_nbytes": 6.4e10,
     "fixed_nbytes": 1e9, "scratch_nbytes": 5e8,  of the device
     "scratch_token_nbytes": 6e4}                 more for each token of a sweep
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.costs import Curve, Rates, SweepCost
from engine.forecast import Pace
from engine.plan import FIXED_NBYTES, Budget, Plan
from engine.sizes import ModelSizes, Part

Points = tuple[tuple[float, float], ...]
NOTHING = ((0.0, 0.0),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Costs and memory of one model on one machine; fields as in the file."""

    layers_s: Points
    head_s: Points = NOTHING
    decode_position_s: float = 0.0
    prefill_position_s: float = 0.0
    link_nbytes_per_s: float | None = None
    disk_nbytes_per_s: float = 1e9
    device_nbytes: float = 8e9
    host_nbytes: float | None = None
    fixed_nbytes: float = FIXED_NBYTES
    scratch_nbytes: float = 0.0
    scratch_token_nbytes: float = 0.0

    @classmethod
    def read(cls, path: Path) -> Machine:
        """Raises ValueError: the file has something else; OSError."""
        values: dict[str, Any] = json.loads(path.read_text())
        values.pop("about", None)
        try:
            for name in {"layers_s", "head_s"} & values.keys():
                values[name] = tuple((float(amount), float(s)) for amount, s in values[name])
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"{path}: {error}; see python -m scripts.simulate --help") from error

    @property
    def cost(self) -> SweepCost:
        return SweepCost(
            layers=Curve(self.layers_s),
            head=Curve(self.head_s),
            decode_position_s=self.decode_position_s,
            prefill_position_s=self.prefill_position_s,
        )

    def pace(self, plan: Plan) -> Pace:
        """What sweeps of a plan take: what streams overlaps the computing."""
        streams = {"disk": plan.disk_nbytes / self.disk_nbytes_per_s}
        if self.link_nbytes_per_s is not None:
            streams["link"] = plan.streamed_nbytes / self.link_nbytes_per_s
        host_page_s = 0.0
        if plan.host_kv_pages:
            assert self.link_nbytes_per_s is not None
            host_page_s = plan.kv_nbytes / plan.kv_pages / self.link_nbytes_per_s
        return Pace(cost=self.cost, streams=streams, host_page_s=host_page_s)

    def budget(self, memory_nbytes: int | None, host_memory_nbytes: int | None = None) -> Budget:
        """Most of the device's memory, and of pinned memory, where less than all of it."""
        host_nbytes = self.host_nbytes
        if host_nbytes is not None:
            host_nbytes = round(min(host_nbytes, host_memory_nbytes or host_nbytes))

        def scratch_nbytes(num_tokens: int) -> int:
            return round(self.scratch_nbytes + self.scratch_token_nbytes * num_tokens)

        return Budget(
            device_nbytes=round(min(self.device_nbytes, memory_nbytes or self.device_nbytes)),
            host_nbytes=host_nbytes,
            fixed_nbytes=round(self.fixed_nbytes),
            scratch_nbytes=scratch_nbytes,
            embedding_in_host=host_nbytes is not None,
        )

    def rates(self, sizes: ModelSizes) -> Rates:
        """The same costs by weight, as a planner takes them."""
        head = sizes.head or sizes.embedding
        names = {name for part in (*sizes.layers, head) for name in part.values}
        layer_s = _scaled(self.layers_s, sizes.layers)
        num_layers = len(sizes.layers)
        return Rates(
            disk_nbytes_per_s=self.disk_nbytes_per_s,
            link_nbytes_per_s=self.link_nbytes_per_s,
            values_per_s={},
            flops_per_s=1.0,
            layer_s=dict.fromkeys(names, layer_s),
            head_s=_scaled(self.head_s, [head]),
            decode_position_s=self.decode_position_s / num_layers,
            prefill_position_s=self.prefill_position_s / num_layers,
        )


def _scaled(points: Points, parts: Sequence[Part]) -> Curve:
    num_values = sum(part.num_values for part in parts)
    return Curve(tuple((amount, seconds / num_values) for amount, seconds in points))
