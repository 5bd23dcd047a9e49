"""Plans that a test process keeps: who asks for the same plan again, of the same planner, gets it without a search."""

from __future__ import annotations

import pickle

from znnpy.kernels.table import IN_HOST_RAM, TABLE
from znnpy.planner import modes
from znnpy.planner.request import CostModel, PlanRequest
from znnpy.planner.run_plan import RunPlan

ASKED = "znnpy.measure.calibrate.make_plan"  # by runs and sessions; `KeptPlans.make_plan` takes its place
_make_plan = modes.make_plan


class KeptPlans:
    """Plans by all that they follow from."""

    def __init__(self) -> None:
        self._plans: dict[bytes, RunPlan] = {}
        self._planner = dict(vars(modes))

    def make_plan(self, request: PlanRequest, costs: CostModel) -> RunPlan:
        """Return what the planner returned for an equal request and equal costs, or a new plan.

        Nothing is kept of other primitives than znnpy's, nor where a test has changed the choice of the mode.
        """
        changed = any(found is not self._planner.get(name) for name, found in vars(modes).items())
        if changed or costs.table is not TABLE or costs.in_host_ram is not IN_HOST_RAM:
            return _make_plan(request, costs)
        key = pickle.dumps((request, dict(costs.rates)))
        if key not in self._plans:
            self._plans[key] = _make_plan(request, costs)
        return self._plans[key]


KEPT = KeptPlans()
