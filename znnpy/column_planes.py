"""The planes of every tensor in a column of a graph: which each step computes, and which it needs in memory.

A column may have thousands of steps, and a graph thousands of tensors: steps are worked out in blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt

from znnpy.geometry import AxisGeometry, Interval
from znnpy.graph_operations import Operation
from znnpy.many_intervals import NONE, Intervals, Numbers, Pooling, frontiers, read_by_each

NEVER = np.iinfo(np.int64).max  # a plane behind all others
NUMBER_BYTES = 8  # of an int64
BLOCK_NUMBERS = 2**17  # of an array of a block: a graph of thousands of tensors needs no more for thousands of steps
FEWEST_STEPS = 64  # of a block: fewer would make arrays that cost more to call for than to fill
KEPT_BLOCKS = 2  # of a column: that which is computed, and that which is read meanwhile


@dataclass(frozen=True, slots=True)
class StepPlanes:
    """The planes of every tensor in one step of a column.

    new   planes that the step computes; of the input, those that it reads
    held  planes that it needs in memory: kept ones and the new ones
    """

    new: tuple[Interval, ...]
    held: tuple[Interval, ...]


def block_of(tensors: int) -> int:
    """Return the steps or columns that are worked out at once."""
    return max(FEWEST_STEPS, BLOCK_NUMBERS // tensors)


def planes_bytes(tensors: int, outputs: int, steps: int) -> int:
    """Return the most bytes of the arrays of a column with so many steps."""
    each = min(block_of(tensors), steps)
    blocks = -(-steps // each)
    return NUMBER_BYTES * (tensors * (blocks + min(KEPT_BLOCKS, blocks) * (2 * each + 1)) + 3 * outputs * steps)


@dataclass(frozen=True, slots=True)
class StepBlock:
    """The planes of every tensor in successive steps of a column.

    begin  number of the first of these steps
    ends   planes up to which each tensor is known: before the first step, and after each; a row for each tensor
    first  the first plane that each step needs in memory; a row for each tensor
    """

    begin: int
    ends: Numbers
    first: Numbers

    @property
    def new(self) -> Intervals:
        """The planes that steps compute: a row for each tensor, a column for each step."""
        return Intervals(self.ends[:, :-1], self.ends[:, 1:])


@dataclass(frozen=True, slots=True)
class ColumnSteps:
    """The outputs and regions that the steps of a column follow from.

    region    of the whole column, of each tensor
    known     voxel up to which each output is known after each step, or NONE: a row for each output
    given     voxels of each output that steps give: a row for each output
    poolings  as for `frontiers`
    whole     there is one step, which computes the region and holds it
    """

    axis: AxisGeometry
    operations: Sequence[Operation]
    region: tuple[Interval, ...]
    known: Numbers
    given: Intervals
    poolings: Sequence[Pooling] = ()
    whole: bool = False

    @classmethod
    def of(
        cls,
        axis: AxisGeometry,
        operations: Sequence[Operation],
        region: tuple[Interval, ...],
        wanted: Sequence[Interval],
        known: Numbers,
        begin: Sequence[int],
        thick: Sequence[int],
        poolings: Sequence[Pooling] = (),
    ) -> ColumnSteps:
        """Return the steps of a column.

        region    of each tensor
        wanted    of each output
        known     voxel up to which each output is known after each step that gives output: a row for each output
        begin     voxel of each output at which the column begins, were there no faces
        thick     voxels of each output in a step
        poolings  as for `frontiers`
        """
        some = np.array([want.size > 0 for want in wanted])[:, None]  # what an output would need is not computed else
        ahead = _ahead(axis, region, some, begin, thick, poolings)
        lo, hi = (side[:, None] for side in np.array(wanted, np.int64).T)
        until = np.concatenate((np.repeat(lo, 1 + ahead.shape[1], axis=1), known), axis=1)
        inside = np.minimum(np.maximum(until, lo), hi)
        upto = np.concatenate((ahead, np.where(some, known, NONE)), axis=1)
        return cls(axis, operations, region, upto, Intervals(inside[:, :-1], inside[:, 1:]), poolings)

    @property
    def count(self) -> int:
        """How many steps there are."""
        return int(self.known.shape[1])

    @property
    def silent(self) -> int:
        """How many steps give no output."""
        return int((self.given.size == 0).all(axis=0).sum())

    @property
    def nothing(self) -> Numbers:
        """The frontiers before the first step."""
        return np.array(self.region, np.int64)[:, :1]

    def blocks(self) -> Iterator[tuple[StepBlock, Numbers]]:
        """Yield all blocks, the last first, each with the first plane of each tensor that steps behind it need."""
        later = np.full(len(self.region), NEVER)
        for begin in reversed(range(0, self.count, block_of(len(self.region)))):
            block, before = self.block(begin, later)
            yield block, later
            later = before

    def block(self, begin: int, later: Numbers) -> tuple[StepBlock, Numbers]:
        """Return the block that begins with a step, and the first planes that it and later steps need."""
        if self.whole:
            ends = np.array(self.region, np.int64)
            return StepBlock(0, ends, ends[:, :1]), later
        end = min(begin + block_of(len(self.region)), self.count)
        ends = frontiers(self.axis, self.known[:, max(0, begin - 1) : end], self.region, self.poolings)
        if begin == 0:
            ends = np.concatenate((self.nothing, ends), axis=1)
        new = Intervals(ends[:, :-1], ends[:, 1:])
        given = Intervals(self.given.lo[:, begin:end], self.given.hi[:, begin:end])
        first = _first(self.axis, self.operations, new, given)
        np.minimum(first[:, -1], later, out=first[:, -1])
        backwards = first[:, ::-1]
        np.minimum.accumulate(backwards, axis=1, out=backwards)
        before = first[:, 0].copy()
        return StepBlock(begin, ends, np.minimum(first, new.hi, out=first)), before


class ColumnPlanes:
    """The planes of every tensor in a column, along the axis that it walks; several threads may ask for them."""

    def __init__(self, steps: ColumnSteps) -> None:
        self.region = steps.region
        self.steps = steps.count
        self._made = steps
        self._each = block_of(len(steps.region))
        self._later: dict[int, Numbers] = {}  # by the first step of a block
        self._blocks = OrderedDict[int, StepBlock]()
        self._lock = Lock()
        for block, later in steps.blocks():  # the last is the first block
            self._later[block.begin] = later
            self._keep(block)

    def new(self, tensor: int, number: int) -> Interval:
        """Return the planes of a tensor that a step computes."""
        block = self._block(number)
        here = number - block.begin
        return Interval(int(block.ends[tensor, here]), int(block.ends[tensor, here + 1]))

    def step(self, number: int) -> StepPlanes:
        """Return the planes of a step."""
        block = self._block(number)
        here = number - block.begin
        begins, ends = block.ends[:, here].tolist(), block.ends[:, here + 1].tolist()
        new = tuple(map(Interval, begins, ends))
        return StepPlanes(new, tuple(map(Interval, block.first[:, here].tolist(), ends)))

    def outputs(self, number: int) -> tuple[Interval, ...]:
        """Return the planes of each output that a step gives."""
        lo, hi = (side[:, number].tolist() for side in self._made.given)
        return tuple(map(Interval, lo, hi))

    @property
    def nbytes(self) -> int:
        """The most bytes of its arrays."""
        return planes_bytes(len(self.region), len(self._made.known), self.steps)

    def _block(self, number: int) -> StepBlock:
        """Return the block that holds a step."""
        begin = number - number % self._each
        with self._lock:
            block = self._blocks.pop(begin, None)
            if block is None:
                block, _ = self._made.block(begin, self._later[begin])
            self._keep(block)
        return block

    def _keep(self, block: StepBlock) -> None:
        """Keep a block as the latest."""
        self._blocks[block.begin] = block
        if len(self._blocks) > KEPT_BLOCKS:
            self._blocks.popitem(last=False)


def known_after_steps(voxels: Sequence[int], sizes: Sequence[int], begin: int, end: int, thick: int) -> Numbers:
    """Return up to which voxel each output is known after each step that gives output: a row for each output.

    voxels  of each output in a period, and its size
    begin   the first period of the column; end: that behind its last; thick: periods of a step
    """
    stops = np.append(np.arange(begin + thick, end, thick, dtype=np.int64), end)
    known: Numbers = np.minimum(np.array(voxels, np.int64)[:, None] * stops, np.array(sizes, np.int64)[:, None])
    return known


def of_one_step(
    axis: AxisGeometry, operations: Sequence[Operation], region: tuple[Interval, ...], wanted: Sequence[Interval]
) -> ColumnSteps:
    """Return the steps of a column that is computed at once."""
    lo, hi = (side[:, None] for side in np.array(wanted, np.int64).T)
    return ColumnSteps(axis, operations, region, hi, Intervals(lo, hi), whole=True)


def _ahead(
    axis: AxisGeometry,
    region: Sequence[Interval],
    some: npt.NDArray[np.bool_],
    begin: Sequence[int],
    thick: Sequence[int],
    poolings: Sequence[Pooling],
) -> Numbers:
    """Return up to where outputs would be known after the steps before the first output that compute something."""
    nothing = np.array(region, np.int64)[:, 0]
    found: list[Numbers] = []
    number, count, most = 0, 4, block_of(len(region))  # steps are counted from the first output on, back
    while True:
        back = np.arange(number + count, number - 1, -1)
        known = np.where(some, np.array(begin)[:, None] - np.array(thick)[:, None] * back, NONE)
        ends = frontiers(axis, known, region, poolings)
        changes = (ends[:, 1:] != ends[:, :-1]).any(axis=0)
        found.append(known[:, 1:][:, changes])
        if (ends[:, 0] == nothing).all():
            return np.concatenate(found[::-1], axis=1)
        number, count = number + count, min(2 * count, most)


def _first(axis: AxisGeometry, operations: Sequence[Operation], new: Intervals, given: Intervals) -> Numbers:
    """Return the first plane that each step reads, computes or gives of each tensor.

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
        lo, hi = given.row(number)
        least(tensor, np.where(hi > lo, lo, NEVER))
    return first
