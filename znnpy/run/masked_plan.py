"""The plan of a run with a mask: small patches leave out more of what lies outside, and compute borders more often."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import ceil

from znnpy.errors import NoPlanError, ShapeError
from znnpy.graph_columns import TurnedGraph
from znnpy.network import Network
from znnpy.option_values import COVERS, Cover
from znnpy.planner.modes import make_plan
from znnpy.planner.request import CostModel, PlanRequest
from znnpy.planner.run_plan import RunPlan
from znnpy.run.masked import share_left
from znnpy.shapes import Vec3, turned_back
from znnpy.volume.mask import WantedOutputs

LEAST_SHARE = 1e-6  # of the work of a plan, so that a run predicts some seconds
LONG_RUN = 1.0  # predicted seconds, from which on other patches are tried
TRIED_SHARE = 0.1  # of the predicted seconds, for trying them
TRIED_SECONDS = 6.0  # for trying them at most
HALVINGS = 4  # of the patch, along some of its axes
FACTORS = (Fraction(1, 2), Fraction(3, 4), Fraction(4, 3), Fraction(2))  # of the number of patches along an axis


def with_mask(plan: RunPlan, network: Network, wanted: WantedOutputs | None) -> RunPlan:
    """Return a plan that knows how much of its work a mask leaves."""
    share = 1.0 if wanted is None else max(LEAST_SHARE, share_left(plan, network, wanted))
    return replace(plan, inside=min(1.0, share))


def fitted_to_mask(made: RunPlan, request: PlanRequest, costs: CostModel, wanted: WantedOutputs | None) -> RunPlan:
    """Return the fastest plan found for a mask: `made`, or one with other patches or columns.

    Patches are halved some times, since those that are a little smaller may gain nothing where much smaller ones do.
    From the best of these on, the number of patches along one axis is changed for as long as this gains something.

    made     the fastest plan without the mask
    request  that it was made for
    """
    network, best = request.network, with_mask(made, request.network, wanted)
    if wanted is None or request.constraints.patch is not None or best.sharing is not None or best.seconds < LONG_RUN:
        return best
    tried = _Tried(made, request, costs, wanted)
    size = best.patch_out
    for _ in range(HALVINGS):
        if (nearest := tried.fastest(_halved(size, made, network))) is None:
            break
        size = nearest.patch_out
        best = _faster(best, nearest)
    while (nearest := tried.fastest(_changed(best.patch_out, made, network))) is not None:
        if nearest.seconds >= best.seconds:
            break
        best = nearest
    return best


def _faster(*plans: RunPlan) -> RunPlan:
    return min(plans, key=lambda plan: plan.seconds)


class _Tried:
    """Plans with other patches, each of which is made once, for a while."""

    def __init__(self, made: RunPlan, request: PlanRequest, costs: CostModel, wanted: WantedOutputs) -> None:
        asked = replace(request.without_alternatives(), baseline=made.memory.baseline)
        self._asked = replace(asked, target=replace(asked.target, mode=made.mode))
        self._made, self._costs, self._wanted = made, costs, wanted
        self._seen = set[tuple[Vec3, Cover]]()
        self._until = time.monotonic() + min(TRIED_SECONDS, TRIED_SHARE * made.seconds)

    def fastest(self, patches: Iterable[Vec3]) -> RunPlan | None:
        """Return the fastest plan with one of these patches; None if each was tried before, fits nowhere or is late."""
        found, network, constraints = [], self._asked.network, self._asked.constraints
        for patch, cover in product(patches, COVERS):
            if constraints.cover not in (None, cover) or (patch, cover) in self._seen:
                continue
            if time.monotonic() > self._until:
                break
            self._seen.add((patch, cover))
            limited = replace(constraints, patch=patch, cover=cover)
            with suppress(NoPlanError, ShapeError):
                other = make_plan(replace(self._asked, constraints=limited), self._costs)
                found.append(with_mask(other.on_devices(self._made.devices), network, self._wanted))
        return _faster(*found) if found else None


def _halved(size: Vec3, plan: RunPlan, network: Network) -> Iterator[Vec3]:
    """Yield patches of half the size along all axes, along all but the shortest, and along the longest alone."""
    longest = sorted(range(3), key=lambda axis: -size[axis])
    for axes in (longest, longest[:2], longest[:1]):
        yield _parted(size, [Fraction(2 if axis in axes else 1) for axis in range(3)], plan, network)


def _changed(size: Vec3, plan: RunPlan, network: Network) -> Iterator[Vec3]:
    """Yield patches of another size along one axis."""
    for axis, factor in product(range(3), FACTORS):
        yield _parted(size, [factor if i == axis else Fraction(1) for i in range(3)], plan, network)


def _parted(size: Vec3, factors: Sequence[Fraction], plan: RunPlan, network: Network) -> Vec3:
    """Return the size of so many times as many patches along each axis, a multiple of the least one."""
    if plan.main.area is None:
        unit = network.period
    else:
        graph = TurnedGraph.of(network, plan.main.area.volume, plan.main.axis, plan.precision)
        unit = turned_back(graph.voxels, plan.main.axis)
    found = []
    for n, patch, factor, least in zip(plan.output, size, factors, unit, strict=True):
        parts = max(1, round(ceil(n / patch) * factor))
        found.append(ceil(ceil(n / parts) / least) * least)
    return found[0], found[1], found[2]
