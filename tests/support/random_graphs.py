"""Strategies of small graphs of every layer, which become simpler when a test fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from hypothesis import HealthCheck, reject
from hypothesis import strategies as st

from tests.support.seeded_graphs import FAMILIES, Family, random_network
from znnpy.errors import ShapeError
from znnpy.lattices import check_meets
from znnpy.network import Network
from znnpy.shapes import Vec3

Draw = Callable[[st.SearchStrategy[Any]], Any]
SLOW = (HealthCheck.too_slow, HealthCheck.filter_too_much)  # a few graphs in ten suit some size of a volume


def sizes(least: int, most: int) -> st.SearchStrategy[Vec3]:
    return st.tuples(*[st.integers(least, most)] * 3)


@st.composite
def graphs(draw: Draw) -> Network:
    """Return a random graph, which some size of a volume suits."""
    rng: Random = draw(st.randoms(use_true_random=False))
    families: Sequence[Family] = draw(st.sampled_from((FAMILIES, ("any",), ("any",))))
    network = random_network(rng, "random", families)
    try:
        check_meets(network)
    except ShapeError:
        reject()
    return network
