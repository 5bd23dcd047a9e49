"""Plans of primitives with made-up costs, that tests of the planner ask for by name."""

from __future__ import annotations

import pytest

from tests.support.fake_plans import MIXED, WIDE, in_parts, patches, walking
from znnpy.network import Network
from znnpy.planner.run_plan import RunPlan


@pytest.fixture(scope="module")
def network() -> Network:
    """Return a network with one layer of every kind."""
    return MIXED


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    """Return a plan of `network` that computes one patch."""
    return patches()


@pytest.fixture(scope="module")
def column() -> RunPlan:
    """Return a plan of `network` with columns along y."""
    return walking()


@pytest.fixture(scope="module")
def wide() -> Network:
    """Return a network that has more maps behind its pooling than before."""
    return WIDE


@pytest.fixture(scope="module")
def split() -> RunPlan:
    """Return a plan of `wide` that computes the fragments one by one."""
    return in_parts()
