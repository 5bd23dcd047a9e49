"""The sums of the results of windows, from the first window that adds to a voxel until the last one did.

What a row of windows keeps for the next row lies in a ring of planes, and what the row itself finishes in a ring of
lines along the second axis: see `WindowCover.sums`. Coordinates are turned, as there.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from znnpy.geometry import Interval
from znnpy.planner.plan import Sums
from znnpy.run.sum_arrays import Array, SumArrays
from znnpy.shapes import Vec3
from znnpy.window_cover import WindowCover
from znnpy.window_lines import Line


class WindowSums:
    """The sums of one part of the output at a time; windows come in the order of `WindowCover`."""

    def __init__(
        self,
        cover: WindowCover,
        sums: Sums,
        maps: int,
        arrays: SumArrays,
    ) -> None:
        kept, row = cover.sums(maps + arrays.extra_maps)
        self._lines, self._arrays = cover.lines, arrays
        self._kept = arrays.new(kept, np.dtype(sums.dtype))
        self._row = arrays.new(row, np.dtype(np.float32))
        self._part, self._place = -1, (0, 0, 0)
        self._line: tuple[Line, Line, Line] = cover.lines[0]
        self._ends: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # of the planes that are kept of each line
        self._moved = 0  # lines of this row before it were taken out of what is kept

    def begin(self, part: int, place: Vec3) -> None:
        """Go to a window; where it does not come behind the one before, nothing that was summed up counts any more.

        Windows may be left out. The voxels that only they cover are then not there.
        """
        fresh = part != self._part or place <= self._place
        other_row = fresh or place[0] != self._place[0]
        self._part, self._place, self._line = part, place, self._lines[part]
        first, second, _ = self._line
        if fresh:
            self._ends = np.full(second.hi - second.lo, first.lo)
        covered = second.covered(place[1])
        moved = covered.lo if other_row else max(self._moved, covered.lo)
        self._moved = max(moved, covered.hi)
        while moved < covered.hi:  # lines that were kept up to the same plane
            ends = self._ends[moved - second.lo : covered.hi - second.lo]
            alike = int((ends == ends[0]).argmin()) or len(ends)
            self._move(Interval(moved, moved + alike), int(ends[0]))
            moved += alike

    def _move(self, lines: Interval, end: int) -> None:
        """Take planes that this row finishes out of what is kept, and clear those that it is the first to add to.

        end  of the planes that are kept of these lines
        """
        first, second, _ = self._line
        done, covered = first.done(self._place[0]), first.covered(self._place[0])
        kept = slice(lines.lo - second.lo, lines.hi - second.lo)

        before = Interval(done.lo, max(done.lo, min(done.hi, end)))  # what earlier rows added to
        for ring, part in wrapped(lines, second.lo, self._row.shape[1]):
            there = slice(part.lo - second.lo, part.hi - second.lo)
            for place, planes in self._places(before):
                row = self._row[planes.lo - done.lo : planes.hi - done.lo, ring]
                self._arrays.take(row, self._kept[place, there])
            if before.size < done.size:
                self._arrays.clear(self._row[before.size : done.size, ring])
        for place, _ in self._places(Interval(max(end, done.hi), covered.hi)):
            self._arrays.clear(self._kept[place, kept])  # these take the places of planes taken out
        self._ends[kept] = covered.hi

    def _places(self, planes: Interval) -> Iterator[tuple[slice, Interval]]:
        """Yield the places of planes that are kept, and which planes these are."""
        return wrapped(planes, self._line[0].lo, self._kept.shape[0])

    def add(self, result: Array, weights: Array, share: float, member: int, *, counts: bool) -> None:
        """Add what the window gives (z, y, x, maps), times its weights (z, y, x), times a share.

        member  of an ensemble that is blended apart, whose maps follow those of the members before
        counts  it is the first result of the window
        """
        first, second, third = self._line
        starts = [line.starts[place] for line, place in zip(self._line, self._place, strict=True)]
        planes, lines, columns = (line.covered(place) for line, place in zip(self._line, self._place, strict=True))
        done = first.done(self._place[0])
        across = slice(columns.lo - third.lo, columns.hi - third.lo)
        mine = Interval(planes.lo, min(planes.hi, done.hi))  # planes that this row finishes
        later = Interval(max(planes.lo, done.hi), planes.hi)
        targets = [
            (self._row[mine.lo - done.lo : mine.hi - done.lo, ring, across], (mine, part))
            for ring, part in wrapped(lines, second.lo, self._row.shape[1])
        ]
        inside = slice(lines.lo - second.lo, lines.hi - second.lo)
        targets += [(self._kept[place, inside, across], (there, lines)) for place, there in self._places(later)]
        for target, along in targets:
            if not target.size:
                continue
            box = tuple(
                slice(part.lo - start, part.hi - start) for part, start in zip((*along, columns), starts, strict=True)
            )
            self._arrays.add(target, result[box], weights[box], share, member, counts=counts)

    def finished(self) -> Iterator[tuple[Interval, Array]]:
        """Yield the lines along the second axis that the window finishes, and their sums (z, y, x, maps)."""
        first, second, third = self._line
        row, at, column = self._place
        planes, across = first.done(row).size, third.done(column)
        for ring, part in wrapped(second.done(at), second.lo, self._row.shape[1]):
            yield part, self._row[:planes, ring, across.lo - third.lo : across.hi - third.lo]


def wrapped(lines: Interval, first: int, size: int) -> Iterator[tuple[slice, Interval]]:
    """Yield the places of some lines in a ring of so many, and which lines these are."""
    at = lines.lo
    while at < lines.hi:
        place = (at - first) % size
        count = min(lines.hi - at, size - place)
        yield slice(place, place + count), Interval(at, at + count)
        at += count
