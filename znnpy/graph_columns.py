"""Cover the output of a graph with columns, and say which planes of each tensor a step computes and which it holds.

A column walks along the first axis of a turned network. For "the output is known up to plane T" every tensor has a
frontier, and a step computes the planes between its frontiers before and after. A tensor keeps the planes that a later
step of any of its readers needs; a skip connection is a tensor that keeps many. A patch is a column of one step.

Patches begin on whole periods, counted from the volume's first voxel, and their regions end at the volume's faces, so
that nothing is computed outside.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar

from znnpy.admissible import admissible
from znnpy.errors import ShapeError
from znnpy.geometry import Geometry, Interval, vector
from znnpy.graph_operations import Operation, Region, operations, pairs_of, shape_of
from znnpy.graph_shapes import GraphConvShape
from znnpy.layer_shapes import LayerShape
from znnpy.layers import Pool
from znnpy.lowering import Lowered, lowered
from znnpy.messages import option
from znnpy.network import Network
from znnpy.patches import Box, Column, Columns, Patch, Piece
from znnpy.shapes import Precision, Vec3, multiply, text, turned, turned_back

if TYPE_CHECKING:
    from znnpy.column_planes import ColumnPlanes, ColumnSteps
    from znnpy.many_intervals import Intervals

T = TypeVar("T")

KEPT_RESULTS = 16  # regions and planes of columns that are kept for what is asked next
KEPT_PLANES = 2  # columns whose planes are kept even if they are large: that which is computed, and that which is read
LARGE_BYTES = 2**22  # of the planes of all columns that are kept, beyond which they are large


@dataclass(frozen=True, slots=True)
class Area:
    """The part of a volume that is predicted.

    volume  voxels of the volume as it is, before it is padded to what the network admits
    region  voxels of the first output, counted from its first voxel
    others  voxels of the further outputs, each counted from its first voxel; none: those of `region` of each
    """

    volume: Vec3
    region: Box
    others: tuple[Box, ...] = ()

    @property
    def regions(self) -> tuple[Box, ...]:
        """The voxels of every output that has its own."""
        return (self.region, *self.others)


@dataclass(frozen=True)
class TurnedGraph:
    """A lowered network over a volume, with the axis of columns first."""

    lowered: Lowered
    geometry: Geometry
    axis: int
    operations: tuple[Operation, ...]
    precision: Precision = "fp32"
    _facts: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    _latest: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict, repr=False, compare=False)
    _planes: OrderedDict[Hashable, ColumnPlanes] = field(default_factory=OrderedDict, repr=False, compare=False)
    _lock: RLock = field(default_factory=RLock, repr=False, compare=False)  # a reader asks while a session computes

    @staticmethod
    @lru_cache(maxsize=16)
    def of(network: Network, volume: Vec3, axis: int, precision: Precision = "fp32") -> TurnedGraph:
        """Return the graph of a network over a volume, padded to what the network admits."""
        made = lowered(network.turned(axis))
        geometry = admissible(made.network, turned(volume, axis))
        return TurnedGraph(made, geometry, axis, operations(geometry.network), precision)

    def shape_of(self, operation: Operation, region: Region, windows: Region | None = None) -> LayerShape:
        """Return the shape of an operation for a region of its output, and of its second output if it has one."""
        return shape_of(self.geometry, operation, region, self.precision, windows)

    @cached_property
    def pairs(self) -> dict[int, Operation]:
        """The operations that convolutions and what is behind them may be merged into, by their numbers."""
        return pairs_of(self.network, self.operations)

    def computing(self, shapes: Iterable[LayerShape]) -> tuple[Operation, ...]:
        """Return the operations of a plan, merged where a shape of its choices is that of two in one."""
        found, number, given = list[Operation](), 0, iter(shapes)
        while number < len(self.operations):
            shape, merged = next(given, None), self.pairs.get(number)
            two = isinstance(shape, GraphConvShape) and (shape.pooled or shape.normed) is not None
            if merged is not None and two:
                found.append(merged)
                number += 2
            else:
                found.append(self.operations[number])
                number += 1
        return tuple(found)

    @property
    def network(self) -> Network:
        """The lowered network with all sizes resolved."""
        return self.geometry.network

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """The tensors in memory: the input, and what operations give."""
        return (0, *(operation.tensor for operation in self.operations))

    @cached_property
    def spans(self) -> dict[int, tuple[int, int]]:
        """The first and the last operation, counted from 1, during which each tensor in memory is there.

        The input is there before the first, an output of the network also after the last.
        """
        return self.spans_of(self.operations)

    def spans_of(self, operations: Sequence[Operation]) -> dict[int, tuple[int, int]]:
        """Return the spans with these operations, of which some are merged."""
        found = {0: (0, 0)}
        for number, operation in enumerate(operations, 1):
            for tensor in operation.tensors:
                found[tensor] = number, number
            for tensor in operation.sources:
                found[tensor] = found[tensor][0], number
        for tensor in self.network.outputs:
            found[tensor] = found[tensor][0], len(operations) + 1
        return found

    def remembered(self, key: Hashable, work: Callable[[], T]) -> T:
        """Return what `work` gives; it is called once for each key, until `forget`."""
        try:
            found: T = self._facts[key]
        except KeyError:
            found = self._facts.setdefault(key, work())
        return found

    def forget(self) -> None:
        """Forget what a search for a plan asked for: a run needs little of it."""
        with self._lock:
            for kept in (self._facts, self._latest, self._planes):
                kept.clear()

    @property
    def output(self) -> int:
        """The tensor of the first output, which periods and patches are counted in."""
        return self.network.outputs[0]

    @property
    def voxels(self) -> Vec3:
        """Voxels of the first output in a period."""
        return self.geometry.voxels(self.output)

    @cached_property
    def periods(self) -> Vec3:
        """Periods that the outputs have, the last ones partly."""
        z, y, x = (
            max(-(-axis.sizes[tensor] // axis.voxels(tensor)) for tensor in self.network.outputs)
            for axis in self.geometry.axes
        )
        return z, y, x

    def wanted(self, along: int, begin: int, end: int) -> list[Interval]:
        """Return the voxels of each output in some periods along an axis."""
        axis, known = self.geometry.axes[along], self._known(along, end)
        return [
            Interval(min(begin * axis.voxels(tensor), to), to)
            for tensor, to in zip(self.network.outputs, known, strict=True)
        ]

    def _known(self, along: int, periods: int) -> list[int]:
        """Return up to which voxel each output goes with so many periods."""
        axis = self.geometry.axes[along]
        return [min(periods * axis.voxels(tensor), axis.sizes[tensor]) for tensor in self.network.outputs]

    def regions(self, along: int, begin: int, end: int) -> tuple[Interval, ...]:
        """Return the voxels of every tensor that the outputs of some periods along an axis need."""
        key = along, begin, end
        return self._recent(key, lambda: self.geometry.axes[along].regions(self.wanted(along, begin, end)))

    def regions_of_each(self, along: int, ranges: Sequence[tuple[int, int]]) -> Intervals:
        """Return what `regions` gives for many ranges of periods: a row for each tensor."""
        from znnpy.many_intervals import of_ranges

        return of_ranges(self.geometry.axes[along], [self.wanted(along, begin, end) for begin, end in ranges])

    def planes(self, begin: int, end: int, thick: int) -> ColumnPlanes:
        """Return the planes of a column from period `begin` to `end` in steps of `thick` periods; 0: one step."""
        from znnpy.column_planes import ColumnPlanes

        key, kept = (begin, end, thick), self._planes
        with self._lock:
            found = kept.pop(key) if key in kept else ColumnPlanes(self.steps(begin, end, thick))
            kept[key] = found
            while len(kept) > KEPT_RESULTS or (
                len(kept) > KEPT_PLANES and sum(one.nbytes for one in kept.values()) > LARGE_BYTES
            ):
                kept.popitem(last=False)
        return found

    def steps(self, begin: int, end: int, thick: int) -> ColumnSteps:
        """Return what the planes of such a column follow from."""
        from znnpy.column_planes import ColumnSteps, known_after_steps, of_one_step
        from znnpy.many_intervals import Pooling

        axis, region, wanted = self.geometry.axes[0], self.regions(0, begin, end), self.wanted(0, begin, end)
        if thick == 0:
            return of_one_step(axis, self.operations, region, wanted)
        voxels = [axis.voxels(tensor) for tensor in self.network.outputs]
        known = known_after_steps(voxels, [axis.sizes[tensor] for tensor in self.network.outputs], begin, end, thick)
        ahead = [begin * one for one in voxels], [thick * one for one in voxels]
        poolings = []
        for source, tensor in (one.tensors for one in self.pairs.values() if one.pool is not None):
            pool = self.network.layers[tensor - 1]
            assert isinstance(pool, Pool), pool
            poolings.append(Pooling(source, tensor, pool.window[0]))
        return ColumnSteps.of(axis, self.operations, region, wanted, known, *ahead, poolings)

    def _recent(self, key: Hashable, work: Callable[[], T]) -> T:
        """Return what `work` gives; the latest few results are kept."""
        with self._lock:
            found: T = self._latest.pop(key) if key in self._latest else work()
            self._latest[key] = found
            if len(self._latest) > KEPT_RESULTS:
                self._latest.popitem(last=False)
        return found


@dataclass(frozen=True, slots=True)
class GraphStep:
    """One step of a column as a session computes it: periods of the column with its axis first, and its number."""

    begin: Vec3
    end: Vec3
    thick: int  # periods of a step; 0: the column is a patch
    number: int


@dataclass(frozen=True)
class GraphCover(Columns):
    """Columns whose `write` boxes partition the predicted region. Each is made when it is requested.

    patch   periods of a step, with the axis of columns first
    column  periods of a column along its axis; 0: separate patches
    region  voxels of the first output that are predicted, axes (z, y, x)
    others  those of the further outputs; none: `region` of each

    In patches `read` counts from the volume's first voxel, `out` and `write` from that of the output's region.
    """

    graph: TurnedGraph
    patch: Vec3
    column: int
    region: Box
    others: tuple[Box, ...] = ()

    @cached_property
    def regions(self) -> tuple[Box, ...]:
        """The voxels of each output that are predicted."""
        more = len(self.graph.network.outputs) - 1
        return (self.region, *(self.others or (self.region,) * more))

    @cached_property
    def values(self) -> int:
        """The most values that a step gives, of all outputs."""
        network, geometry = self.graph.network, self.graph.geometry
        sizes = (multiply(self.patch, geometry.voxels(tensor)) for tensor in network.outputs)
        return sum(network.maps[tensor] * prod(size) for tensor, size in zip(network.outputs, sizes, strict=True))

    @property
    def grid(self) -> Vec3:
        """Periods of a column along each axis, its own first."""
        return (self.column or self.patch[0], *self.patch[1:])

    @cached_property
    def periods(self) -> tuple[Vec3, Vec3]:
        """The first period of the regions, and that behind the last, with the axis of columns first."""
        return self.graph.remembered(("periods", self.regions), self._periods)

    def _periods(self) -> tuple[Vec3, Vec3]:
        begins, ends = [], []
        for tensor, region in zip(self.graph.network.outputs, self.regions, strict=True):
            voxels, axis = self.graph.geometry.voxels(tensor), self.graph.axis
            begins.append([lo // each for lo, each in zip(turned(region.lo, axis), voxels, strict=True)])
            ends.append([-(-hi // each) for hi, each in zip(turned(region.hi, axis), voxels, strict=True)])
        return vector(map(min, zip(*begins, strict=True))), vector(map(max, zip(*ends, strict=True)))

    @cached_property
    def counts(self) -> Vec3:
        """Number of columns along each axis, their own first."""
        begin, end = self.periods
        z, y, x = (-(-(hi - lo) // size) for lo, hi, size in zip(begin, end, self.grid, strict=True))
        return z, y, x

    def ranges(self, along: int) -> list[tuple[int, int]]:
        """Return the first period of each column along an axis, and that behind its last."""
        (begin, end), size = (self.periods[0][along], self.periods[1][along]), self.grid[along]
        return [(first, min(first + size, end)) for first in range(begin, end, size)]

    def _at(self, place: Vec3) -> Column:
        ranges = [self.ranges(along)[number] for along, number in enumerate(place)]
        begin, end = (ranges[0][0], ranges[1][0], ranges[2][0]), (ranges[0][1], ranges[1][1], ranges[2][1])
        return Column(tuple(self._steps(begin, end)))

    def _steps(self, begin: Vec3, end: Vec3) -> Iterator[Patch]:
        """Yield the steps of the column of these periods."""
        graph, thick = self.graph, self.patch[0] if self.column else 0
        planes = graph.planes(begin[0], end[0], thick)
        read = [graph.regions(along, begin[along], end[along])[0] for along in (1, 2)]
        across = list(zip(*(graph.wanted(along, begin[along], end[along]) for along in (1, 2)), strict=True))
        for number in range(planes.steps):
            source = self._box((planes.new(0, number), read[0], read[1]))
            first, *others = map(self._piece, planes.outputs(number), across, self.regions)
            here = GraphStep(begin, end, thick, number)
            yield Patch(source.lo, first.out, first.write, source.size, here, tuple(others))

    def _piece(self, planes: Interval, across: tuple[Interval, Interval], region: Box) -> Piece:
        """Return what a step gives of an output."""
        out = self._box((planes, *across))
        zero = (-region.lo[0], -region.lo[1], -region.lo[2])
        return Piece(out.shifted(zero), out.clipped(region).shifted(zero))

    def _box(self, along: Region) -> Box:
        lo, hi = (along[0].lo, along[1].lo, along[2].lo), (along[0].hi, along[1].hi, along[2].hi)
        return Box(turned_back(lo, self.graph.axis), turned_back(hi, self.graph.axis))


def cover_of_window(network: Network, axis: int, precision: Precision) -> GraphCover:
    """Return the one patch that computes a window; ShapeError if the network does not admit its size."""
    assert network.windows is not None, "networks that are computed in windows have it"
    size = network.windows.size
    graph = TurnedGraph.of(network, size, axis, precision)
    if (admitted := turned_back(graph.geometry.volume, axis)) != size:
        raise ShapeError(
            f"{network.name} takes no window of {text(size)} voxels; the next larger one is {text(admitted)}: change "
            f"{option('window')}"
        )
    given = turned_back(graph.geometry.size(graph.output), axis)
    if len(network.outputs) > 1 or given != size:
        what = f"{len(network.outputs)} outputs" if len(network.outputs) > 1 else f"{text(given)} voxels"
        raise ShapeError(
            f"{network.name} gives {what} for a window of {text(size)}, and only networks with one output as large as "
            "the input are computed in windows; name one output in the network file, or pad its convolutions"
        )
    return GraphCover(graph, graph.periods, 0, Box((0, 0, 0), size))
