"""Plans of primitives with made-up costs, that tests of reports ask for by name."""

from __future__ import annotations

import pytest

from tests.support.fake_plans import MIXED, patches
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
