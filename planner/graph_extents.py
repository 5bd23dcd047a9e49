"""The extents of a graph's tensors along single axes, for columns of a cover: sizes of tilings are made of these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from znnpy.column_planes import block_of
from znnpy.graph_columns import GraphCover, TurnedGraph
from znnpy.many_intervals import Intervals, Numbers

# The place of a tensor: in the arena, during a step; in the arena, with planes kept beside it; or beside the arena,
# where its planes stay from step to step.
Storage = Literal["arena", "carried", "resident"]


@dataclass(frozen=True)
class Figures:
    """The figures that all tilings of a graph share.

    maps         of each tensor
    stored       the tensors in memory: the input, and what operations give
    first, last  the first and the last operation during which each of these is there: see `TurnedGraph.spans`
    computed     the tensor that each operation gives
    work         products of each operation for a voxel, but for those that its kernel has
    """

    maps: Numbers
    stored: Numbers
    first: Numbers
    last: Numbers
    computed: Numbers
    work: npt.NDArray[np.float64]

    @classmethod
    def of(cls, graph: TurnedGraph) -> Figures:
        """Return the figures of a graph."""
        maps, operations = graph.network.maps, graph.operations
        first, last = np.array([graph.spans[tensor] for tensor in graph.stored], np.int64).T
        work = [maps[one.tensor] * sum(read.maps for read in one.reads) for one in operations]
        return cls(
            np.array(maps, np.int64),
            np.array(graph.stored, np.int64),
            first,
            last,
            np.array([operation.tensor for operation in operations], np.int64),
            np.array(work, np.float64),
        )


@dataclass(frozen=True)
class AxisPlanes:
    """The planes of columns along their axis: an entry for each tensor.

    steps     of all columns
    new       the most planes that a step computes
    held      the most planes in memory
    kept      the most planes that a step finds already computed
    storage   where each tensor lies
    beside    planes for which there is room beside the arena
    in_arena  planes for which there is room in the arena
    totals    planes that are computed in all
    sizes     how many different numbers of planes steps compute
    """

    steps: int
    new: Intervals
    held: Numbers
    kept: Numbers
    storage: tuple[Storage, ...]
    beside: Numbers
    in_arena: Numbers
    totals: Numbers
    sizes: Numbers

    @classmethod
    def of(cls, cover: GraphCover) -> AxisPlanes:
        """Return the planes of the columns of a cover."""
        most = _Most(cover, 0)
        held, kept = np.zeros_like(most.totals), np.zeros_like(most.totals)
        for new, first in blocks_of(cover, 0):
            most.add(new)
            np.maximum(held, (new.hi - first).max(axis=1), out=held)
            np.maximum(kept, (new.lo - first).max(axis=1), out=kept)
        capacity = zip(kept.tolist(), most.widest.size.tolist(), strict=True)
        storage = tuple(_storage(before, size) for before, size in capacity)
        resident = np.array([where == "resident" for where in storage])
        beside = np.where(resident, held + most.widest.size, kept)  # nothing is kept of what lies in the arena alone
        in_arena = np.where(resident, 0, held)
        return cls(most.count, most.widest, held, kept, storage, beside, in_arena, most.totals, most.sizes)


def blocks_of(cover: GraphCover, along: int) -> Iterator[tuple[Intervals, Numbers]]:
    """Yield what the steps or columns of a cover compute along an axis, in blocks from the last to the first.

    Each block has a row for each tensor, and the first planes that each step needs in memory. Blocks are forgotten when
    they were used: those of all sizes that a search tries would take much memory.
    """
    graph, ranges = cover.graph, cover.ranges(along)
    if along == 0 and cover.column:
        for begin, end in reversed(ranges):
            for block, _ in graph.steps(begin, end, cover.patch[0]).blocks():
                yield block.new, block.first
        return
    each = block_of(len(graph.network.maps))
    for first in reversed(range(0, len(ranges), each)):
        regions = graph.regions_of_each(along, ranges[first : first + each])
        yield regions, regions.lo


class _Most:
    """The largest of many intervals, and their number and sizes, gathered block by block.

    count   intervals of each tensor
    widest  the largest of each, the first of those that are equally large
    totals  voxels of all of them
    """

    def __init__(self, cover: GraphCover, along: int) -> None:
        graph = cover.graph
        tensors = len(graph.network.maps)
        self.count = 0
        self.totals = np.zeros(tensors, np.int64)
        self.widest = Intervals(np.zeros(tensors, np.int64), np.zeros(tensors, np.int64))
        self._span = max(graph.geometry.axes[along].sizes) + 1
        self._different = np.zeros(0, np.int64)  # tensors and sizes, as single numbers

    def add(self, regions: Intervals) -> None:
        """Take notice of a block in front of the others."""
        size = regions.size
        self.count += size.shape[1]
        self.totals += size.sum(axis=1)
        places = np.argmax(size, axis=1)[:, None]
        lo, hi = (np.take_along_axis(side, places, axis=1)[:, 0] for side in regions)
        larger = hi - lo >= self.widest.size
        self.widest = Intervals(*(np.where(larger, *each) for each in zip((lo, hi), self.widest, strict=True)))
        size.sort(axis=1)
        distinct = np.ones(size.shape, np.bool_)
        np.not_equal(size[:, 1:], size[:, :-1], out=distinct[:, 1:])
        found = np.nonzero(distinct)[0] * self._span + size[distinct]
        self._different = np.union1d(self._different, found) if self._different.size else found

    @property
    def sizes(self) -> Numbers:
        """How many different sizes each tensor has."""
        return np.bincount(self._different // self._span, minlength=len(self.totals))


def _storage(kept: int, new: int) -> Storage:
    """Return where a tensor lies that keeps so many planes, and of which a step computes so many at most."""
    if kept == 0:
        return "arena"
    return "resident" if kept >= new else "carried"


@dataclass(frozen=True)
class Widths:
    """The extents of columns along an axis other than the one that they follow: an entry for each tensor.

    widest  the largest
    totals  voxels in all columns
    sizes   how many different sizes there are
    """

    widest: Intervals
    totals: Numbers
    sizes: Numbers

    @classmethod
    def of(cls, cover: GraphCover, along: int) -> Widths:
        """Return the regions of the columns of a cover along an axis."""
        most = _Most(cover, along)
        for regions, _ in blocks_of(cover, along):
            most.add(regions)
        return cls(most.widest, most.totals, most.sizes)
