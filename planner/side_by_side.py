"""A plan for GPUs and the CPU side by side: both take cells of the output from one queue.

Method  A cell is some steps of the GPU's plan thick and some of its columns wide, except for the first ones, which are
        as wide as the CPU's columns. The CPU computes cells that lie behind each other as one column, so that it pays
        for borders on the sides of that column only; GPUs take the other cells. A few widths and thicknesses are tried.
        The one with the least mean time over several speeds of the CPU is kept (`expected_seconds`), because nobody
        knows how fast a CPU is while GPUs run, and then the next sizes are tried for as long as one of them is better.
Bound   The speed is at most the GPU's and that of the CPU alone together. The CPU loses the borders of its columns, the
        thread that feeds each GPU, and the end, where one device waits for the other's last cell.
Source  In ZNNi (SC16), section VII.C, CPU and GPU share every patch; sharing the volume instead leaves neither idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import product
from math import ceil, inf, prod
from operator import ge

from znnpy.errors import NoPlanError
from znnpy.machine import Limits
from znnpy.messages import option
from znnpy.network import Network
from znnpy.patches import with_size
from znnpy.planner.co_execution import CoExecution
from znnpy.planner.layer_options import OptionTable
from znnpy.planner.layer_search import MAX_COLUMN_SECONDS
from znnpy.planner.memory import MIB
from znnpy.planner.multi_gpu import plan_of_part
from znnpy.planner.plan import Plan
from znnpy.planner.request import CostModel, PlanRequest
from znnpy.planner.run_plan import PlannedWorker, RunPlan
from znnpy.planner.search import plan_on_device
from znnpy.shapes import Vec3, text
from znnpy.units import mebibytes

COLUMNS = (1, 2, 4)  # numbers of CPU columns that are tried: fewer have less border, and take more memory
RATIOS = (0.7, 1.0, 1.4)  # ratios of their width along one axis to that of a square
FIRST = (1, 4, 16, 48)  # numbers of CPU steps in a column with which widths are compared
BEST = 6  # number of widths with which all of STEPS are tried
STEPS = (1, 2, 3, 4, 8, 24, 32, 64, 128)  # more steps end together, fewer have less border
FINER = (1, 8, 64, 512, 4096)  # divisors of columns and cells, tried where larger ones do not fit or take too long
FEW = 32  # steps of a GPU below which plans for a part of the output are tried as well
PARTS = (4, 16)  # numbers of such parts in the CPU's share


@dataclass(frozen=True, slots=True)
class CpuPlanner:
    """The CPU while GPUs run, with the memory that they leave to it.

    request  is for the CPU alone, with a baseline of 0: the GPUs' plan counts the process itself
    costs    are those of the threads that do not feed GPUs
    options  are those of all plans: each shape of a layer is worked out once
    """

    request: PlanRequest
    costs: CostModel
    options: OptionTable

    @classmethod
    def of(cls, request: PlanRequest, costs: CostModel, ram_bytes: int) -> CpuPlanner:
        """Return the CPU of the machine of a request for GPUs."""
        target, limits = request.target, request.limits
        there = Limits(ram_bytes, limits.threads).without_feed_threads(target.devices)
        on_cpu = request.on("cpu")
        without_gpu = replace(on_cpu.target, machine=replace(target.machine, gpu=None), devices=1, mode="cpu")
        alone = replace(on_cpu, limits=there, target=without_gpu, baseline=0)
        slowed = costs.slowed("cpu", limits.threads / there.threads)
        return cls(alone, slowed, slowed.options(alone))

    def plan(self, output: Vec3, patch: Vec3 | None = None) -> Plan:
        """Return the best plan for an output (z, y, x), by this patch if one is given."""
        wanted = replace(self.request.constraints, patch=patch)
        request = replace(self.request, output=output, constraints=wanted)
        return plan_on_device(request, self.costs, self.options).main


def plan_side_by_side(alone: RunPlan, request: PlanRequest, costs: CostModel) -> RunPlan:
    """Return the plan for the GPUs of `alone` and the CPU that ends soonest on average (`expected_seconds`).

    `CoExecution.cpu_items` is 0 where the CPU is not likely to gain anything.

    alone    the best plan of the GPUs for the request's output
    request  for the GPUs

    NoPlanError where the CPU computes no cell within the memory that is left.
    """
    network, masks = request.network, request.masks
    whole = alone.with_plans(lambda plan: plan.with_transfers(network, masks=masks))
    cpu_planner = CpuPlanner.of(request, costs, max(1, alone.limits.ram_bytes - whole.memory.peak))
    try:
        speed = cpu_planner.plan(alone.output).voxels_per_second
    except NoPlanError as error:
        if error.needed_bytes is None:
            raise
        raise _does_not_fit(whole, error.needed_bytes) from None
    trials = [_Trials(whole, alone.seconds, speed, cpu_planner)]
    trials[0].run()
    if alone.main.cover(network).steps(0) < FEW:
        share = speed / (speed + alone.voxels_per_second)
        for part in _plans_of_parts(alone, request, costs, share):
            trials.append(_Trials(part, alone.seconds, speed, cpu_planner))
            trials[-1].run()
    found = {seconds: trial.found[cell] for trial in trials for cell, seconds in trial.likely.items()}
    if not found:
        raise _does_not_fit(whole, min(trial.least for trial in trials))
    return found[min(found)]


@dataclass
class _Trials:
    """Plans of the CPU that were tried with one plan of the GPUs.

    alone  seconds of the GPUs' best plan
    speed  voxels per second of the CPU if it computes the whole output
    """

    gpus: RunPlan
    alone: float
    speed: float
    cpu_planner: CpuPlanner
    found: dict[Vec3, RunPlan] = field(default_factory=dict)  # by sizes of cells
    likely: dict[Vec3, float] = field(default_factory=dict)  # seconds of each
    too_large: list[Vec3] = field(default_factory=list)
    least: float = inf  # bytes that the CPU needs for what does not fit

    def run(self) -> None:
        """Try cells of several sizes, and finer ones where none of those fits."""
        gpu = self.gpus.main
        voxels = prod(gpu.output) * self.speed / (self.speed + self.gpus.voxels_per_second)  # for the CPU
        for finer in FINER:
            some = voxels / finer
            for width, steps in product(_widths(gpu, self.cpu_planner.request.network.period, some), FIRST):
                self._try(_cell(gpu, width, some / steps))
            for width, steps in product(self.best(BEST), STEPS):
                self._try(_cell(gpu, width, some / steps))
            if self.found:
                self._look_around()
                return

    def best(self, count: int) -> list[Vec3]:
        """Return the cells of so many of the plans found, the one that is likely to end soonest first."""
        return nsmallest(count, self.found, key=self.likely.__getitem__)

    def _look_around(self) -> None:
        """Try cells a step of the GPU larger and smaller than the best ones, for as long as one is better."""
        looked_at: Vec3 | None = None
        while (best := self.best(1)[0]) != looked_at:
            for cell in _next_to(self.gpus.main, best):
                self._try(cell)
            looked_at = best

    def _try(self, cell: Vec3) -> None:
        """Plan for the CPU's cells of this size, one behind the other, unless a smaller size did not fit."""
        if cell in self.found or any(all(map(ge, cell, large)) for large in self.too_large):
            return
        gpu = self.gpus.main
        try:
            other = self.cpu_planner.plan(with_size(cell, gpu.axis, gpu.output[gpu.axis]), cell)
        except NoPlanError as error:
            self.too_large.append(cell)
            self.least = min(self.least, error.needed_bytes or inf)
            return
        request = self.cpu_planner.request
        other = _in_one_column(other, other.output, request.network)
        other = other.with_transfers(request.network, masks=request.masks)
        plan = self.gpus.shared_with(PlannedWorker(other), self.alone)
        if any(plan.memory.excess(gpu.limits)):
            self.least = min(self.least, other.memory.peak)
        elif not other.streams or other.axis == gpu.axis:
            sharing = CoExecution(gpu, self.gpus.devices, other)
            if other.seconds_per_step <= MAX_COLUMN_SECONDS or not sharing.cpu_items():
                self.found[cell], self.likely[cell] = plan, sharing.expected_seconds()


