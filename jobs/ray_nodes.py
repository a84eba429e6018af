"""The nodes of the Ray that this process has joined, and what each has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jobs.engine_places import Node
from jobs.node_facts import Wanted, look_at_node
from jobs.records import JobError

LOOK_TIMEOUT_S = 60.0


def survey_nodes(wanted: Wanted) -> list[Node]:
    """The nodes of our Ray, this one first, and what each has.

    Raises JobError: one of them does not answer.
    """
    own_id = ray.get_runtime_context().get_node_id()
    found = sorted(
        (node for node in ray.nodes() if node["Alive"]),
        key=lambda node: (node["NodeID"] != own_id, node["NodeID"]),
    )
    look = ray.remote(num_cpus=0, max_retries=0)(look_at_node)
    asked = {
        node["NodeID"]: look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(wanted)
        for node in found
        if node["NodeID"] != own_id
    }
    nodes = []
    for node in found:
        node_id, resources = node["NodeID"], node["Resources"]
        name = _node_name(node)
        try:
            facts = ray.get(asked[node_id], timeout=LOOK_TIMEOUT_S) if node_id in asked else None
        except ray.exceptions.RayError as error:
            why = str(error).strip().partition("\n")[0]
            raise JobError(f"the node {name} cannot be used: {why}") from error
        nodes.append(
            Node(
                id=node_id,
                name=name,
                num_cpus=int(resources.get("CPU", 0)),
                num_gpus=int(resources.get("GPU", 0)),
                store_nbytes=int(resources.get("object_store_memory", 0)),
                facts=facts or look_at_node(wanted),
            )
        )
    return nodes


def _node_name(node: Mapping[str, Any]) -> str:
    """What people call a node of Ray: its host and address."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
