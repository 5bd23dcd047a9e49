"""Name the layers that a choice of a plan computes."""

from __future__ import annotations

from znnpy.network import Network
from znnpy.planner.plan import Choice, Plan


def layer_name(plan: Plan, network: Network, choice: Choice) -> str:
    """Return the layers of a choice in words: those of a chain with their numbers, those of a graph by their nodes."""
    first, last = choice.layers
    if plan.graph is not None:
        return plan.graph.nodes[first + 1].name
    return f"{first} {' + '.join(str(network.layers[layer]) for layer in range(first, last + 1))}"
