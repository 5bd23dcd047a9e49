"""Work out regions and frontiers of a graph's tensors for many intervals at once: each layer takes arrays of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from znnpy.geometry import AxisGeometry, AxisLayer, Interval

Numbers = npt.NDArray[np.int64]

NONE = -(2**62)  # the frontier of a tensor that no output needs


class Intervals(NamedTuple):
    """Many intervals: those with lo <= i < hi at every place of two arrays."""

    lo: Numbers
    hi: Numbers

    @property
    def size(self) -> Numbers:
        return self.hi - self.lo

    def within(self, lo: int, hi: int) -> Intervals:
        """Return the part of each within lo .. hi, as `Interval.within` does."""
        begin = np.minimum(np.maximum(self.lo, lo), hi)
        return Intervals(begin, np.maximum(begin, np.minimum(self.hi, hi)))

    def joined(self, other: Intervals) -> Intervals:
        """Join each with the one at its place, as `Interval.joined` does."""
        mine, its = self.hi > self.lo, other.hi > other.lo
        lo = np.where(mine & its, np.minimum(self.lo, other.lo), np.where(its, other.lo, self.lo))
        hi = np.where(mine & its, np.maximum(self.hi, other.hi), np.where(its, other.hi, self.hi))
        return Intervals(lo, hi)

    def row(self, tensor: int) -> Intervals:
        """Return the intervals of one tensor."""
        return Intervals(self.lo[tensor], self.hi[tensor])


def needed_by_each(layer: AxisLayer, regions: Intervals, n: int | None) -> Intervals:
    """Return what `AxisLayer.needed` gives for each of many regions."""
    return Intervals(*layer.ends_needed(*regions, n))


def read_by_each(axis: AxisGeometry, index: int, regions: Intervals, source: int) -> Intervals:
    """Return what `AxisGeometry.read` gives for each of many regions."""
    size = axis.sizes[source]
    found, empty = needed_by_each(axis.layers[index], regions, size).within(0, size), regions.hi <= regions.lo
    return Intervals(np.where(empty, 0, found.lo), np.where(empty, 0, found.hi)) if empty.any() else found


def regions_of_each(axis: AxisGeometry, wanted: Sequence[Intervals]) -> Intervals:
    """Return what `AxisGeometry.regions` gives for many intervals of each output: a row for each tensor."""
    shape = len(axis.sizes), len(wanted[0].lo)
    found = Intervals(np.zeros(shape, np.int64), np.zeros(shape, np.int64))

    def join(tensor: int, more: Intervals) -> None:
        found.lo[tensor], found.hi[tensor] = found.row(tensor).joined(more)

    for tensor, intervals in zip(axis.outputs, wanted, strict=True):
        join(tensor, intervals.within(0, axis.sizes[tensor]))
    for index in reversed(range(len(axis.layers))):
        mine = found.row(index + 1)
        some = mine.size > 0
        if some.any():
            if axis.layers[index].needs_all:  # it is computed at once
                mine.lo[some], mine.hi[some] = 0, axis.sizes[index + 1]
            for source in axis.sources[index]:
                join(source, read_by_each(axis, index, mine, source))
    return found


def of_ranges(axis: AxisGeometry, wanted: Sequence[Sequence[Interval]]) -> Intervals:
    """Return the voxels of every tensor that each of many ranges needs, with what it wants of each output.

    The result has a row for each tensor.
    """
    ends = np.array(wanted, np.int64)  # (range, output, 2)
    return regions_of_each(axis, [Intervals(*ends[:, number].T) for number in range(ends.shape[1])])


class Pooling(NamedTuple):
    """A tensor, and one that holds the maxima of its windows side by side along an axis."""

    source: int
    tensor: int
    window: int


def frontiers(
    axis: AxisGeometry, known: Numbers, regions: Sequence[Interval], poolings: Sequence[Pooling] = ()
) -> Numbers:
    """Return up to which voxel every tensor must be known for its outputs to be known up to `known`.

    known     a row for each output, in the order of `outputs`, with any number of voxels, also before its region
    regions   of the tensors in the whole column; a frontier never leaves its region
    poolings  those whose two tensors have the same frontier, on whole windows: each step then computes the maxima of
              the windows within what it computes of the source, and no others

    The result has a row for each tensor. Frontiers grow with `known`, so that a column computes each voxel once.
    """
    found = np.full((len(axis.sizes), known.shape[1]), NONE)
    for tensor, end in zip(axis.outputs, known, strict=True):
        found[tensor] = np.maximum(found[tensor], end)
    pooled = {pooling.source: pooling for pooling in poolings}
    for index in reversed(range(len(axis.layers))):
        end, first = found[index + 1], regions[index + 1].lo
        if end[0] == NONE:
            continue
        if (pooling := pooled.get(index + 1)) is not None:  # all that reads the source is behind it
            windows = -(-end // pooling.window)
            np.multiply(windows, pooling.window, out=end)
            np.maximum(found[pooling.tensor], windows, out=found[pooling.tensor])
        # A voxel before the region is none that is computed, and no face is near it.
        mine, ahead = Intervals(np.minimum(first, end - 1), end), end <= first
        free = needed_by_each(axis.layers[index], mine, None).hi
        for source in axis.sources[index]:
            needed = needed_by_each(axis.layers[index], mine, axis.sizes[source]).hi
            found[source] = np.maximum(found[source], np.where(ahead, free, needed))
    lo, hi = np.array(regions, np.int64).T
    within: Numbers = np.minimum(np.maximum(found, lo[:, None]), hi[:, None])
    return within
