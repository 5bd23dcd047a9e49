"""Throughput against memory: the best plans of one kind within one limit and another, from a machine's memory down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from math import ceil, inf, log2
from typing import Any, Protocol

from znnpy.errors import NoPlanError
from znnpy.planner.graph_plan import plan_graph
from znnpy.planner.layer_options import OptionTable
from znnpy.planner.plan import Plan
from znnpy.planner.request import CostModel, PlanRequest
from znnpy.planner.search import plan_on_device

STRIDES = (8, 4, 2, 1)  # of the limits: every eighth first
FLAT = 1.03  # where two plans differ by less in speed none is worked out between them


@dataclass(frozen=True, slots=True)
class Point:
    """The best plan of its kind within a limit."""

    limit: int  # bytes, of where the layers run
    plan: Plan
    done: float  # share of what is to be worked out

    def as_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "device": plan.device,
            "cover": "columns" if plan.streams else "patches",
            "limit_bytes": self.limit,
            "held_bytes": plan.memory.device_bytes,
            "voxels_per_second": plan.voxels_per_second,
            "patch_out": list(plan.patch_out),
            "primitives": [choice.primitive for choice in plan.choices],
        }


def in_order(point: Point) -> tuple[str, bool, int]:
    """Return a key that brings points of one kind together, the largest limit first."""
    return point.plan.device, not point.plan.streams, -point.limit


class PlansWithin(Protocol):
    """A source of the best plans of one kind within one memory limit and another."""

    def plan(self, nbytes: int) -> Plan:
        """Return the best plan within so many bytes; NoPlanError with the least need where there is none."""


@dataclass(frozen=True, slots=True)
class DevicePlans:
    """The plans of one device, which differ in the limit of its memory alone.

    options  what `costs` gives for the request
    """

    request: PlanRequest
    costs: CostModel
    options: OptionTable

    def plan(self, nbytes: int) -> Plan:
        """Return the best plan within so many bytes; NoPlanError with the least need where there is none."""
        limits = self.request.limits
        on_cpu = self.request.target.device == "cpu"
        there = replace(limits, ram_bytes=nbytes) if on_cpu else replace(limits, vram_bytes=nbytes)
        request = replace(self.request, limits=there)
        if request.area is not None:
            return plan_graph(request, self.costs, self.options).main
        return plan_on_device(request, self.costs, self.options).main


def points(
    plans: PlansWithin, most: int, *, seconds: float = inf, now: Callable[[], float] = time.monotonic
) -> Iterator[Point]:
    """Yield the best plans within `most` bytes and smaller powers of the root of 2, down to the least that any needs.

    seconds  for all plans together: limits come from far apart to close together, and a plan that is not likely to be
             done in time is left out, the least need last. The first is made however long it takes.

    A plan that fits within a smaller limit too is the best there: no plan is made twice.
    """
    curve = _Curve(plans, _limits(most), seconds, now)
    for stride in STRIDES:
        for index in count(0, stride):
            if index >= len(curve.limits) or curve.limits[index] < curve.needed:
                break
            if index not in curve.plans and (plan := curve.within(index)) is not None:
                yield Point(curve.limits[index], plan, curve.done)
    least = curve.limits[max(curve.plans)] if curve.plans else 0
    if 0 < curve.needed < least and curve.affords(max(curve.spent.values())):
        with suppress(NoPlanError):
            yield Point(curve.needed, plans.plan(curve.needed), 1.0)


@dataclass
class _Curve:
    """One curve, as far as it is known."""

    source: PlansWithin
    limits: list[int]  # the largest first
    seconds: float
    now: Callable[[], float]
    needed: int = 0  # bytes that some plan has to have, as far as that was found out
    plans: dict[int, Plan] = field(default_factory=dict)  # by limit
    spent: dict[int, float] = field(default_factory=dict)  # seconds, of those limits that were worked out
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.now()

    @property
    def done(self) -> float:
        """Return the share of the limits that are worked out, or of the time that is spent."""
        within = sum(limit >= self.needed for limit in self.limits)
        return min(0.99, max(len(self.plans) / within, (self.now() - self.began) / self.seconds))

    def affords(self, expected: float) -> bool:
        return self.now() - self.began + expected <= self.seconds

    def within(self, index: int) -> Plan | None:
        """Return the best plan within one limit; None where there is none, or none is worth its time."""
        limit = self.limits[index]
        above = max((other for other in self.plans if other < index), default=None)
        below = min((other for other in self.plans if other > index), default=None)
        if above is not None:
            larger = self.plans[above]
            if larger.memory.device_bytes <= limit:
                self.plans[index] = larger
                return larger
            if below is not None and larger.voxels_per_second <= FLAT * self.plans[below].voxels_per_second:
                return None
            near = min(self.spent, key=lambda other: abs(other - index))
            if not self.affords(self.spent[near]):
                return None
        return self._made(index)

    def _made(self, index: int) -> Plan | None:
        began = self.now()
        try:
            plan = self.source.plan(self.limits[index])
        except NoPlanError as error:
            self.needed = max(error.needed_bytes or 0, self.limits[index] + 1)
            return None
        self.spent[index] = self.now() - began
        self.plans[index] = plan
        return plan


def _limits(most: int) -> list[int]:
    """Return `most`, and every smaller power of the root of 2."""
    first = ceil(2 * log2(most) - 1e-6) - 1
    return [most, *(int(2 ** (half / 2)) for half in range(first, 0, -1))]
