"""The choice of the mode: GPUs alone, the CPU alone, two stages on both, or both side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from znnpy.errors import NoPlanError
from znnpy.messages import option
from znnpy.option_values import OFFLOAD_MODES, Cover
from znnpy.planner.alternatives import idle, kind_of, offloaded_layers
from znnpy.planner.graph_plan import plan_graph
from znnpy.planner.multi_gpu import plan_on_devices
from znnpy.planner.offload import plan_offloaded
from znnpy.planner.request import CostModel, PlanRequest
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.side_by_side import plan_side_by_side


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The gains for which mode "auto" takes a plan of two devices, which nobody asked for.

    long_seconds  predicted seconds of a run on the GPU alone from which on other modes are planned
    offloaded, offloaded_assumed, side_by_side
                  the share of the GPU's predicted time within which such a run has to end. With offloaded layers, runs
                  took up to 1.5 times as long as predicted where these layers had not been timed, and up to 2.8 times
                  where the CPU's rates were assumed; the GPU alone took down to 0.35 times; side by side 0.99 to 1.16.
    """

    long_seconds: float = 60.0
    offloaded: float = 0.5
    offloaded_assumed: float = 0.3
    side_by_side: float = 0.8

    def accept(self, plan: RunPlan, alone: RunPlan) -> bool:
        """Return whether a plan gains enough over the plan of the GPU alone."""
        if plan.sharing is not None:
            return plan.seconds < self.side_by_side * alone.seconds and plan.cpu_items > 0
        known = all(choice.measured or choice.fitted for choice in plan.main.stages[0].choices)
        return plan.seconds < (self.offloaded if known else self.offloaded_assumed) * alone.seconds


THRESHOLDS = Thresholds()


def make_plan(request: PlanRequest, costs: CostModel | None = None, thresholds: Thresholds | None = None) -> RunPlan:
    """Return the fastest plan for a request in its mode, or in any mode where that is "auto".

    costs  None: every device is assumed from its machine

    With `request.kinds` the plan lists the modes that lost. NoPlanError: nothing fits, or the mode gains nothing.
    """
    best, lost = _best(request, costs or CostModel(), thresholds or THRESHOLDS)
    kinds = (kind_of(request.network, best, other, _scheme_of(other)) for other in lost) if request.kinds else ()
    return replace(best, alternatives=(*best.alternatives, *kinds))


def _best(request: PlanRequest, costs: CostModel, thresholds: Thresholds) -> tuple[RunPlan, list[RunPlan]]:
    """Return the best plan, and those of other modes that lost."""
    mode = request.target.mode
    if request.network.meaning != "sliding":
        return plan_graph(request, costs), []
    if mode in OFFLOAD_MODES:
        return plan_offloaded(request, costs), []
    try:
        alone = plan_on_devices(request.on_equal_devices(), costs)
    except NoPlanError:
        if mode != "auto" or not (found := list(_offloaded_instead(request, costs))):
            raise
        return _fastest(found), []
    if alone.device == "cpu" or mode == "gpu":
        return alone, []
    if mode == "side-by-side":
        both = plan_side_by_side(alone, request, costs)
        if not both.cpu_items:
            raise NoPlanError(f"{idle(both)}: choose {option('mode', 'gpu')}, or a larger volume")
        return both, [alone]
    is_long = alone.seconds >= thresholds.long_seconds
    if not (is_long or request.kinds):
        return alone, []
    others = [*_side_by_side_if_any(alone, request, costs), *_offloaded_alternatives(alone, request, costs)]
    best = _fastest([alone, *(plan for plan in others if is_long and thresholds.accept(plan, alone))])
    return best, [plan for plan in (alone, *others) if plan is not best]


def _side_by_side_if_any(alone: RunPlan, request: PlanRequest, costs: CostModel) -> Iterator[RunPlan]:
    """Yield the plan side by side, unless the memory of the process does not suffice for two devices."""
    wanted = request.constraints
    if not wanted.only or wanted.only_on("cpu").only:
        with suppress(NoPlanError):
            yield plan_side_by_side(alone, request, costs)


def _offload_requests(request: PlanRequest) -> Iterator[PlanRequest]:
    """Yield the request in each mode with offloaded layers, if one GPU may run it in them."""
    target = request.target
    one_gpu = target.device == "gpu" and target.devices == 1 and target.precision != "fp16"
    if one_gpu and not request.constraints.only and len(request.network.layers) > 1:
        for mode in OFFLOAD_MODES:
            yield replace(request.without_alternatives(), target=replace(target, mode=mode))


def _offloaded_instead(request: PlanRequest, costs: CostModel) -> Iterator[RunPlan]:
    """Yield plans that fit where no plan of the GPU alone does."""
    for offloading in _offload_requests(request):
        with suppress(NoPlanError):
            yield plan_offloaded(offloading, costs)


def _offloaded_alternatives(alone: RunPlan, request: PlanRequest, costs: CostModel) -> Iterator[RunPlan]:
    """Yield plans faster than `alone`; where a mode has none and is to be told of, its best with the same patches."""
    for offloading in _offload_requests(request):
        try:
            yield plan_offloaded(offloading, costs, than=alone)
        except NoPlanError:
            if request.kinds:
                cover: Cover = "columns" if alone.main.streams else "patches"
                alike = replace(offloading.constraints, patch=alone.patch_out, cover=cover)
                with suppress(NoPlanError):
                    yield plan_offloaded(replace(offloading, constraints=alike), costs)


def _scheme_of(plan: RunPlan) -> str:
    """Describe a plan that is not of one device alone; empty where it is."""
    if plan.sharing is not None:
        return "side by side with the CPU"
    return f"{plan.mode} with {offloaded_layers(plan.main)}" if plan.main.offloaded else ""


def _fastest(plans: Sequence[RunPlan]) -> RunPlan:
    return min(plans, key=lambda plan: plan.seconds)
