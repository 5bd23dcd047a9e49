"""The planes of every tensor in a column of a graph: which each step computes, and which it needs in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from znnpy.geometry import AxisGeometry, Interval
from znnpy.graph_operations import Operation
from znnpy.many_intervals import Intervals, Numbers, frontiers, read_by_each, regions_of_each

NEVER = np.iinfo(np.int64).max  # a plane behind all others


@dataclass(frozen=True, slots=True)
class StepPlanes:
    """The planes of every tensor in one step of a column.

    new   planes that the step computes; of the input, those that it reads
    held  planes that it needs in memory: kept ones and the new ones
    """

    new: tuple[Interval, ...]
    held: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class ColumnPlanes:
    """The planes of every tensor in a column, along the axis that it walks.

    region   of the whole column, of each tensor
    ends     planes up to which each tensor is known: before the first step, and after each; a row for each tensor
    first    the first plane that each step needs in memory; a row for each tensor
    outputs  per step, the planes of each output that it gives
    """

    region: tuple[Interval, ...]
    ends: Numbers
    first: Numbers
    outputs: tuple[tuple[Interval, ...], ...]

    @property
    def new(self) -> Intervals:
        """The planes that steps compute: a row for each tensor, a column for each step."""
        return Intervals(self.ends[:, :-1], self.ends[:, 1:])

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self.outputs)

    def step(self, number: int) -> StepPlanes:
        """Return the planes of a step."""
        begins, ends = self.ends[:, number].tolist(), self.ends[:, number + 1].tolist()
        new = tuple(map(Interval, begins, ends))
        return StepPlanes(new, tuple(map(Interval, self.first[:, number].tolist(), ends)))


def of_ranges(axis: AxisGeometry, wanted: Sequence[Sequence[Interval]]) -> Intervals:
    """Return the voxels of every tensor that each of many ranges needs, with what it wants of each output.

    The result has a row for each tensor.
    """
    ends = np.array(wanted, np.int64)  # (range, output, 2)
    return regions_of_each(axis, [Intervals(*ends[:, number].T) for number in range(ends.shape[1])])


def of_one_step(region: tuple[Interval, ...], wanted: Sequence[Interval]) -> ColumnPlanes:
    """Return the planes of a column that is computed at once."""
    ends = np.array(region, np.int64)
    return ColumnPlanes(region, ends, ends[:, :1], (tuple(wanted),))


def of_column(
    axis: AxisGeometry,
    operations: Sequence[Operation],
    region: tuple[Interval, ...],
    wanted: Sequence[Interval],
    known: Sequence[Sequence[int]],
    begin: Sequence[int],
    thick: Sequence[int],
) -> ColumnPlanes:
    """Return the planes of a column.

    region  of each tensor
    wanted  of each output
    known   voxel up to which each output is known after each step that gives output
    begin   voxel of each output at which the column begins, were there no faces
    thick   voxels of each output in a step
    """
    ahead = _ahead(axis, region, begin, thick)
    until = [[want.lo for want in wanted]] * (1 + ahead.shape[1]) + [list(one) for one in known]
    given = [
        tuple(Interval(lo, hi).within(*want) for lo, hi, want in zip(first, second, wanted, strict=True))
        for first, second in pairwise(until)
    ]
    nothing = np.array(region, np.int64)[:, :1]
    ends = np.concatenate((nothing, ahead, frontiers(axis, np.array(known, np.int64).T, region)), axis=1)
    new = Intervals(ends[:, :-1], ends[:, 1:])
    return ColumnPlanes(region, ends, _first(axis, operations, new, given), tuple(given))


def _ahead(axis: AxisGeometry, region: Sequence[Interval], begin: Sequence[int], thick: Sequence[int]) -> Numbers:
    """Return the frontiers of the steps before the first output: a column for each that computes something."""
    nothing, count = np.array(region, np.int64)[:, :1], 1
    while True:
        known = np.array(begin)[:, None] - np.array(thick)[:, None] * np.arange(count)
        found = np.concatenate((nothing, frontiers(axis, known, region)[:, ::-1]), axis=1)
        if (found[:, 1] == nothing[:, 0]).all():
            break
        count *= 2
    changes = (found[:, 1:] != found[:, :-1]).any(axis=0)
    return found[:, 1:][:, changes]


def _first(
    axis: AxisGeometry, operations: Sequence[Operation], new: Intervals, given: Sequence[tuple[Interval, ...]]
) -> Numbers:
    """Return the first plane that each step needs of each tensor: the first that it or a later step reads or gives.

    new    planes that the steps compute: a row for each tensor
    given  planes of each output that they give
    """
    first = np.where(new.size > 0, new.lo, NEVER)

    def least(tensor: int, planes: Numbers) -> None:
        first[tensor] = np.minimum(first[tensor], planes)

    for operation in operations:
        mine = new.row(operation.tensor)
        read = read_by_each(axis, operation.layer, mine, axis.sources[operation.layer][0]).lo
        for one in operation.reads:
            least(one.tensor, np.where(mine.size > 0, (read + one.shift[0]) // one.factor[0], NEVER))
        if (addend := operation.addend) is not None:
            least(addend.tensor, np.where(mine.size > 0, mine.lo + addend.shift[0], NEVER))
    for number, tensor in enumerate(axis.outputs):
        lo, hi = np.array([pieces[number] for pieces in given], np.int64).T
        least(tensor, np.where(hi > lo, lo, NEVER))
    return np.minimum(np.minimum.accumulate(first[:, ::-1], axis=1)[:, ::-1], new.hi)
