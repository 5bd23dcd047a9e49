"""Measure before a plan is chosen: nothing, layers of the best plans, or all layers that may be in the best plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from znnpy.costs.cost_file import Costs
from znnpy.costs.model import Rates, assumed_rates
from znnpy.errors import NoPlanError
from znnpy.kernels.contract import device_of
from znnpy.machine import Limits
from znnpy.measure.budget import LayerTimer, Placement, Progress, TimeBudget
from znnpy.measure.layer_timer import timer_on
from znnpy.measure.refine import Refiner
from znnpy.messages import option
from znnpy.option_values import OFFLOAD_MODES, DeviceKind, RigorLevel
from znnpy.planner.request import CostModel, KnownRates, PlanRequest, Rigor
from znnpy.run.target import OpenTarget
from znnpy.units import human_bytes

TIME_LIMIT = 60.0  # seconds that "measure" may take if no limit is given
HOPE = 0.5  # no layer is assumed to take less than this share of its estimate

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
    """Return a timer on what a target has open, for a run of so many seconds."""
    return timer_on(where, target.gpu, target.machine, seconds)


@dataclass(slots=True)
class RigorMeasurement:
    """Measures as much as a request's rigor asks for, and keeps what it found.

    measure     times layers of the best plan, until all layers of the best plan were measured at about their size
    exhaustive  then goes on as if layers that were not measured took half their estimate, or 0.84 of it if they were
                measured at other sizes; afterwards no plan that the search compares is faster

    Nothing is begun that does not fit the time. The rates hold what a device refused to run, with its message.
    """

    tell: Callable[[Progress], None] = lambda progress: None
    clock: TimersOn = timer_for
    now: Callable[[], float] = time.monotonic
    costs: CostModel = field(default_factory=CostModel)  # primitives; its rates are not used
    done: RigorLevel = "estimate"  # the rigor that was reached before the time was up
    sentences: list[str] = field(default_factory=list)
    found: dict[DeviceKind, Rates] = field(default_factory=dict)  # by device, if anything was measured

    def rates(self, target: OpenTarget, request: PlanRequest, known: KnownRates) -> KnownRates:
        """Return the rates of the devices, with what was measured of the layers of a request's best plans.

        known  earlier rates; a device that is missing is assumed

        NoPlanError if there is no plan.
        """
        rigor, request = request.rigor, request.without_alternatives()
        if rigor.level == "estimate":
            return known
        refiner = self._refiner(target, request.limits, rigor.seconds, known)
        begun, requests = dict(refiner.rates), _in_turn(request)
        self.done = "measure"
        whole = _learnt(refiner, requests)
        if whole and rigor.level == "exhaustive":
            refiner.hope(HOPE)
            whole = _learnt(refiner, requests)
            refiner.hope(1.0)
            self.done = "exhaustive" if whole and not refiner.too_large else "measure"
        self._report(refiner, target, begun, whole=whole, seconds=rigor.seconds)
        return refiner.rates

    def _refiner(self, target: OpenTarget, limits: Limits, seconds: float, known: KnownRates) -> Refiner:
        devices: set[DeviceKind] = {"cpu", target.device}
        machine, threads = target.machine, limits.threads
        begun = {device: known.get(device) or assumed_rates(machine, threads, device) for device in devices}
        timer = TimeBudget(seconds, self.tell, self.now)
        clocks = partial(self.clock, target)
        return Refiner(begun, timer, clocks, threads, target.free_bytes_by_device(limits), self.costs)

    def _report(self, refiner: Refiner, target: OpenTarget, begun: KnownRates, *, whole: bool, seconds: float) -> None:
        """Keep what was found, and add sentences on what was not measured."""
        self.sentences += _left_out(refiner)
        if not whole:
            self.sentences.append(
                f"the time limit of {seconds:,.3g} s was up after {len(refiner.found)} layers were measured, "
                f"before all were that may be in the best plan: give more {option('time_limit')}"
            )
        _keep(refiner, target)
        self.found = {device: rates for device, rates in refiner.rates.items() if rates != begun[device]}


def _keep(refiner: Refiner, target: OpenTarget) -> None:
    """Keep what was measured in the store of measured costs."""
    store = target.costs
    for device in refiner.rates:
        layers = tuple(layer for layer in refiner.found if device_of(layer.primitive) == device)
        refusals = tuple(refusal for refusal in refiner.refusals if device_of(refusal.primitive) == device)
        if layers or refusals:
            empty = Costs.empty(target.machine, device, refiner.threads, store.table)
            store.keep(replace(empty, layers=layers, refusals=refusals))


def _in_turn(request: PlanRequest) -> list[PlanRequest]:
    """Return requests whose layers are measured in turn.

    The last is the request itself. If making its plan takes many plans of one device, the request for one of them comes
    before.
    """
    target = request.target
    one = target.mode in ("cpu", "gpu", *OFFLOAD_MODES) or target.device == "cpu"
    return [request] if one and target.devices == 1 else [request.on_one_device(), request]


def _learnt(refiner: Refiner, requests: list[PlanRequest]) -> bool:
    """Return False if the time was up before the end; making the first plan takes none of that time."""
    for sooner in requests[:-1]:
        with suppress(NoPlanError):
            if not _learnt(refiner, [sooner]):
                return False
    with refiner.timer.paused():
        first = refiner.plan(requests[-1])
    return refiner.learn(requests[-1], first=first)


def _left_out(refiner: Refiner) -> list[str]:
    """Return a sentence on the layers that did not fit, for each memory."""
    names: dict[DeviceKind, str] = {"cpu": "RAM", "gpu": "VRAM"}
    free = {device: human_bytes(max(0, nbytes)) for device, nbytes in refiner.free_bytes.items()}
    return [
        f"layers that one image of needs more than the {free[device]} of {names[device]} that are free for them, "
        f"{len(cases)} in all, were not measured and count as estimated"
        for device, cases in refiner.too_large.items()
    ]
