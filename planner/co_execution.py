"""Prediction of how a processor and GPUs share an output, cell by cell.

The processor takes cells from the front, consecutive ones as one column; GPUs take the others (`run.balanced_queue`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil, prod
from statistics import fmean
from typing import Protocol

from znnpy.patches import Cover
from znnpy.shapes import Vec3

# Of a processor beside GPUs, against the prediction: 0.84 to 1.24 on two machines.
SLOWDOWNS = (0.85, 1.0, 1.1, 1.25)


class Timed(Protocol):
    """A choice of a plan."""

    @property
    def seconds(self) -> float: ...

    @property
    def executions(self) -> int: ...


class CpuPlan(Protocol):
    """What is asked of the plan of the processor."""

    @property
    def seconds_per_step(self) -> float: ...

    @property
    def seconds_to_begin(self) -> float: ...


class SharedPlan(Protocol):
    """What is asked of a plan for GPUs that the processor shares."""

    @property
    def output(self) -> Vec3: ...

    @property
    def patch_out(self) -> Vec3: ...

    @property
    def axis(self) -> int: ...

    @property
    def devices(self) -> int: ...

    @property
    def cells(self) -> Cover: ...

    @property
    def choices(self) -> Sequence[Timed]: ...

    @property
    def cpu_plan(self) -> CpuPlan | None: ...

    @property
    def cpu_items(self) -> int: ...

    @property
    def seconds_per_step(self) -> float: ...

    @property
    def seconds_to_begin(self) -> float: ...

    def seconds_for(self, share: float) -> float: ...


def seconds(plan: SharedPlan, slowdown: float = 1.0) -> float:
    """Return the seconds until both are done, if the processor takes `slowdown` times as long as predicted.

    It begins a first cell as planned; how many more it takes is decided when that is done. A GPU that finishes earlier
    waits for as long as the processor's last cell takes a GPU, and then computes that cell itself.
    """
    return _seconds(plan, slowdown, cpu_items(plan))


def expected_seconds(plan: SharedPlan) -> float:
    """Return the mean of these seconds over the slowdowns that a processor may have."""
    planned = cpu_items(plan)
    return fmean(_seconds(plan, slowdown, planned) for slowdown in SLOWDOWNS)


def _seconds(plan: SharedPlan, slowdown: float, planned: int) -> float:
    """Return the seconds until both are done; `planned` cells are the processor's if it is as fast as predicted."""
    if not planned:
        return gpu_seconds(plan, 0)
    count = planned if slowdown == 1 else max(1, cpu_items(plan, slowdown))
    others, own = gpu_seconds(plan, count), slowdown * cpu_seconds(plan, count)
    waits = sum(gpu_item_seconds(plan))
    return max(others, own) if own <= others + waits else others + 2 * waits


def cpu_items(plan: SharedPlan, slowdown: float = 1.0) -> int:
    """Return the number of cells that the processor computes.

    It begins no cell that the GPUs, with everything left, would finish before it, and never the last one, which a GPU
    has from the start.
    """

    def in_vain(count: int) -> bool:
        return slowdown * cpu_seconds(plan, count) >= gpu_seconds(plan, count - 1)

    return bisect_left(range(1, len(plan.cells)), True, key=in_vain)


def cpu_seconds(plan: SharedPlan, count: int) -> float:
    """Return the processor's seconds for so many cells; it streams from one to the next until the output ends."""
    assert plan.cpu_plan is not None, "only side by side"
    columns = -(-count // plan.cells.counts[plan.axis])
    return count * plan.cpu_plan.seconds_per_step + columns * plan.cpu_plan.seconds_to_begin


def gpu_seconds(plan: SharedPlan, count: int) -> float:
    """Return the GPUs' seconds for all but so many cells; each takes whole ones."""
    long, left = plan.cells.counts[plan.axis], len(plan.cells) - count
    if not left:
        return 0.0
    stacks, cut = divmod(count, long)
    columns = _columns_per_stack(plan)
    whole = sum(choice.executions * choice.seconds for choice in plan.choices)
    spent = sum(columns[stacks:]) / _column_count(plan) * whole
    if cut:
        steps = plan.cells.patch[plan.axis] / plan.patch_out[plan.axis]
        spent -= cut * columns[stacks] * steps * plan.seconds_per_step
    return plan.seconds_for(spent / whole * ceil(left / plan.devices) / left)


def cpu_share(plan: SharedPlan) -> float:
    """Return the share of the output that the processor is to compute."""
    rows, row = (plan.cells.sizes(i) for i in _across(plan))
    stacks, long = [a * b for a in rows for b in row], plan.cells.sizes(plan.axis)
    whole, cut = divmod(plan.cpu_items, len(long))
    voxels = sum(stacks[:whole]) * sum(long)
    return (voxels + stacks[whole] * sum(long[:cut]) if cut else voxels) / prod(plan.output)


def gpu_item_seconds(plan: SharedPlan) -> tuple[float, float]:
    """Return a GPU's seconds in the first stack: to begin a run of cells, and for each cell."""
    columns, axis = _columns_per_stack(plan)[0], plan.axis
    steps = plan.cells.patch[axis] // plan.patch_out[axis]
    return columns * plan.seconds_to_begin, columns * steps * plan.seconds_per_step


def _column_count(plan: SharedPlan) -> int:
    """Return the number of columns, or stacks of patches, of a GPU's plan without cells."""
    return prod(ceil(plan.output[i] / plan.patch_out[i]) for i in _across(plan))


def _columns_per_stack(plan: SharedPlan) -> list[int]:
    """Return the number of GPU columns in each stack of cells."""
    rows, row = ([ceil(size / plan.patch_out[i]) for size in plan.cells.sizes(i)] for i in _across(plan))
    return [a * b for a in rows for b in row]


def _across(plan: SharedPlan) -> tuple[int, int]:
    """Return the two axes across the columns."""
    a, b = (i for i in range(3) if i != plan.axis)
    return a, b
