"""The plan of a run with a mask: small patches leave out more of what lies outside, and compute borders more often."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import ceil

from znnpy.errors import NoPlanError, ShapeError
from znnpy.graph_columns import TurnedGraph
from znnpy.network import Network
from znnpy.option_values import COVERS
from znnpy.planner.modes import make_plan
from znnpy.planner.request import CostModel, PlanRequest
from znnpy.planner.run_plan import RunPlan
from znnpy.run.masked import share_left
from znnpy.shapes import Vec3, turned_back
from znnpy.volume.mask import WantedOutputs

LEAST_SHARE = 1e-6  # of the work of a plan, so that a run predicts some seconds
LONG_RUN = 1.0  # predicted seconds, from which on other patches are tried
TRIED_SECONDS = 3.0  # for trying them
HALVINGS = 4  # of the patch, along some of its axes


def with_mask(plan: RunPlan, network: Network, wanted: WantedOutputs | None) -> RunPlan:
    """Return a plan that knows how much of its work a mask leaves."""
    share = 1.0 if wanted is None else max(LEAST_SHARE, share_left(plan, network, wanted))
    return replace(plan, inside=min(1.0, share))


def fitted_to_mask(made: RunPlan, request: PlanRequest, costs: CostModel, wanted: WantedOutputs | None) -> RunPlan:
    """Return the fastest plan found for a mask: `made`, or one with smaller patches or columns.

    made     the fastest plan without the mask
    request  that it was made for
    """
    network, best = request.network, with_mask(made, request.network, wanted)
    if wanted is None or request.constraints.patch is not None or best.sharing is not None or best.seconds < LONG_RUN:
        return best
    until, size = time.monotonic() + TRIED_SECONDS, best.patch_out
    asked = replace(request.without_alternatives(), baseline=made.memory.baseline)
    asked = replace(asked, target=replace(asked.target, mode=made.mode))
    for _ in range(HALVINGS):
        found = []
        for patch, cover in product(_halved(size, made, network), COVERS):
            if request.constraints.cover not in (None, cover) or time.monotonic() > until:
                continue
            limited = replace(asked.constraints, patch=patch, cover=cover)
            with suppress(NoPlanError, ShapeError):
                other = make_plan(replace(asked, constraints=limited), costs).on_devices(made.devices)
                found.append(with_mask(other, network, wanted))
        if not found:
            break
        nearest = min(found, key=lambda plan: plan.seconds)
        size = nearest.patch_out
        best = min(best, nearest, key=lambda plan: plan.seconds)
    return best


def _halved(size: Vec3, plan: RunPlan, network: Network) -> Iterator[Vec3]:
    """Yield patches of half the size along all axes, along all but the shortest, and along the longest alone."""
    if plan.main.area is None:
        unit = network.period
    else:
        area = plan.main.area
        graph = TurnedGraph.of(network, area.volume, plan.main.axis, plan.precision)
        unit = turned_back(graph.voxels, plan.main.axis)
    longest = sorted(range(3), key=lambda axis: -size[axis])
    for axes in (longest, longest[:2], longest[:1]):
        parts = [ceil(plan.output[axis] / size[axis]) * (2 if axis in axes else 1) for axis in range(3)]
        z, y, x = (ceil(ceil(n / part) / one) * one for n, part, one in zip(plan.output, parts, unit, strict=True))
        if (z, y, x) != size:
            yield z, y, x
