"""Where the engines of a job run, and what of its cores and memory each may use. Pure policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.requests import EngineConfig
from jobs.node_facts import NodeFacts
from jobs.records import JobError


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node of a Ray.

    name: for people
    num_cpus, num_gpus, store_nbytes: what Ray counts there; the last is its object store
    """

    id: str
    name: str
    num_cpus: int
    num_gpus: int
    store_nbytes: int
    facts: NodeFacts

    @property
    def num_cores(self) -> int:
        return min(self.num_cpus, self.facts.num_cores)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one engine runs.

    config: the job's, with this engine's share
    num_gpus: that it has to itself
    counts_machine: whether the energy of its machine is counted with it; once for each machine
    """

    node: Node
    config: EngineConfig
    num_gpus: int
    counts_machine: bool


def place_engines(
    nodes: Sequence[Node], config: EngineConfig, num_engines: int | None
) -> list[Place]:
    """The engines of a job whose device is settled.

    nodes: the first is used first
    num_engines: None is one for each GPU, or on CPUs one on each node

    Raises JobError: there is not so much, or a node lacks what the job needs.
    """
    device: Literal["cpu", "gpu"] = "gpu" if config.device == "gpu" else "cpu"
    chosen = _on_gpus(nodes, num_engines) if device == "gpu" else _on_cpus(nodes, num_engines)
    lacking = [node for node in dict.fromkeys(chosen) if node.facts.problem]
    if lacking:
        told = "; ".join(f"{node.name}: {node.facts.problem}" for node in lacking)
        raise JobError(f"the job cannot run on each machine that it is to use; {told}")
    num_on = Counter(node.id for node in chosen)
    machines: set[str] = set()
    places = []
    for node in chosen:
        places.append(
            Place(
                node=node,
                config=_settled(config, num_on[node.id], node),
                num_gpus=int(device == "gpu"),
                counts_machine=node.facts.machine not in machines,
            )
        )
        machines.add(node.facts.machine)
    return places


def _on_gpus(nodes: Sequence[Node], num_engines: int | None) -> list[Node]:
    gpus = [node for node in nodes for _ in range(node.num_gpus)]
    if num_engines is not None and num_engines > len(gpus):
        raise JobError(
            f"--engines {num_engines} asks for as many GPUs, and there are {len(gpus)} "
            f"({_counts(nodes, 'num_gpus')}); lower --engines"
        )
    return gpus[:num_engines]


def _on_cpus(nodes: Sequence[Node], num_engines: int | None) -> list[Node]:
    """One after the other, where the most cores are left for each."""
    usable = [node for node in nodes if node.num_cores]
    if num_engines is None:
        return usable
    cores = sum(node.num_cores for node in usable)
    if num_engines > cores:
        raise JobError(
            f"--engines {num_engines} asks for as many cores, and there are {cores} "
            f"({_counts(nodes, 'num_cores')}); lower --engines"
        )
    num_on: Counter[str] = Counter()
    for _ in range(num_engines):
        num_on[max(usable, key=lambda node: node.num_cores / (num_on[node.id] + 1)).id] += 1
    return [node for node in usable for _ in range(num_on[node.id])]


def _counts(nodes: Sequence[Node], of: Literal["num_gpus", "num_cores"]) -> str:
    return ", ".join(f"{getattr(node, of)} on {node.name}" for node in nodes)


def _settled(config: EngineConfig, num_engines: int, node: Node) -> EngineConfig:
    cores = config.num_threads or node.num_cores
    if cores > node.num_cores:
        raise JobError(
            f"the engines are to use {cores} cores of {node.name}, and Ray lets them use "
            f"{node.num_cores}; lower --threads"
        )
    if num_engines > cores:
        raise JobError(
            f"{num_engines} engines on {node.name} are to share {cores} cores; lower --engines or "
            "raise --threads"
        )
    return share_of(
        replace(config, num_threads=cores),
        num_engines,
        free_nbytes=node.facts.free_nbytes,
        host_nbytes=max(0, node.facts.host_nbytes - node.store_nbytes),
    )


def share_of(
    config: EngineConfig, num_engines: int, *, free_nbytes: int, host_nbytes: int
) -> EngineConfig:
    """The configuration of one of some engines on one machine, which together take as much as one.

    config: its device and num_threads are settled
    free_nbytes: memory that they may share where the configuration names none
    host_nbytes: most that they may pin beside GPUs, each of which has memory of its own
    """
    assert config.num_threads is not None
    num_threads = config.num_threads // num_engines
    if config.device == "gpu":
        most = min(host_nbytes, config.host_memory_nbytes or host_nbytes)
        if num_engines > 1:
            most = min(most, free_nbytes) // num_engines
        return replace(config, num_threads=num_threads, host_memory_nbytes=most)
    if num_engines == 1:
        return config

    def part(nbytes: int | None) -> int | None:
        return None if nbytes is None else nbytes // num_engines

    return replace(
        config,
        num_threads=num_threads,
        memory_nbytes=part(config.memory_nbytes or free_nbytes),
        kv_memory_nbytes=part(config.kv_memory_nbytes),
        ring_nbytes=part(config.ring_nbytes),
    )
