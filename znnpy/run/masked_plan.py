"""The plan of a run with a mask: small patches leave out more of what lies outside, and compute borders more often."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import ceil, prod

from znnpy.errors import NoPlanError, ShapeError
from znnpy.graph_columns import TurnedGraph
from znnpy.network import Network
from znnpy.option_values import COVERS
from znnpy.patches import Cover
from znnpy.planner.modes import make_plan
from znnpy.planner.plan import Plan
from znnpy.planner.request import Constraints, CostModel, PlanRequest
from znnpy.planner.run_plan import RunPlan
from znnpy.run.masked import share_left
from znnpy.run.step_grid import StepGrid
from znnpy.shapes import Vec3, turned_back
from znnpy.volume.mask import WantedOutputs
from znnpy.volume.store import chunk_of

LEAST_SHARE = 1e-6  # of the work of a plan, so that a run predicts some seconds
LONG_RUN = 1.0  # predicted seconds, from which on other patches are tried
TRIED_SHARE = 0.1  # of the predicted seconds, for trying them: of a core, since other programs may run
TRIED_SECONDS = 6.0  # for trying them at most
STEP_SECONDS = 3e-4  # that a step takes to be read, handed over and written, which predictions leave out: 2 CPU cores
WRITTEN_PER_SECOND = 1e9  # bytes of chunks that are read and written again where patches cut them: 2 CPU cores
HALVINGS = 4, 5  # of the patch along the axis of columns, and along the others, so many less one at most
BOUND = 0.9  # of the seconds of the fastest plan: those with the least memory of several as fast are chosen
FACTORS = (Fraction(1, 2), Fraction(3, 4), Fraction(4, 3), Fraction(2))  # of the number of patches along an axis


def with_mask(plan: RunPlan, network: Network, wanted: WantedOutputs | None) -> RunPlan:
    """Return a plan that knows how much of its work a mask leaves."""
    share = 1.0 if wanted is None else max(LEAST_SHARE, share_left(plan, network, wanted))
    return replace(plan, inside=min(1.0, share))


def fitted_to_mask(made: RunPlan, request: PlanRequest, costs: CostModel, wanted: WantedOutputs | None) -> RunPlan:
    """Return the fastest plan found for a mask: `made`, or one with other patches or columns.

    The patch is halved some times along the axis of columns, and along the others. From the best of these on, the
    number of patches along an axis, or two, is changed for as long as this gains something.

    made     the fastest plan without the mask
    request  that it was made for
    """
    network, best = request.network, with_mask(made, request.network, wanted)
    if (
        wanted is None
        or made.main.sums is not None
        or request.constraints.patch is not None
        or best.sharing is not None
        or best.seconds < LONG_RUN
    ):
        return best
    tried = _Tried(best, request, costs, wanted)
    tried.all(_halved(made, network))
    while tried.all(_changed(tried.best.patch_out, made, network)):
        pass
    return tried.best


def _seconds(plan: RunPlan) -> float:
    """Return the predicted seconds of a plan, with what each of its steps takes beside its layers."""
    main = plan.main
    steps = main.choices[0].executions / main.sub_batches[0]
    return plan.seconds + STEP_SECONDS * plan.inside * steps + _rewriting(main)


def _rewriting(plan: Plan) -> float:
    """Return the seconds for chunks of the output that several patches write a part of, as in HDF5.

    Each of them reads the planes that it touches, and writes them again. Steps that are left out write zeros.
    """
    chunk, factor = chunk_of(plan.output), 1.0
    for axis in (1, 2):  # the planes of a chunk follow each other, so cuts along z cost nothing
        size, whole = min(plan.patch_out[axis], plan.output[axis]), plan.output[axis]
        if size < whole and size % chunk[axis]:
            factor *= (size + chunk[axis]) / size
    if factor == 1:
        return 0.0
    voxels = plan.choices[-1].shape.out_shape[4] * prod(plan.output)
    return 2 * factor * voxels * plan.itemsize_out / WRITTEN_PER_SECOND


class _Tried:
    """Plans with other patches, each of which is made once, for a while.

    best  the fastest plan so far
    """

    def __init__(self, made: RunPlan, request: PlanRequest, costs: CostModel, wanted: WantedOutputs) -> None:
        asked = replace(request.without_alternatives(), baseline=made.memory.baseline)
        self._asked = replace(asked, target=replace(asked.target, mode=made.mode))
        self._costs, self._wanted = costs, wanted
        self._seen = set[tuple[Vec3, str]]()
        self._whole = replace(made, inside=1.0).seconds
        self._until = time.thread_time() + min(TRIED_SECONDS, TRIED_SHARE * self._whole)
        self.best = made

    def all(self, patches: Iterable[Vec3]) -> bool:
        """Try patches and columns of these sizes; return whether one of them is faster than those before."""
        before, constraints = self.best, self._asked.constraints
        for patch, cover in product(patches, COVERS):
            if constraints.cover not in (None, cover) or (patch, cover) in self._seen:
                continue
            self._seen.add((patch, cover))
            if time.thread_time() > self._until:
                break
            if self._least(patch) < _seconds(self.best):
                with suppress(NoPlanError, ShapeError):
                    self._try(replace(constraints, patch=patch, cover=cover))
        return self.best is not before

    def _try(self, constraints: Constraints) -> None:
        other = make_plan(replace(self._asked, constraints=constraints), self._costs)
        other = with_mask(other.on_devices(self.best.devices), self._asked.network, self._wanted)
        self.best = min(self.best, other, key=_seconds)

    def _least(self, patch: Vec3) -> float:
        """Return the least seconds of a plan with such a patch: none computes a voxel sooner than the first plan."""
        if self._asked.area is not None:
            return 0.0
        touched = StepGrid.of(Cover(self._asked.output, patch), self._wanted.outputs[0]).touched
        return BOUND * self._whole * float(touched.mean()) + STEP_SECONDS * int(touched.sum())


def _halved(plan: RunPlan, network: Network) -> Iterator[Vec3]:
    """Yield patches of a half, a quarter and so on of the size along the axis of columns, and along the other two."""
    for along, across in product(*map(range, HALVINGS)):
        factors = [Fraction(2 ** (along if axis == plan.main.axis else across)) for axis in range(3)]
        yield from _sizes(_parted(plan.patch_out, factors, plan, network), plan, network)


def _changed(size: Vec3, plan: RunPlan, network: Network) -> Iterator[Vec3]:
    """Yield patches of another size along one axis or two."""
    for axes, factor in product(((0,), (1,), (2,), (1, 2), (0, 2), (0, 1)), FACTORS):
        parted = _parted(size, [factor if axis in axes else Fraction(1) for axis in range(3)], plan, network)
        yield from _sizes(parted, plan, network)


def _sizes(size: Vec3, plan: RunPlan, network: Network) -> Iterator[Vec3]:
    """Yield a size whose edges lie on those of the output's chunks where they can, and the size itself."""
    chunk, period = chunk_of(plan.output), network.period if plan.main.area is None else (1, 1, 1)
    y, x = (
        max(1, round(n / each)) * each if each % least == 0 else n
        for n, each, least in zip(size[1:], chunk[1:], period[1:], strict=True)
    )
    yield from dict.fromkeys(((size[0], y, x), size))


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