def _does_not_fit(gpus: RunPlan, needed: float) -> NoPlanError:
    """Return an error for a CPU that needs so many bytes besides the GPUs' plan; inf: memory is not the reason."""
    part, limit = gpus.memory.peak, gpus.limits.ram_bytes
    if needed == inf:
        return NoPlanError(
            f"the CPU runs no steps of {text(gpus.patch_out)} output voxels: choose {option('mode', 'gpu')}"
        )
    return NoPlanError(
        f"the GPU's part takes {mebibytes(part)} of {mebibytes(limit)} of RAM, and the CPU needs at least "
        f"{mebibytes(needed)}; allow at least {option('ram', f'{-(-(part + needed) // MIB):.0f}M')}, or choose "
        f"{option('mode', 'gpu')}"
    )


def _plans_of_parts(alone: RunPlan, request: PlanRequest, costs: CostModel, share: float) -> Iterator[RunPlan]:
    """Yield the best plans of the GPU for parts of the output, each extended to all of it."""
    network, masks = request.network, request.masks
    one = replace(request.on_one_device().without_alternatives(), limits=alone.limits)
    options = costs.options(one)
    for count in PARTS:
        side = (share * prod(alone.output) / count) ** (1 / 3)
        sizes = zip(alone.output, network.period, strict=True)
        z, y, x = (min(size, _even(size, side, step)) for size, step in sizes)
        if (part := plan_of_part(one, costs, options, (z, y, x))) is not None:
            gpu = _in_one_column(part, alone.output, network)  # from cell to cell
            yield alone.with_main(replace(gpu, limits=alone.limits).with_transfers(network, masks=masks))


