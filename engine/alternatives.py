"""Plans that a planner did not take: those that differ from its own in one decision, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.plan import Plan
from engine.planner import Planner
from engine.ways import Way, way_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A plan beside the chosen one.

    decision: "resident layers", "output head", "sweep tokens", "KV pages", "host KV pages",
        "weights" or "KV type"
    chosen, instead: what was decided, and what it is here
    plan: with its predictions; None where it does not fit
    refusal: why it does not fit, else empty
    is_asked: the decision is not the planner's, but that of who asked for it
    """

    decision: str
    chosen: str
    instead: str
    plan: Plan | None
    refusal: str = ""
    is_asked: bool = False


def alternatives(planner: Planner, plan: Plan) -> list[Alternative]:
    """What would become of a job if one decision of its plan were another.

    Other decisions follow: fewer layers leave more memory to the KV cache. The KV type is another
    planner's, since pages of it take other memory: see `of_kv_type`.
    """
    way, asked = way_of(plan), planner.config
    found = [
        _of_way(planner, plan, other, "resident layers", str(other.num_resident))
        for other in planner.ways.other_layers(replace(way, expand=False))
        if not plan.expand
    ]
    found += [
        _of_way(planner, plan, other, "output head", _head(other.head_resident))
        for other in planner.ways.other_heads(way)
        if not plan.expand
    ]
    found += [
        _of_way(planner, plan, other, "sweep tokens", f"{other.sweep_tokens}")
        for other in planner.ways.neighbouring_sweeps(way)
    ]
    found += _of_pages(planner, plan)
    found += _of_host_kv(planner, plan)
    other = replace(way, expand=not way.expand, num_resident=len(plan.resident), head_resident=True)
    kept_otherwise = _of_way(planner, plan, other, "weights", _weights(other.expand))
    if kept_otherwise.plan is None or planner.has_measured(expand=other.expand):
        found.append(kept_otherwise)
    settings = {
        "sweep tokens": asked.sweep_tokens is not None,
        "KV pages": asked.kv_memory_nbytes is not None,
        "weights": asked.expand != "auto",
    }
    return [replace(each, is_asked=settings.get(each.decision, False)) for each in found]


def of_kv_type(planner: Planner, plan: Plan, *, chosen: str, kv_type: str) -> Alternative:
    """The same way of dividing memory with another KV type. planner: one for that type"""
    other = _of_way(planner, plan, way_of(plan), "KV type", kv_type)
    return replace(other, chosen=chosen, is_asked=True)


def _of_way(planner: Planner, plan: Plan, way: Way, decision: str, instead: str) -> Alternative:
    values = {
        "resident layers": str(sum(plan.resident)),
        "output head": _head(plan.head_resident),
        "sweep tokens": str(plan.sweep_tokens),
        "host KV pages": f"{plan.host_kv_pages}",
        "weights": _weights(plan.expand),
    }
    found = planner.plan_of(way)
    return Alternative(
        decision=decision,
        chosen=values.get(decision, ""),
        instead=instead,
        plan=None if found is None else planner.predicted(found),
        refusal=planner.shortfall(way) if found is None else "",
    )


def _of_pages(planner: Planner, plan: Plan) -> Iterator[Alternative]:
    for pages in (plan.kv_pages // 2, 2 * plan.kv_pages):
        if pages:
            found, refusal = planner.with_pages(plan, pages)
            yield Alternative(
                decision="KV pages",
                chosen=f"{plan.kv_pages}",
                instead=f"{pages}",
                plan=found,
                refusal=refusal,
            )


def _of_host_kv(planner: Planner, plan: Plan) -> Iterator[Alternative]:
    """Of those without any, the best: how layers are placed depends on it all over."""
    if plan.host_kv_pages:
        yield Alternative(
            decision="host KV pages",
            chosen=f"{plan.host_kv_pages}",
            instead="none: KV on the device alone",
            plan=planner.best_on_device(),
        )
    for other in planner.other_host_kv(plan):
        yield _of_way(planner, plan, other, "host KV pages", f"{other.host_kv_pages}")


def _head(resident: bool) -> str:
    return "resident" if resident else "streamed"


def _weights(expand: bool) -> str:
    return "as float32" if expand else "as in the file"
