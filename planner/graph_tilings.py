"""The sizes of patches and columns of a graph: what each tensor holds, and how much each operation computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from znnpy.geometry import Interval
from znnpy.graph_columns import GraphCover, StepPlanes, TurnedGraph
from znnpy.graph_operations import Operation, Region, shape_of
from znnpy.kernels.contract import Footprint
from znnpy.layer_shapes import LayerShape
from znnpy.patches import Box
from znnpy.planner.layout import Tensor, aligned
from znnpy.shapes import FLOAT32, Vec3, turned_back

# Where a tensor lies: in the arena, during a step; in the arena with planes kept beside it; or beside the arena, where
# its planes stay from step to step.
Storage = Literal["arena", "carried", "resident"]


@dataclass(frozen=True)
class GraphTiling:
    """Patches or columns of one size, and what follows for tensors and operations."""

    cover: GraphCover

    @property
    def graph(self) -> TurnedGraph:
        return self.cover.graph

    @property
    def streams(self) -> bool:
        """Return whether columns keep planes from step to step."""
        return self.cover.column > 0

    @cached_property
    def patch_out(self) -> Vec3:
        """Most voxels of the first output in a step, axes (z, y, x)."""
        sizes = [periods * voxels for periods, voxels in zip(self.cover.patch, self.graph.voxels, strict=True)]
        return turned_back((sizes[0], sizes[1], sizes[2]), self.graph.axis)

    @cached_property
    def patch_in(self) -> Vec3:
        """Most voxels that a step reads, axes (z, y, x)."""
        size = (self.new[0].size, *(widest[0].size for widest in self.across))
        return turned_back((size[0], size[1], size[2]), self.graph.axis)

    @cached_property
    def steps(self) -> tuple[StepPlanes, ...]:
        """The steps of the first two columns along the axis and of the last: the others are like the second."""
        ranges, thick = self.cover.ranges(0), self.cover.patch[0] if self.streams else 0
        some = dict.fromkeys((*ranges[:2], ranges[-1]))
        return tuple(step for begin, end in some for step in self.graph.planes(begin, end, thick).steps)

    @cached_property
    def new(self) -> tuple[Interval, ...]:
        """The most planes of each tensor that a step computes."""
        return tuple(max(column, key=_size) for column in zip(*(step.new for step in self.steps), strict=True))

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The most planes of each tensor that a step holds."""
        return tuple(max(map(_size, column)) for column in zip(*(step.held for step in self.steps), strict=True))

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The most planes of each tensor that a step finds already computed."""
        return tuple(
            max(held.size - new.size for held, new in zip(helds, news, strict=True))
            for helds, news in zip(
                zip(*(step.held for step in self.steps), strict=True),
                zip(*(step.new for step in self.steps), strict=True),
                strict=True,
            )
        )

    @cached_property
    def across(self) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
        """The widest region of each tensor along the second axis and along the third."""
        second, third = (
            tuple(
                max(column, key=_size)
                for column in zip(*(self.graph.regions(along, *one) for one in self.cover.ranges(along)), strict=True)
            )
            for along in (1, 2)
        )
        return second, third

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Voxels of each tensor that are computed for the whole output."""
        sums = [
            [sum(map(_size, column)) for column in zip(*regions, strict=True)]
            for regions in ([self.graph.regions(along, *one) for one in self.cover.ranges(along)] for along in range(3))
        ]
        return tuple(map(prod, zip(*sums, strict=True)))

    def region(self, tensor: int) -> Region:
        """Return the largest region of a tensor that a step computes."""
        return self.new[tensor], self.across[0][tensor], self.across[1][tensor]

    def shape(self, operation: Operation) -> LayerShape:
        """Return the shape of an operation in a step in which it computes the most."""
        return shape_of(self.graph.geometry, operation, self.region(operation.tensor))

    def executions(self, operation: Operation) -> int:
        """Return how often that shape is computed for the whole output, rounded up."""
        whole = prod(map(_size, self.region(operation.tensor)))
        return max(1, -(-self.totals[operation.tensor] // max(1, whole)))

    def plane_bytes(self, tensor: int) -> int:
        """Return the bytes of a plane of a tensor in memory."""
        y, x = (widest[tensor].size for widest in self.across)
        return FLOAT32 * self.graph.network.maps[tensor] * y * x

    def storage(self, tensor: int) -> Storage:
        """Return where a tensor lies. One that keeps as many planes as it gets stays: copying them would cost more."""
        if not self.kept[tensor]:
            return "arena"
        return "resident" if self.kept[tensor] >= self.new[tensor].size else "carried"

    def capacity(self, tensor: int) -> int:
        """Return the planes for which a resident tensor has room: in every other step they need not be moved."""
        return self.held[tensor] + self.new[tensor].size

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """The tensors in memory: the input, and what operations give."""
        return (0, *(operation.tensor for operation in self.graph.operations))

    @cached_property
    def carries(self) -> int:
        """Bytes beside the arena that stay from step to step."""
        found = 0
        for tensor in self.stored:
            storage = self.storage(tensor)
            planes = {"arena": 0, "carried": self.kept[tensor], "resident": self.capacity(tensor)}[storage]
            found += planes * self.plane_bytes(tensor)
        return found

    def carry_traffic(self, tensor: int) -> int:
        """Return the bytes that are moved in a step to keep planes of a tensor."""
        traffic = {"arena": 0, "carried": 4, "resident": 1}[self.storage(tensor)]
        return traffic * self.kept[tensor] * self.plane_bytes(tensor)

    def tensors(self, footprints: Sequence[Footprint]) -> tuple[Tensor, ...]:
        """Return the tensors of a step in the arena, not yet placed: outputs of operations, and their scratch.

        An operation's stages are ticks; a tensor is alive from its operation to the last that reads it, an output of
        the network for one more tick. Inputs and outputs of an operation never share memory.
        """
        graph, ticks, tick = self.graph, [], 1  # in tick 0 the input is loaded
        for footprint in footprints:
            ticks.append((tick, tick + footprint.stages - 1))
            tick += footprint.stages
        first, last = {0: 0}, {0: 0}
        for operation, (begin, end) in zip(graph.operations, ticks, strict=True):
            first[operation.tensor] = begin
            last[operation.tensor] = max(last.get(operation.tensor, 0), end)
            for read in operation.reads:
                last[read.tensor] = max(last[read.tensor], end)
        for tensor in graph.network.outputs:
            last[tensor] = tick
        found = [
            Tensor(f"x{tensor}", self.held[tensor] * self.plane_bytes(tensor), first[tensor], last[tensor])
            for tensor in self.stored
            if self.storage(tensor) != "resident"
        ]
        for index, (footprint, (begin, _)) in enumerate(zip(footprints, ticks, strict=True)):
            found += [
                Tensor(f"step{index}.{scratch.name}", scratch.nbytes, begin + scratch.first, begin + scratch.last)
                for scratch in footprint.scratch
            ]
        return tuple(found)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Bytes of tensors in the arena while each operation runs, its scratch not counted."""
        one = [Footprint()] * len(self.graph.operations)
        tensors = self.tensors(one)
        return tuple(
            sum(aligned(tensor.nbytes) for tensor in tensors if tensor.first <= tick <= tensor.last)
            for tick in range(1, len(one) + 1)
        )


def _size(interval: Interval) -> int:
    return interval.size


SPLITS = (
    1,
    2,
    3,
    4,
    5,
    6,
    8,
    10,
    12,
    16,
    20,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
)  # columns along an axis that are tried
THICK = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # periods of a step that are tried


def tilings(graph: TurnedGraph, region: Box, *, streams: bool, patch: Vec3 | None = None) -> Iterator[GraphTiling]:
    """Yield the sizes of patches or columns to try; `patch` fixes the periods of a step along each axis."""
    whole = GraphCover(graph, (1, 1, 1), 0, region)
    periods = [end - begin for begin, end in zip(*whole.periods, strict=True)]
    sizes = [sorted({-(-count // split) for split in SPLITS if split <= count}, reverse=True) for count in periods]
    if patch is not None:
        sizes = [[min(size, count)] for size, count in zip(patch, periods, strict=True)]
    thicks = [size for size in THICK if size < periods[0]] if streams and patch is None else sizes[0]
    if streams and patch is not None and patch[0] >= periods[0]:
        return
    for thick in thicks:
        column = -(-periods[0] // thick) * thick if streams else 0
        for y in sizes[1]:
            for x in sizes[2]:
                yield GraphTiling(GraphCover(graph, (thick, y, x), column, region))
