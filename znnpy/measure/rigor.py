"""How much is measured before a plan is chosen: nothing, layers of the best plans, or all that could be in the best."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf

from znnpy.costs.model import Rates, assumed_rates
from znnpy.errors import NoPlanError
from znnpy.machine import Limits
from znnpy.measure.budget import LayerTimer, Placement, Progress, TimeBudget
from znnpy.measure.layer_timer import timer_on
from znnpy.measure.refine import Refiner
from znnpy.messages import option
from znnpy.option_values import OFFLOAD_MODES, DeviceKind, RigorLevel
from znnpy.planner.plan import Plan
from znnpy.planner.request import CostModel, KnownRates, PlanRequest, Rigor
from znnpy.run.target import OpenTarget
from znnpy.units import human_bytes

TIME_LIMIT = 60.0  # seconds that "measure" may take where nobody said how long
HOPE = 0.5  # assumed: no layer takes less than this share of its estimate

TimersOn = Callable[[OpenTarget, Placement, float], AbstractContextManager[LayerTimer]]


def rigor_of(level: RigorLevel, time_limit: float | None) -> Rigor:
    """Return the rigor that is asked for; ValueError for a time limit that it cannot have."""
    if time_limit is None:
        return Rigor(level, TIME_LIMIT if level == "measure" else inf)
    if level == "estimate":
        raise ValueError("a time limit is for layers that are measured: give rigor measure or exhaustive")
    if not 0 < time_limit < inf:
        raise ValueError(f"a time limit is a positive number of seconds, not {time_limit}")
    return Rigor(level, time_limit)


def timer_for(target: OpenTarget, where: Placement, seconds: float) -> AbstractContextManager[LayerTimer]:
    """Return a clock of what a target has open, for a run of so many seconds."""
    return timer_on(where, target.gpu, target.machine, seconds)


@dataclass(slots=True)
class RigorMeasurement:
    """Measures as much as a request's rigor asks for, and knows what it found.

    measure     layers of the best plan, until the best plan holds none that was not measured at about its size
    exhaustive  then the same as if layers that were not measured took half their estimate, or 0.84 of it where they
                were at other sizes: no plan that the search compares is faster then

    Nothing is begun that does not fit the time. What a device refuses to run is in the rates, with its words.
    """

    tell: Callable[[Progress], None] = lambda progress: None
    clock: TimersOn = timer_for
    now: Callable[[], float] = time.monotonic
    costs: CostModel = field(default_factory=CostModel)  # with other rates
    done: RigorLevel = "estimate"  # of the rigor, before the time was up
    sentences: list[str] = field(default_factory=list)
    found: dict[DeviceKind, Rates] = field(default_factory=dict)  # by device, where anything was measured

    def rates(self, target: OpenTarget, request: PlanRequest, known: KnownRates) -> KnownRates:
        """Return what is known of the devices with what was measured of the layers of a request's best plans.

        known  of devices before; a device that is missing is assumed

        NoPlanError where there is no plan.
        """
        rigor, request = request.rigor, request.without_alternatives()
        if rigor.level == "estimate":
            return known
        learner = self._learner(target, request.limits, rigor.seconds, known)
        begun, requests = dict(learner.rates), _in_turn(request)
        self.done = "measure"
        whole = _learnt(learner, requests)
        if whole and rigor.level == "exhaustive":
            learner.hope(HOPE)
            whole = _learnt(learner, requests)
            learner.hope(1.0)
            self.done = "exhaustive" if whole and not learner.too_large else "measure"
        self._report(learner, begun, whole=whole, seconds=rigor.seconds)
        return learner.rates

    def layers_timed(self, plan: Plan, target: OpenTarget, known: KnownRates, seconds: float = inf) -> KnownRates:
        """Return what is known with what was measured of the layers of one plan that were not known at their size.

        target   with its GPU open, where layers run on one
        known    of devices before; rates of the processor are for `plan.limits.threads`

        So plans may be made elsewhere, and in turn with this.
        """
        learner = self._learner(target, plan.limits, seconds, known)
        begun = dict(learner.rates)
        self.done = "measure"
        self._report(learner, begun, whole=learner.learn_layers(plan), seconds=seconds)
        return learner.rates

    def _learner(self, target: OpenTarget, limits: Limits, seconds: float, known: KnownRates) -> Refiner:
        devices: set[DeviceKind] = {"cpu", target.device}
        machine, threads = target.machine, limits.threads
        begun = {device: known.get(device) or assumed_rates(machine, threads, device) for device in devices}
        timer = TimeBudget(seconds, self.tell, self.now)
        clocks = partial(self.clock, target)
        return Refiner(begun, timer, clocks, threads, target.rooms(limits), self.costs)

    def _report(self, learner: Refiner, begun: KnownRates, *, whole: bool, seconds: float) -> None:
        """Keep what was found, and sentences on what was not measured."""
        self.sentences += _left_out(learner)
        if not whole:
            self.sentences.append(
                f"the time limit of {seconds:,.3g} s was up after {len(learner.found)} layers were measured, "
                f"before all were that may be in the best plan: give more {option('time_limit')}"
            )
        self.found = {device: rates for device, rates in learner.rates.items() if rates != begun[device]}


def _in_turn(request: PlanRequest) -> list[PlanRequest]:
    """Return requests whose layers are measured in turn.

    The last is the request itself; where its plan takes many plans of one device, one such plan comes before.
    """
    target = request.target
    one = target.mode in ("cpu", "gpu", *OFFLOAD_MODES) or target.device == "cpu"
    return [request] if one and target.devices == 1 else [request.on_one_device(), request]


def _learnt(learner: Refiner, requests: list[PlanRequest]) -> bool:
    """Return False where the time was up before the end; the first plan of each takes none of that time."""
    for sooner in requests[:-1]:
        with suppress(NoPlanError):
            if not _learnt(learner, [sooner]):
                return False
    with learner.timer.paused():
        first = learner.plan(requests[-1])
    return learner.learn(requests[-1], first=first)


def _left_out(learner: Refiner) -> list[str]:
    """Return a sentence on the layers that did not fit, for each memory."""
    names: dict[DeviceKind, str] = {"cpu": "RAM", "gpu": "VRAM"}
    return [
        f"layers that one image of needs more than the {human_bytes(max(0, learner.rooms[device]))} of {names[device]} "
        f"that are free for them, {len(cases)} in all, were not measured and count as estimated"
        for device, cases in learner.too_large.items()
    ]
