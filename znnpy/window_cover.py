"""Cover a volume with windows whose results are blended, and say which voxels are finished after each.

Windows are computed row by row: those at one place along the first axis, in the order of the second and of the third.
After each window the voxels that no later one covers are finished: they are a box, and the boxes of all windows
partition the output. What the next row adds to is kept as sums. If these are too large, the output is divided into
parts along the second axis, and windows across a boundary are computed for both.

Coordinates are turned, with the axis of the rows first, unless `Box`es say otherwise; they count from the first voxel
of the volume, padded to the size of a window where it is smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from znnpy.patches import Box, Column, Columns, Patch
from znnpy.shapes import Vec3, add, subtract, turned, turned_back
from znnpy.window_lines import Line
from znnpy.windows.grid import WindowGrid
from znnpy.windows.settings import Windows


@dataclass(frozen=True, slots=True)
class WindowStep:
    """A window: the part of the output that it is computed for, and its place along each axis there, turned.

    adds  whether its result is only added to what is kept: the voxels that it would finish are there already
    """

    part: int
    place: Vec3
    adds: bool = False


@dataclass(frozen=True)
class WindowCover(Columns):
    """The windows of a volume; a column is a row of them in one part of the output.

    volume  voxels (z, y, x) of the volume
    region  voxels (z, y, x) that are predicted
    axis    of the rows
    parts   of the output along the axis behind it, each of which has sums of its own
    """

    windows: Windows
    volume: Vec3
    region: Box
    axis: int
    parts: int = 1

    @cached_property
    def grid(self) -> WindowGrid:
        """The places of all windows, turned."""
        return WindowGrid(turned(self.volume, self.axis), self.windows.turned(self.axis))

    @cached_property
    def grid_as_is(self) -> WindowGrid:
        """The places of all windows, not turned."""
        return WindowGrid(self.volume, self.windows)

    @cached_property
    def lines(self) -> tuple[tuple[Line, Line, Line], ...]:
        """The windows along each axis, for each part."""
        grid, lo, hi = self.grid, turned(self.region.lo, self.axis), turned(self.region.hi, self.axis)
        wanted = Box(lo, hi).shifted(grid.before)
        first, second, third = map(Line, grid.touching(wanted), grid.windows.size, wanted.lo, wanted.hi)
        begin, count = second.first, len(second) - second.first
        ends = [second.done(begin + count * part // self.parts).lo for part in range(self.parts)]
        bounds = zip(ends, (*ends[1:], second.hi), strict=True)
        return tuple((first, Line.over(second.starts, second.size, low, high), third) for low, high in bounds)

    @property
    def why_too_many(self) -> str | None:
        """Why the windows of the region are more than can be planned; None if they are not."""
        return self.grid_as_is.why_too_many(self.region.shifted(self.grid_as_is.before))

    @cached_property
    def most_parts(self) -> int:
        """The most parts into which the output can be divided."""
        second = replace(self, parts=1).lines[0][1]
        return len(second) - second.first

    @property
    def counts(self) -> Vec3:
        return self.parts, len(self._rows) - self._rows.first, 1

    @property
    def _rows(self) -> Line:
        """The windows along the axis of the rows."""
        return self.lines[0][0]

    @cached_property
    def computed(self) -> int:
        """Windows that are computed, those for two parts twice."""
        return sum(len(a) * len(b) * len(c) for a, b, c in self.lines)

    @cached_property
    def most_done(self) -> Vec3:
        """The most voxels (z, y, x) that a window finishes."""
        most = [[line.most_done for line in lines] for lines in self.lines]
        first, second, third = map(max, zip(*most, strict=True))
        return turned_back((first, second, third), self.axis)

    def sums(self, maps: int) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
        """Return the shapes of the sums of so many maps that a row keeps for the next, and of those of a row.

        The latter hold what the windows at two neighbouring places along the second axis add to.
        """
        first, third = self.lines[0][0], self.lines[0][2]
        widest = max(lines[1].hi - lines[1].lo for lines in self.lines)
        band = max(lines[1].most_covered for lines in self.lines)
        across = third.hi - third.lo
        return (first.most_kept, widest, across, maps), (first.most_done, band, across, maps)

    def sums_bytes(self, maps: int, itemsize: int) -> int:
        """Return the bytes of these sums, of which those kept for the next row have so many bytes a value."""
        kept, row = self.sums(maps)
        return itemsize * prod(kept) + 4 * prod(row)

    def read(self, step: WindowStep) -> Box:
        """Return the voxels of the volume (z, y, x) that a window covers."""
        lines, grid = self.lines[step.part], self.grid
        starts = [line.starts[place] - before for line, place, before in self._each(lines, step.place)]
        box = Box((starts[0], starts[1], starts[2]), add((starts[0], starts[1], starts[2]), grid.windows.size))
        inside = box.clipped(Box((0, 0, 0), grid.volume))
        return Box(turned_back(inside.lo, self.axis), turned_back(inside.hi, self.axis))

    def done(self, step: WindowStep) -> Box:
        """Return the voxels of the volume (z, y, x) that are finished after a window."""
        return self.done_padded(step).shifted(subtract((0, 0, 0), self.grid_as_is.before))

    def done_padded(self, step: WindowStep) -> Box:
        """Return the voxels of the padded volume (z, y, x) that are finished after a window."""
        each = [line.done(place) for line, place in zip(self.lines[step.part], step.place, strict=True)]
        lo, hi = (each[0].lo, each[1].lo, each[2].lo), (each[0].hi, each[1].hi, each[2].hi)
        return Box(turned_back(lo, self.axis), turned_back(hi, self.axis))

    def _each(self, lines: tuple[Line, Line, Line], place: Vec3) -> Iterator[tuple[Line, int, int]]:
        return zip(lines, place, self.grid.before, strict=True)

    def _at(self, place: Vec3) -> Column:
        part, row, _ = place
        return self._row(part, self._rows.first + row) if row else self.begun_at(part * self.counts[1])

    def begun_at(self, index: int) -> Column:
        """Return a column, and before its windows those of earlier rows that add to what it and later ones finish."""
        part, row = divmod(index, self.counts[1])
        row += self._rows.first
        again = (step for before in self._rows.before(row) for step in self._row(part, before, adds=True).steps)
        return Column((*again, *self._row(part, row).steps))

    def goes_on(self, index: int) -> bool:
        """Return whether a column continues the one before it."""
        return index % self.counts[1] > 0

    def _row(self, part: int, row: int, *, adds: bool = False) -> Column:
        _, second, third = self.lines[part]
        places = ((row, y, x) for y in range(len(second)) for x in range(len(third)))
        return Column(tuple(self._patch(WindowStep(part, place, adds)) for place in places))

    def _patch(self, step: WindowStep) -> Patch:
        read, done = self.read(step), self.done(step)
        out = done.shifted(subtract((0, 0, 0), self.region.lo))
        write = Box(out.lo, out.lo) if step.adds else out
        return Patch(read.lo, out, write, read.size, step, repeated=step.adds)
