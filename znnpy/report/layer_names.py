"""Name the layers that a choice of a plan computes."""

from __future__ import annotations

from znnpy.network import Network
from znnpy.planner.plan import Choice, Plan


def layer_name(plan: Plan, network: Network, choice: Choice) -> str:
    """Return the layers of a choice in words: those of a chain with their numbers, those of a graph by their nodes."""
    if plan.graph is not None:
        return plan.graph.nodes[1 + plan.by_node.index(choice)].name
    first, last = choice.layers
    return f"{first} {' + '.join(str(network.layers[layer]) for layer in range(first, last + 1))}"
