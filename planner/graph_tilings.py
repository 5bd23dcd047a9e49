"""The sizes of patches and columns of a graph: what each tensor holds, and how much each operation computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, product
from math import prod
from typing import Literal

from znnpy.geometry import Interval
from znnpy.graph_columns import Area, GraphCover, StepPlanes, TurnedGraph
from znnpy.graph_operations import Operation, Region, shape_of
from znnpy.kernels.contract import Footprint, Primitive, Variant
from znnpy.layer_shapes import LayerShape
from znnpy.layers import Pad
from znnpy.planner.layout import Tensor, aligned
from znnpy.shapes import FLOAT32, Vec3, turned_back

# The place of a tensor: in the arena, during a step; in the arena, with planes kept beside it; or beside the arena,
# where its planes stay from step to step.
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
    def _walk(self) -> Walk:
        """The planes of the columns along their axis; equal for all tilings with the same columns and steps."""
        cover = self.cover
        begin, end = cover.periods[0][0], cover.periods[1][0]
        thick = cover.patch[0] if self.streams else 0
        return self.graph.remembered(("walk", begin, end, cover.grid[0], thick), lambda: Walk.of(cover, thick))

    @cached_property
    def _widths(self) -> tuple[Widths, Widths]:
        """The regions of the columns along the other axes; equal for all tilings with columns as wide."""
        cover, found = self.cover, []
        for along in (1, 2):
            key = "widths", along, cover.periods[0][along], cover.periods[1][along], cover.grid[along]
            found.append(self.graph.remembered(key, partial(Widths.of, cover, along)))
        return found[0], found[1]

    @property
    def steps(self) -> tuple[StepPlanes, ...]:
        """The steps of all columns along the axis."""
        return self._walk.steps

    @property
    def new(self) -> tuple[Interval, ...]:
        """The most planes of each tensor that a step computes."""
        return self._walk.new

    @property
    def held(self) -> tuple[int, ...]:
        """The most planes of each tensor that a step holds."""
        return self._walk.held

    @property
    def kept(self) -> tuple[int, ...]:
        """The most planes of each tensor that a step finds already computed."""
        return self._walk.kept

    @property
    def across(self) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
        """The widest region of each tensor along the second axis and along the third."""
        second, third = self._widths
        return second.widest, third.widest

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Voxels of each tensor that are computed for the whole output."""
        second, third = self._widths
        return tuple(z * y * x for z, y, x in zip(self._walk.totals, second.totals, third.totals, strict=True))

    def region(self, tensor: int) -> Region:
        """Return the largest region of a tensor that a step computes."""
        return self.new[tensor], self.across[0][tensor], self.across[1][tensor]

    def shape(self, operation: Operation) -> LayerShape:
        """Return the shape of an operation in a step in which it computes the most."""
        return shape_of(self.graph.geometry, operation, self.region(operation.tensor))

    def shapes(self, operation: Operation) -> tuple[LayerShape, ...]:
        """Return all shapes of an operation: those at faces of the volume differ in padding and size."""
        tensor, found = operation.tensor, []
        regions = (
            [step.new[tensor] for step in self.steps],
            *([self.graph.regions(along, *one)[tensor] for one in self.cover.ranges(along)] for along in (1, 2)),
        )
        for along, intervals in enumerate(regions):
            kinds = {self._kind(operation, along, one): one for one in intervals if one.size > 0}
            found.append(list(kinds.values()))
        geometry = self.graph.geometry
        return tuple(dict.fromkeys(shape_of(geometry, operation, (z, y, x)) for z, y, x in product(*found)))

    def _kind(self, operation: Operation, along: int, region: Interval) -> tuple[int, ...]:
        """Return what distinguishes regions of an operation along an axis: regions of one kind have equal shapes."""
        axis, network = self.graph.geometry.axes[along], self.graph.network
        source, size = network.sources[operation.layer][0], axis.sizes[operation.tensor]
        need = axis.needed(operation.layer, region, source)
        read = need.within(0, axis.sizes[source])
        layer = network.layers[operation.layer]
        faces: tuple[int, ...] = ()
        if isinstance(layer, Pad):  # how much of the padding the region holds
            faces = min(region.lo, layer.before[along]), min(size - region.hi, layer.behind[along])
        place = region.lo % axis.voxels(operation.tensor)
        return region.size, read.size, read.lo - need.lo, need.hi - read.hi, place, *faces

    def footprint(self, operation: Operation, primitive: Primitive, variant: Variant, threads: int) -> Footprint:
        """Return the bytes that a primitive needs at most, over all shapes of an operation."""
        whole = primitive.footprint(self.shape(operation), variant, threads)
        most, allowance = {one.name: one.nbytes for one in whole.scratch}, whole.allowance
        for shape in self.shapes(operation):
            one = primitive.footprint(shape, variant, threads)
            allowance = max(allowance, one.allowance)
            for part in one.scratch:
                most[part.name] = max(most[part.name], part.nbytes)
        scratch = tuple(one._replace(nbytes=most[one.name]) for one in whole.scratch)
        return replace(whole, scratch=scratch, allowance=allowance)

    def executions(self, operation: Operation) -> int:
        """Return how often that shape is computed for the whole output, rounded up."""
        whole = prod(map(_size, self.region(operation.tensor)))
        return max(1, -(-self.totals[operation.tensor] // max(1, whole)))

    @cached_property
    def _plane_bytes(self) -> tuple[int, ...]:
        y, x = self.across
        maps = self.graph.network.maps
        return tuple(FLOAT32 * many * a.size * b.size for many, a, b in zip(maps, y, x, strict=True))

    def plane_bytes(self, tensor: int) -> int:
        """Return the bytes of a plane of a tensor in memory."""
        return self._plane_bytes[tensor]

    def storage(self, tensor: int) -> Storage:
        """Return where a tensor lies. One that keeps as many planes as it gets stays: copying them would cost more."""
        if not self.kept[tensor]:
            return "arena"
        return "resident" if self.kept[tensor] >= self.new[tensor].size else "carried"

    def capacity(self, tensor: int) -> int:
        """Return the planes for which a resident tensor has room: in every other step they need not be moved."""
        return self.held[tensor] + self.new[tensor].size

    @property
    def stored(self) -> tuple[int, ...]:
        """The tensors in memory: the input, and what operations give."""
        return self.graph.stored

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
        change = [0] * (len(self.graph.operations) + 3)
        for tensor, (first, last) in self.graph.lifetimes.items():
            if self.storage(tensor) != "resident":
                nbytes = aligned(self.held[tensor] * self._plane_bytes[tensor])
                change[first] += nbytes
                change[last + 1] -= nbytes
        return tuple(accumulate(change))[1:-2]


@dataclass(frozen=True)
class Walk:
    """The planes of columns along their axis."""

    steps: tuple[StepPlanes, ...]  # of all columns
    new: tuple[Interval, ...]  # the most that a step computes, of each tensor
    held: tuple[int, ...]  # the most planes in memory
    kept: tuple[int, ...]  # the most planes that a step finds already computed
    totals: tuple[int, ...]  # planes that are computed in all

    @classmethod
    def of(cls, cover: GraphCover, thick: int) -> Walk:
        """Return the planes of the columns of a cover in steps of so many periods; 0: patches."""
        steps = tuple(step for one in cover.ranges(0) for step in cover.graph.planes(*one, thick).steps)
        news, helds = [step.new for step in steps], [step.held for step in steps]
        by_tensor = list(zip(zip(*news, strict=True), zip(*helds, strict=True), strict=True))
        return cls(
            steps,
            tuple(max(new, key=_size) for new, _ in by_tensor),
            tuple(max(map(_size, held)) for _, held in by_tensor),
            tuple(max(h.size - n.size for n, h in zip(new, held, strict=True)) for new, held in by_tensor),
            tuple(sum(map(_size, new)) for new, _ in by_tensor),
        )


@dataclass(frozen=True)
class Widths:
    """The regions of columns along an axis that they do not walk."""

    widest: tuple[Interval, ...]  # of each tensor
    totals: tuple[int, ...]  # voxels in all columns

    @classmethod
    def of(cls, cover: GraphCover, along: int) -> Widths:
        """Return the regions of the columns of a cover along an axis."""
        by_tensor = list(zip(*(cover.graph.regions(along, *one) for one in cover.ranges(along)), strict=True))
        return cls(
            tuple(max(regions, key=_size) for regions in by_tensor),
            tuple(sum(map(_size, regions)) for regions in by_tensor),
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


def tilings(graph: TurnedGraph, area: Area, *, streams: bool, patch: Vec3 | None = None) -> Iterator[GraphTiling]:
    """Yield the sizes of patches or columns to try; `patch` fixes the periods of a step along each axis."""
    whole = GraphCover(graph, (1, 1, 1), 0, area.region, area.others)
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
                yield GraphTiling(replace(whole, patch=(thick, y, x), column=column))
