"""The sizes of patches and columns of a graph: what each tensor holds, and how much each operation computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt

from znnpy.column_planes import planes_bytes
from znnpy.geometry import Interval
from znnpy.graph_columns import KEPT_PLANES, Area, GraphCover, TurnedGraph
from znnpy.graph_operations import Operation, Region
from znnpy.graph_shapes import GraphConvShape, TransposeShape
from znnpy.kernels.contract import Footprint, Primitive, Scratch, Variant
from znnpy.layer_shapes import LayerShape
from znnpy.layers import Maxout, Pad
from znnpy.many_intervals import Intervals, Numbers, needed_by_each, read_by_each
from znnpy.option_values import DeviceKind
from znnpy.planner.graph_extents import AxisPlanes, Figures, Storage, Widths, blocks_of
from znnpy.planner.layout import ALIGNMENT, Tensor, aligned
from znnpy.planner.memory import StageMemory
from znnpy.shapes import Vec3, itemsize_of, turned_back


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

    @property
    def output(self) -> Vec3:
        """Voxels (z, y, x) that are predicted of the first output."""
        return self.cover.region.size

    @property
    def values(self) -> int:
        """The most values that a step gives."""
        return self.cover.values

    @property
    def figures(self) -> Figures:
        """The figures that all sizes share."""
        return self.graph.remembered("figures", lambda: Figures.of(self.graph))

    @cached_property
    def patch_out(self) -> Vec3:
        """Most voxels of the first output in a step, axes (z, y, x)."""
        sizes = [periods * voxels for periods, voxels in zip(self.cover.patch, self.graph.voxels, strict=True)]
        return turned_back((sizes[0], sizes[1], sizes[2]), self.graph.axis)

    @cached_property
    def patch_in(self) -> Vec3:
        """Most voxels that a step reads, axes (z, y, x)."""
        z, y, x = (interval.size for interval in self.region(0))
        return turned_back((z, y, x), self.graph.axis)

    def _key(self, along: int) -> tuple[int, ...]:
        """Return what decides about the regions of all steps or columns along an axis."""
        cover = self.cover
        thick = cover.patch[0] if along == 0 and self.streams else 0
        return along, cover.periods[0][along], cover.periods[1][along], cover.grid[along], thick

    @cached_property
    def axis_planes(self) -> AxisPlanes:
        """The planes of the columns along their axis; equal for all tilings with the same columns and steps."""
        return self.graph.remembered(("axis planes", *self._key(0)), lambda: AxisPlanes.of(self.cover))

    @cached_property
    def _widths(self) -> tuple[Widths, Widths]:
        """The regions of the columns along the other axes; equal for all tilings with columns as wide."""
        second, third = (
            self.graph.remembered(("widths", *self._key(along)), partial(Widths.of, self.cover, along))
            for along in (1, 2)
        )
        return second, third

    @property
    def steps(self) -> int:
        """The number of steps of all columns along the axis."""
        return self.axis_planes.steps

    def held(self, tensor: int) -> int:
        """Return the most planes of a tensor that a step holds."""
        return int(self.axis_planes.held[tensor])

    def kept(self, tensor: int) -> int:
        """Return the most planes of a tensor that a step finds already computed."""
        return int(self.axis_planes.kept[tensor])

    @property
    def totals(self) -> npt.NDArray[np.float64]:
        """Voxels of each tensor that are computed for the whole output."""
        second, third = self._widths
        return self.axis_planes.totals.astype(np.float64) * second.totals * third.totals

    @property
    def kinds(self) -> int:
        """About how many shapes all operations have together: of each, sizes along every axis in all combinations."""
        second, third = self._widths
        return int((self.axis_planes.sizes * second.sizes * third.sizes)[self.figures.computed].sum())

    def region(self, tensor: int) -> Region:
        """Return the largest region of a tensor that a step computes."""
        z, y, x = (one.row(tensor) for one in (self.axis_planes.new, *(widths.widest for widths in self._widths)))
        return Interval(int(z.lo), int(z.hi)), Interval(int(y.lo), int(y.hi)), Interval(int(x.lo), int(x.hi))

    def shape(self, operation: Operation) -> LayerShape:
        """Return the shape of an operation in a step in which it computes the most."""
        return self.graph.shape_of(operation, self.region(operation.tensor))

    def shapes(self, operation: Operation) -> tuple[LayerShape, ...]:
        """Return all shapes of an operation: those at faces of the volume differ in padding and size."""
        found = (self._distinct(along)[operation.result] for along in range(3))
        return tuple(dict.fromkeys(self.graph.shape_of(operation, (z, y, x)) for z, y, x in product(*found)))

    def _distinct(self, along: int) -> dict[int, list[Interval]]:
        """Return one region along an axis for each kind that an operation has there, by its tensor."""
        return self.graph.remembered(("distinct", *self._key(along)), partial(self._found_distinct, along))

    def _found_distinct(self, along: int) -> dict[int, list[Interval]]:
        found = {operation.tensor: Intervals(NOTHING, NOTHING) for operation in self.graph.operations}
        for regions, _ in blocks_of(self.cover, along):
            some = regions.size > 0
            for operation in self.graph.operations:
                tensor = operation.tensor
                mine = (side[tensor][some[tensor]] for side in regions)
                found[tensor] = self._one_of_each(operation, along, Intervals(*map(np.append, mine, found[tensor])))
        return {
            tensor: [Interval(lo, hi) for lo, hi in zip(*(side.tolist() for side in each), strict=True)]
            for tensor, each in found.items()
        }

    def _one_of_each(self, operation: Operation, along: int, regions: Intervals) -> Intervals:
        """Return the first region of each kind."""
        _, places = np.unique(self._kinds(operation, along, regions), axis=1, return_index=True)
        return Intervals(regions.lo[places], regions.hi[places])

    def _kinds(self, operation: Operation, along: int, regions: Intervals) -> Numbers:
        """Return what distinguishes regions of an operation along an axis: a column for each region.

        Regions with equal columns have equal shapes.
        """
        axis, network = self.graph.geometry.axes[along], self.graph.network
        source, size = network.sources[operation.layer][0], axis.sizes[operation.tensor]
        need = needed_by_each(axis.layers[operation.layer], regions, axis.sizes[source])
        read = need.within(0, axis.sizes[source])
        layer = network.layers[operation.layer]
        faces: tuple[Numbers, ...] = ()
        if isinstance(layer, Pad):  # how much of the padding the region holds
            faces = np.minimum(regions.lo, layer.before[along]), np.minimum(size - regions.hi, layer.behind[along])
        place = regions.lo % axis.voxels(operation.tensor)
        return np.stack((regions.size, read.size, read.lo - need.lo, need.hi - read.hi, place, *faces))

    def footprint(self, operation: Operation, primitive: Primitive, variant: Variant, threads: int) -> Footprint:
        """Return the bytes that a primitive needs at most, over all shapes of an operation."""
        whole = primitive.footprint(self.shape(operation), variant, threads)
        most, allowance = {one.name: one for one in whole.scratch}, whole.allowance
        for shape in self.shapes(operation):
            one = primitive.footprint(shape, variant, threads)
            allowance = max(allowance, one.allowance)
            for part in one.scratch:  # a small shape may have some that the largest lacks
                if part.name not in most or part.nbytes > most[part.name].nbytes:
                    most[part.name] = part
        scratch = tuple(most.values())
        if copied := self._copied(operation):
            scratch = (*scratch, Scratch(COPIED, copied, last=whole.stages - 1))
        return replace(whole, scratch=scratch, allowance=allowance)

    def _copied(self, operation: Operation) -> int:
        """Return the bytes of a copy of what an operation reads: a maxout takes no part of a larger tensor."""
        if not isinstance(self.graph.network.layers[operation.layer], Maxout):
            return 0
        (read,) = operation.reads
        for along in (1, 2):
            axis = self.graph.geometry.axes[along]
            for regions, _ in blocks_of(self.cover, along):
                there, source = regions.row(read.tensor), axis.sources[operation.layer][0]
                mine = read_by_each(axis, operation.layer, regions.row(operation.tensor), source)
                if (mine.lo + read.shift[along] != there.lo).any() or (mine.size != there.size).any():
                    return self.shape(operation).in_bytes
        return 0

    def executions(self, operation: Operation) -> int:
        """Return how often that shape is computed for the whole output, rounded up."""
        whole = prod(one.size for one in self.region(operation.tensor))
        return max(1, -(-int(self.totals[operation.tensor]) // max(1, whole)))

    def _bytes(self, planes: Numbers) -> Numbers:
        """Return the bytes of so many planes of the tensors in memory; more than any machine has are cut off."""
        stored, (second, third) = self.figures.stored, self._widths
        values = self.figures.maps[stored].astype(np.float64) * second.widest.size[stored] * third.widest.size[stored]
        return np.minimum(itemsize_of(self.graph.precision) * values * planes[stored], MOST_BYTES).astype(np.int64)

    def plane_bytes(self, tensor: int) -> int:
        """Return the bytes of a plane of a tensor in memory."""
        _, y, x = self.region(tensor)
        return itemsize_of(self.graph.precision) * self.graph.network.maps[tensor] * y.size * x.size

    def storage(self, tensor: int) -> Storage:
        """Return where a tensor lies. One that keeps as many planes as it gets stays: copying them would cost more."""
        return self.axis_planes.storage[tensor]

    def beside(self, tensor: int) -> int:
        """Return the planes of a tensor for which there is room beside the arena.

        A resident tensor has room for so many that in every other step they need not be moved.
        """
        return int(self.axis_planes.beside[tensor])

    @cached_property
    def carries(self) -> int:
        """Bytes beside the arena that stay from step to step."""
        return int(self._bytes(self.axis_planes.beside).sum())

    def carry_traffic(self, tensor: int) -> int:
        """Return the bytes that are moved in a step to keep planes of a tensor."""
        traffic = {"arena": 0, "carried": 4, "resident": 1}[self.storage(tensor)]
        return traffic * self.kept(tensor) * self.plane_bytes(tensor)

    def arena_bytes(self, tensor: int) -> int:
        """Return the bytes of a tensor in the arena."""
        return 0 if self.storage(tensor) == "resident" else aligned(self.held(tensor) * self.plane_bytes(tensor))

    def tensors(self, operations: Sequence[Operation], footprints: Sequence[Footprint]) -> tuple[Tensor, ...]:
        """Return the tensors of a step in the arena, not yet placed: outputs of operations, and their scratch.

        An operation's stages are ticks; a tensor is alive from its operation to the last that reads it, an output of
        the network for one more tick. Inputs and outputs of an operation never share memory.
        """
        ticks, tick = [], 1  # in tick 0 the input is loaded
        for footprint in footprints:
            ticks.append((tick, tick + footprint.stages - 1))
            tick += footprint.stages
        begins, ends = [0, *(begin for begin, _ in ticks)], [0, *(end for _, end in ticks), tick]
        found = [
            Tensor(f"x{tensor}", self.held(tensor) * self.plane_bytes(tensor), begins[first], ends[last])
            for tensor, (first, last) in self.graph.spans_of(operations).items()
            if self.storage(tensor) != "resident"
        ]
        for index, (footprint, (begin, _)) in enumerate(zip(footprints, ticks, strict=True)):
            found += [
                Tensor(f"step{index}.{scratch.name}", scratch.nbytes, begin + scratch.first, begin + scratch.last)
                for scratch in footprint.scratch
            ]
        return tuple(found)

    def memory(
        self, operations: Sequence[Operation], footprints: Sequence[Footprint], arena: int, device: DeviceKind
    ) -> StageMemory:
        """Return what operations with these footprints take, in an arena of so many bytes.

        What a step needs beside the arena counts as allowance: on a processor also planes of columns that are worked
        out, and what preparing the weights takes more than all steps.
        """
        allowance = max(footprint.allowance for footprint in footprints)
        weights = sum(footprint.resident for footprint in footprints)
        stage = StageMemory(device, arena=arena, carries=self.carries, weights=weights, allowance=allowance)
        if device == "gpu":
            return stage
        allowance += self.kept_bytes
        stage = replace(stage, allowance=allowance)
        return replace(stage, allowance=allowance + max(0, self._preparing_bytes(operations, footprints) - stage.total))

    @property
    def kept_bytes(self) -> int:
        """About the bytes of the planes of columns that a run keeps worked out."""
        columns = self.cover.counts[0]
        kept, longest = min(KEPT_PLANES, columns), -(-self.steps // columns)
        return kept * planes_bytes(len(self.graph.network.maps), len(self.graph.network.outputs), longest)

    def _preparing_bytes(self, operations: Sequence[Operation], footprints: Sequence[Footprint]) -> int:
        """Return the most bytes while weights are prepared: the arena and planes that stay are not there yet.

        The weights of a layer are copied where scales are merged into them or axes turned, until they are prepared.
        """
        most, resident, graph = 0, 0, self.graph
        for operation, footprint in zip(operations, footprints, strict=True):
            resident += footprint.resident
            shape, copied = self.shape(operation), 0
            if graph.lowered.copies(operation.layer, graph.axis) and isinstance(shape, GraphConvShape | TransposeShape):
                copied = shape.weight_bytes
            most = max(most, resident + copied + footprint.allowance)
        return most

    @property
    def live(self) -> tuple[int, ...]:
        """Bytes of tensors in the arena while each operation runs, its scratch not counted."""
        return tuple(self._live().tolist())

    @cached_property
    def most_live(self) -> int:
        """Most bytes of tensors that are in the arena while some operation runs."""
        return int(self._live().max())

    def _live(self) -> Numbers:
        change = np.zeros(len(self.graph.operations) + 3, np.int64)
        figures = self.figures
        nbytes = self._bytes(self.axis_planes.in_arena)
        nbytes += -nbytes % ALIGNMENT
        np.add.at(change, figures.first, nbytes)
        np.subtract.at(change, figures.last + 1, nbytes)
        return np.cumsum(change)[1:-2]


NOTHING = np.zeros(0, np.int64)
MOST_BYTES = 2**50  # of a tensor that are counted
COPIED = "copied"  # the name of the scratch for a copy of an operation's input
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
MOST_STEPS = 10**6  # steps or columns along an axis: more take too long to plan
THICK = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # periods of a step that are tried


def tilings(graph: TurnedGraph, area: Area, *, streams: bool, patch: Vec3 | None = None) -> Iterator[GraphTiling]:
    """Yield the sizes of patches or columns to try; `patch` fixes the periods of a step along each axis."""
    whole = GraphCover(graph, (1, 1, 1), 0, area.region, area.others)
    periods = [end - begin for begin, end in zip(*whole.periods, strict=True)]
    sizes = [sorted({-(-count // split) for split in SPLITS if split <= count}, reverse=True) for count in periods]
    if patch is not None:
        sizes = [[min(size, count)] for size, count in zip(patch, periods, strict=True)]
    thicks = [size for size in THICK if size < periods[0]] if streams and patch is None else sizes[0]
    thicks = [size for size in thicks if -(-periods[0] // size) <= MOST_STEPS]
    if streams and patch is not None and patch[0] >= periods[0]:
        return
    for thick in thicks:
        column = -(-periods[0] // thick) * thick if streams else 0
        for y in sizes[1]:
            for x in sizes[2]:
                yield GraphTiling(replace(whole, patch=(thick, y, x), column=column))