def _widths(gpu: Plan, period: Vec3, voxels: float) -> list[Vec3]:
    """Return sizes of cells, as thick as a step of the GPU, whose columns hold so many voxels: one column, or a few.

    Some cut the output evenly, others leave whole columns to GPUs.
    """
    axis, output, step = gpu.axis, gpu.output, gpu.patch_out
    a, b = (other for other in range(3) if other != axis)
    found: dict[Vec3, None] = {}
    for columns, ratio, leaving in product(COLUMNS, RATIOS, (False, True)):

        def rounded(i: int, length: float, leaving: bool = leaving) -> int:
            length = max(step[i], length)
            return _leaving(output[i], length, step[i], period[i]) if leaving else _even(output[i], length, step[i])

        area = voxels / output[axis] / columns
        width = list(step)
        width[a] = rounded(a, ratio * area**0.5)
        for length in (area / width[a], area / width[a] - step[b]):
            width[b] = rounded(b, length)
            found[width[0], width[1], width[2]] = None
    return list(found)


def _next_to(gpu: Plan, cell: Vec3) -> Iterator[Vec3]:
    """Yield the cells that are a step of the GPU larger or smaller along one axis, or two steps in thickness."""
    for axis, (step, most) in enumerate(zip(gpu.patch_out, gpu.output, strict=True)):
        for steps in (-2, -1, 1, 2) if axis == gpu.axis else (-1, 1):
            size = cell[axis] + steps * step
            if step <= size < most + step:
                yield with_size(cell, axis, size)


def _cell(gpu: Plan, width: Vec3, voxels: float) -> Vec3:
    """Return a cell of this width that holds about so many voxels; its thickness is a multiple of the GPU's step."""
    axis, step = gpu.axis, gpu.patch_out[gpu.axis]
    across = prod(size for i, size in enumerate(width) if i != axis)
    thick = step * min(max(1, round(voxels / across / step)), ceil(gpu.output[axis] / step))
    return with_size(width, axis, thick)


def _in_one_column(plan: Plan, output: Vec3, network: Network) -> Plan:
    """Return this plan for an output, with columns as long as it; each cell is recorded when it is written."""
    return plan.in_columns_of(output[plan.axis]).for_output(output, network)


def _even(whole: int, length: float, step: int) -> int:
    """Return a multiple of `step` near `length` that cuts the whole into parts as equal as can be."""
    count = max(1, round(whole / length))
    return ceil(ceil(whole / count) / step) * step


def _leaving(whole: int, length: float, step: int, period: int) -> int:
    """Return a multiple of `period` near `length` that leaves whole steps of the rest; it is at least a step."""
    left = min(max(0, round((whole - length) / step)), max(0, whole - step) // step)
    return max(step, ceil((whole - left * step) / period) * period)
