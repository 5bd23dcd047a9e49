"""Plans that test processes keep are those that the planner makes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.support.kept_plans import KeptPlans
from znnpy.costs.model import assumed_rates
from znnpy.machine import Limits, this_machine
from znnpy.planner import modes
from znnpy.planner.request import CostModel, PlanRequest, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from znnpy.network import Network


def test_only_equal_requests_of_the_same_planner_share_a_plan(
    tiny_network: Callable[..., Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, kept = this_machine(), KeptPlans()

    def request(**changes: object) -> PlanRequest:
        one = PlanRequest(tiny_network(), (4, 4, 6), Limits(2**30, 1), Target(machine, mode="cpu"), baseline=2**26)
        return replace(one, **changes)  # type: ignore[arg-type]

    costs = CostModel()
    first = kept.make_plan(request(), costs)
    assert first == modes.make_plan(request(), costs)
    assert kept.make_plan(request(), CostModel()) is first
    for changes in ({"output": (4, 4, 8)}, {"limits": Limits(2**29, 1)}, {"baseline": 2**25}, {"itemsize_out": 1}):
        found = kept.make_plan(request(**changes), costs)
        assert found == modes.make_plan(request(**changes), costs)
        assert found is not first
    for other in (
        CostModel({"cpu": assumed_rates(machine, 1).slowed(2.0)}),
        CostModel(table=tuple(primitive for primitive in costs.table if primitive.name != first.choices[0].primitive)),
    ):
        assert kept.make_plan(request(), other) == modes.make_plan(request(), other) != first
    monkeypatch.setattr(modes, "THRESHOLDS", modes.Thresholds(long_seconds=0.0))
    assert kept.make_plan(request(), costs) is not first
