"""The extents of a graph's tensors along single axes, for columns of a cover: sizes of tilings are made of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from znnpy.geometry import Interval
from znnpy.graph_columns import GraphCover, TurnedGraph
from znnpy.many_intervals import Intervals, Numbers

# The place of a tensor: in the arena, during a step; in the arena, with planes kept beside it; or beside the arena,
# where its planes stay from step to step.
Storage = Literal["arena", "carried", "resident"]


@dataclass(frozen=True)
class Figures:
    """What is the same in all tilings of a graph.

    maps         of each tensor
    stored       the tensors in memory: the input, and what operations give
    first, last  the first and the last operation, counted from 1, during which each of these is there; the input is
                 there before the first, and an output of the network also after the last
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
        first, last = {0: 0}, {0: 0}
        for number, operation in enumerate(operations, 1):
            first[operation.tensor] = last[operation.tensor] = number
            for tensor in operation.sources:
                last[tensor] = number
        for tensor in graph.network.outputs:
            last[tensor] = len(operations) + 1
        work = [maps[one.tensor] * sum(read.maps for read in one.reads) for one in operations]
        return cls(
            np.array(maps, np.int64),
            np.array(graph.stored, np.int64),
            np.array([first[tensor] for tensor in graph.stored], np.int64),
            np.array([last[tensor] for tensor in graph.stored], np.int64),
            np.array([operation.tensor for operation in operations], np.int64),
            np.array(work, np.float64),
        )


@dataclass(frozen=True)
class Walk:
    """The planes of columns along their axis.

    planes    that each step computes, of all columns: a row for each tensor
    new       the most that a step computes, of each tensor
    held      the most planes in memory
    kept      the most planes that a step finds already computed
    storage   where each tensor lies
    beside    planes for which there is room beside the arena
    in_arena  planes for which there is room in the arena
    totals    planes that are computed in all
    """

    planes: Intervals
    new: tuple[Interval, ...]
    held: tuple[int, ...]
    kept: tuple[int, ...]
    storage: tuple[Storage, ...]
    beside: tuple[int, ...]
    in_arena: Numbers
    totals: Numbers

    @classmethod
    def of(cls, cover: GraphCover, thick: int) -> Walk:
        """Return the planes of the columns of a cover in steps of so many periods; 0: patches."""
        graph, ranges = cover.graph, cover.ranges(0)
        if thick == 0:
            planes = graph.regions_of_each(0, ranges)
            first = planes.lo
        else:
            columns = [graph.planes(*one, thick) for one in ranges]
            news = [column.new for column in columns]
            lo, hi = (np.concatenate([new[side] for new in news], axis=1) for side in (0, 1))
            planes, first = Intervals(lo, hi), np.concatenate([column.first for column in columns], axis=1)
        new, held = _widest(planes), (planes.hi - first).max(axis=1)
        kept = (planes.lo - first).max(axis=1)
        storage = tuple(_storage(before, one.size) for before, one in zip(kept.tolist(), new, strict=True))
        capacity = zip(storage, held.tolist(), kept.tolist(), new, strict=True)
        beside = tuple({"arena": 0, "carried": k, "resident": h + n.size}[where] for where, h, k, n in capacity)
        in_arena = np.where(np.array(storage) == "resident", 0, held)
        totals = planes.size.sum(axis=1)
        return cls(planes, new, tuple(held.tolist()), tuple(kept.tolist()), storage, beside, in_arena, totals)


def _storage(kept: int, new: int) -> Storage:
    """Return where a tensor lies that keeps so many planes, and of which a step computes so many at most."""
    if kept == 0:
        return "arena"
    return "resident" if kept >= new else "carried"


def _widest(regions: Intervals) -> tuple[Interval, ...]:
    """Return the largest interval of each tensor, the first of those that are equally large."""
    places = np.argmax(regions.size, axis=1)[:, None]
    lo, hi = (np.take_along_axis(side, places, axis=1)[:, 0].tolist() for side in regions)
    return tuple(map(Interval, lo, hi))


@dataclass(frozen=True)
class Widths:
    """The regions of columns along an axis that they do not walk.

    regions  of all columns: a row for each tensor
    widest   the largest of each tensor
    most     its size
    totals   voxels in all columns
    """

    regions: Intervals
    widest: tuple[Interval, ...]
    most: Numbers
    totals: Numbers

    @classmethod
    def of(cls, cover: GraphCover, along: int) -> Widths:
        """Return the regions of the columns of a cover along an axis."""
        regions = cover.graph.regions_of_each(along, cover.ranges(along))
        return cls(regions, _widest(regions), regions.size.max(axis=1), regions.size.sum(axis=1))


def _size(interval: Interval) -> int:
    return interval.size
