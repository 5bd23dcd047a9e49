"""Leave out of a run what lies outside a mask: steps that need not be computed, and voxels that are zero.

A column keeps its number and its place. Its steps outside the mask are only written, as zeros. A column that streams
may have several parts that are computed, each of which is primed: its first steps read what the later ones need. They
begin so early that every layer has read real voxels alone once there is output. Its results are then the bytes of the
whole column: transforms round a voxel together with others, and these are then the ones of the whole column too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.geometry import AxisGeometry, Interval
from znnpy.graph_columns import GraphCover, GraphStep, TurnedGraph
from znnpy.graph_operations import Operation
from znnpy.network import Network
from znnpy.patches import Box, Column, Columns, Cover, Patch, Piece
from znnpy.planner.plan import Plan
from znnpy.planner.run_plan import RunPlan
from znnpy.run.masked_windows import MaskedWindows
from znnpy.run.pipeline import Writes
from znnpy.run.step_grid import Part, StepGrid
from znnpy.run.step_work import StepWork
from znnpy.shapes import Vec3
from znnpy.volume.mask import WantedOutputs
from znnpy.window_cover import WindowCover

# Words in the names of primitives in which the rounding of a voxel depends on others that are computed with it.
MIXING = ("fft", "cudnn", "host_ram")

# The step that a part of a column begins with, and how many give no output. The column is None for those of a `Cover`.
Lead = Callable[[Column | None, int], tuple[int, int]]


@dataclass(frozen=True)
class MaskedColumns(Columns):
    """The columns of a plan with what a mask leaves of them.

    whole   all columns
    wanted  where outputs are wanted
    lead    where a part of a column begins that gives output from a step on
    """

    whole: Columns
    wanted: WantedOutputs
    lead: Lead
    _touched: dict[int, list[int]] = field(default_factory=dict, repr=False, compare=False)  # steps of columns

    @property
    def counts(self) -> Vec3:
        return self.whole.counts

    @cached_property
    def grid(self) -> StepGrid | None:
        """The steps of a network that slides over a volume, whose mask is looked up for all of them at once."""
        cover = self.whole
        if not isinstance(cover, Cover) or cover.later is not None:
            return None
        (output,) = self.wanted.outputs
        return StepGrid.of(cover, output)

    def _at(self, place: Vec3) -> Column:
        _, rows, wide = self.counts
        number = (place[0] * rows + place[1]) * wide + place[2]
        column = self.whole[number]
        wanted = self._wanted_steps(number, column) if self.grid is None else self.grid.wanted_steps(place)
        return Column(tuple(_left(column, self.parts(column, wanted))))

    def _wanted_steps(self, number: int, column: Column) -> list[int]:
        """Return the steps of a column whose output may be wanted."""
        if (found := self._touched.get(number)) is None:
            steps = enumerate(column.steps)
            found = [i for i, step in steps if self.wanted.touches([one.write for one in step.pieces])]
            if len(column.steps) > 1:  # patches may be very many, and each is looked up in a moment
                self._touched[number] = found
        return found

    def parts(self, column: Column | None, wanted: Sequence[int]) -> list[Part]:
        """Return the parts of a column that are computed where these of its steps are wanted."""
        found: list[Part] = []
        for step in wanted:
            if not found or step > found[-1][2]:
                begin, silent = self.lead(column, step)
                if not found or begin > found[-1][2]:
                    found.append((begin, begin + silent, step + 1))
                    continue
            found[-1] = (*found[-1][:2], step + 1)  # what lies between is computed too
        return found

    @property
    def skipped(self) -> int:
        """Voxels of the first output that are not computed."""
        if self.grid is None:
            return sum(step.write.voxels for column in self for step in column.steps if not step.computed)
        return self.grid.voxels_outside(partial(self.parts, None))


def _left(column: Column, parts: Sequence[Part]) -> Iterator[Patch]:
    """Yield the steps of a column that are computed in these parts, and zeros for all others that have output."""
    waiting = list(parts)
    for number, step in enumerate(column.steps):
        while waiting and number >= waiting[0][2]:
            del waiting[0]
        if waiting and waiting[0][0] <= number:
            begin, gives, _ = waiting[0]
            if number == begin:
                for silent in column.steps[begin:gives]:
                    if silent.writes:
                        yield replace(silent, computed=False)
            yield step if number >= gives else _without_output(step)
        elif step.writes:
            yield replace(step, computed=False)


def _without_output(step: Patch) -> Patch:
    """Return a step that is computed, and of which nothing is written."""

    def nothing(box: Box) -> Box:
        return Box(box.lo, box.lo)

    others = tuple(Piece(one.out, nothing(one.write)) for one in step.others)
    return replace(step, write=nothing(step.write), others=others)


def work_items(plan: RunPlan, network: Network, wanted: WantedOutputs | None) -> Columns:
    """Return the work items of a run, and of each what a mask leaves; cells are computed as a whole, or not at all."""
    items = plan.work_items(network)
    if wanted is None:
        return items
    if isinstance(items, WindowCover):
        return MaskedWindows(items, wanted)
    return MaskedColumns(items, wanted, _alone if plan.sharing is not None else lead_of(plan.main, network))


def _alone(column: Column | None, step: int) -> tuple[int, int]:
    """Return that a patch or cell begins with itself."""
    del column
    return step, 0


def lead_of(plan: Plan, network: Network) -> Lead:
    """Return where parts of the columns of a plan begin."""
    if not plan.streams:
        return _alone
    if plan.area is not None:
        return GraphLead(plan.graph_cover(network))
    thick = plan.patch_out[plan.axis]
    margins = [margin[plan.axis] for margin in network.margins]
    same = 0  # planes behind the first that is read, from which on a layer gives what it gives in the whole column
    for choice in plan.choices:
        same += margins[choice.layers[0]] - margins[choice.layers[1] + 1]
        if any(word in choice.primitive for word in MIXING):
            same = -(-same // thick) * thick
    early, ahead = -(-same // thick), plan.cover(network).ahead

    def lead(column: Column | None, step: int) -> tuple[int, int]:
        del column
        return (0, 0) if step <= early else (step - early, ahead)

    return lead


class GraphLead:
    """Finds where a part of a column of a graph begins: a `Lead`."""

    def __init__(self, cover: GraphCover) -> None:
        self._graph = cover.graph
        self._found: dict[tuple[int, int, int], int] = {}  # by the column along its axis, and the step

    def __call__(self, column: Column | None, step: int) -> tuple[int, int]:
        assert column is not None, "columns of a graph are no `Cover`"
        here = column.steps[step].step
        assert isinstance(here, GraphStep), "patches of a graph say what is computed"
        key = here.begin[0], here.end[0], step
        if key not in self._found:
            begin = step
            while begin > 0 and not gives_all(self._graph, here, begin, step):
                begin -= 1
            self._found[key] = begin
        begin = self._found[key]
        return (0, 0) if begin == 0 else (begin, step - begin)


def gives_all(graph: TurnedGraph, step: GraphStep, begin: int, end: int) -> bool:
    """Return whether a column that begins with step `begin` gives in step `end` what the whole column gives there.

    The results of an operation in a step count as one: all of them are the same once all that it reads is.
    """
    planes, axis = graph.planes(step.begin[0], step.end[0], step.thick), graph.geometry.axes[0]
    never = 2**62
    since = dict.fromkeys(graph.stored, never)  # the plane from which on each tensor is that of the whole column
    for number in range(begin, end + 1):
        new = planes.step(number).new
        if new[0].size:
            since[0] = min(since[0], new[0].lo)
        for operation in graph.operations:
            mine = new[operation.tensor]
            if not mine.size:
                continue
            same = all(lo >= since[tensor] for tensor, lo in _reads(axis, operation, mine.lo, mine.hi))
            since[operation.tensor] = min(since[operation.tensor], mine.lo) if same else never
    given = zip(graph.network.outputs, planes.outputs(end), strict=True)
    return all(one.lo >= since[tensor] for tensor, one in given if one.size)


def _reads(axis: AxisGeometry, operation: Operation, lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """Yield the tensors that an operation reads for some planes, each with the first plane."""
    first = axis.read(operation.layer, Interval(lo, hi), axis.sources[operation.layer][0]).lo
    for one in operation.reads:
        yield one.tensor, (first + one.shift[0]) // one.factor[0]
    if (addend := operation.addend) is not None:
        yield addend.tensor, lo + addend.shift[0]


def share_left(plan: RunPlan, network: Network, wanted: WantedOutputs) -> float:
    """Return the share of a plan's work that a mask leaves."""
    items = work_items(plan, network, wanted)
    if plan.sharing is not None:
        voxels = sum(column.voxels for column in items)
        return sum(column.computed_voxels for column in items) / voxels
    if isinstance(items, MaskedWindows):
        return items.share
    work = StepWork(plan.main, network)
    assert isinstance(items, MaskedColumns)
    if (grid := items.grid) is not None:
        return grid.work(partial(items.parts, None), work.of_first) / work.of_all(grid.cover)
    whole = sum(sum(work.of_steps(column.steps)) for column in items.whole)
    return sum(sum(work.of_steps(column.steps)) for column in items) / whole


@dataclass(frozen=True)
class MaskedOutput:
    """An output (see `pipeline.Writes`) that is zero outside a mask."""

    output: Writes
    wanted: WantedOutputs
    maps: tuple[int, ...]  # of each output

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.output.dtype

    @property
    def done(self) -> Any:
        return self.output.done

    def write(self, box: Box, voxels: npt.NDArray[Any], number: int) -> None:
        """Write voxels, of which those outside the mask are overwritten with zeros."""
        self.wanted.outputs[number].clear(box, voxels)
        self.output.write(box, voxels, number)

    def leave_out(self, box: Box, number: int) -> None:
        """Write zeros to a box that was not computed."""
        zero = np.zeros((), self.dtype)
        self.output.write(box, np.broadcast_to(zero, (self.maps[number], *box.size)), number)

    def finish_column(self, index: int) -> None:
        self.output.finish_column(index)
