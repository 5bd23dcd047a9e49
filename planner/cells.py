"""What a processor and GPUs side by side are predicted to compute of an output, cell by cell.

The processor takes cells from the front, those behind each other as one column; GPUs all others (`run.shares.Cells`).
"""

from __future__ import annotations

from bisect import bisect_left
from math import ceil

from znnpy.planner.plan import Plan


def seconds(plan: Plan) -> float:
    """Until both are done."""
    count = dealt(plan)
    return max(seconds_without(plan, count), seconds_beside(plan, count))


def dealt(plan: Plan) -> int:
    """Cells that the processor computes in the time that GPUs take for the others."""

    def late(count: int) -> bool:
        return seconds_beside(plan, count) > seconds_without(plan, count)

    return bisect_left(range(1, 1 + len(plan.cells)), True, key=late)


def seconds_beside(plan: Plan, count: int) -> float:
    """Of the processor for so many cells: it goes on from one to the next until the output ends."""
    assert plan.beside is not None, "only side by side"
    columns = -(-count // plan.cells.counts[plan.axis])
    return count * plan.beside.seconds_per_step + columns * plan.beside.seconds_to_begin


def seconds_without(plan: Plan, count: int) -> float:
    """Of GPUs for all but so many cells; each takes whole ones."""
    long, left = plan.cells.counts[plan.axis], len(plan.cells) - count
    if not left:
        return 0.0
    stacks, cut = divmod(count, long)
    across = _across(plan)
    whole = sum(choice.runs * choice.seconds for choice in plan.choices)
    gone = _columns(plan, stacks) / (across[0] * across[1]) * whole
    if cut:
        columns = _columns(plan, stacks + 1) - _columns(plan, stacks)
        steps = plan.cells.patch[plan.axis] / plan.patch_out[plan.axis]
        gone += cut * columns * steps * plan.seconds_per_step
    return plan.seconds_for(max(0.0, 1 - gone / whole) * ceil(left / plan.devices) / left)


def seconds_per_cell(plan: Plan) -> float:
    """Of a GPU alone, for one behind others, as wide as most are."""
    across, wide = _across(plan), _wide(plan)
    stack = wide[0] * wide[1] / (across[0] * across[1])
    return plan.seconds_for(stack) / plan.cells.counts[plan.axis]


def _across(plan: Plan) -> tuple[int, int]:
    """Columns, or patches, of a GPU's plan along both axes that it does not walk along."""
    a, b = (ceil(plan.output[i] / plan.patch_out[i]) for i in range(3) if i != plan.axis)
    return a, b


def _wide(plan: Plan) -> tuple[int, int]:
    """The same of a cell."""
    a, b = (ceil(plan.cells.patch[i] / plan.patch_out[i]) for i in range(3) if i != plan.axis)
    return a, b


def _columns(plan: Plan, stacks: int) -> int:
    """How many columns of a GPU the first stacks of cells are: the last of a row may be narrower than others."""
    (all_a, all_b), (wide_a, wide_b) = _across(plan), _wide(plan)
    rows, rest = divmod(stacks, ceil(all_b / wide_b))
    before = min(all_a, rows * wide_a)
    return before * all_b + min(wide_a, all_a - before) * min(all_b, rest * wide_b)
