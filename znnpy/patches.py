"""Cover a box of dense output with columns, and columns with steps. A patch is a column of one step.

A column that walks takes its input planes in order, each once. Its first steps give no output: they bring in the field
of view. Where the output ends within the last step, the rest of that step is computed and not written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import overload

from znnpy.shapes import Vec3, add, ceil_divide, subtract


@dataclass(frozen=True, slots=True)
class Box:
    """Voxels lo <= (z, y, x) < hi."""

    lo: Vec3
    hi: Vec3

    @property
    def size(self) -> Vec3:
        return subtract(self.hi, self.lo)

    @property
    def voxels(self) -> int:
        return prod(self.size)

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        """To index a (z, y, x) array."""
        return (
            slice(self.lo[0], self.hi[0]),
            slice(self.lo[1], self.hi[1]),
            slice(self.lo[2], self.hi[2]),
        )

    def shifted(self, by: Vec3) -> Box:
        return Box(add(self.lo, by), add(self.hi, by))

    def clipped(self, to: Box) -> Box:
        """The part inside `to`; empty boxes have size 0 along some axis, never negative."""
        lo = tuple(min(max(a, b), c) for a, b, c in zip(self.lo, to.lo, to.hi, strict=True))
        hi = tuple(max(min(a, b), c) for a, b, c in zip(self.hi, to.hi, lo, strict=True))
        return Box((lo[0], lo[1], lo[2]), (hi[0], hi[1], hi[2]))


@dataclass(frozen=True, slots=True)
class Patch:
    """One run of the session: what is read, what is computed, and which part of it is kept.

    `out` is the full output of a step, always of the planned size; in the first steps of a column that walks it lies
    before the column. `write` is the part that no other patch writes; empty in those first steps. `read` is where the
    input begins. All count voxels of the dense output; an output voxel at p depends on input from p on.
    """

    read: Vec3
    out: Box
    write: Box

    def shifted(self, by: Vec3) -> Patch:
        return Patch(add(self.read, by), self.out.shifted(by), self.write.shifted(by))


@dataclass(frozen=True, slots=True)
class Column:
    """Patches that run one after the other; the unit that a journal records and a resume repeats."""

    steps: tuple[Patch, ...]

    @property
    def voxels(self) -> int:
        """Output voxels written."""
        return sum(step.write.voxels for step in self.steps)

    def shifted(self, by: Vec3) -> Column:
        return Column(tuple(step.shifted(by) for step in self.steps))


@dataclass(frozen=True, slots=True)
class Cover(Sequence[Column]):
    """Columns whose `write` boxes partition the dense output [0, size). Made one by one, when asked for.

    Columns stand on a grid, z slowest. The last along an axis moves inwards and writes only what is left over, but for
    the axis along which columns walk: there it has fewer steps. Where the output is smaller than the patch, the patch
    reaches beyond it (its input beyond the volume). Columns behind the first along an axis may write less than it does.
    """

    size: Vec3
    patch: Vec3  # output of one step
    axis: int = 0  # along which columns walk
    column: int = 0  # output planes that a column writes along it, a multiple of the patch; 0: patches, no column walks
    margin: int = 0  # field of view - 1 along it
    later: Vec3 | None = None  # of patches: what all but the first along each axis write; None: as much as that

    @property
    def grid(self) -> Vec3:
        """Output voxels that columns write, but for the last along each axis."""
        return _with(self.patch, self.axis, self.column) if self.column else self.patch

    @property
    def counts(self) -> Vec3:
        """Columns along each axis."""
        if self.later is None:
            return ceil_divide(self.size, self.grid)
        behind = ceil_divide(subtract(self.size, self.grid), self.later)
        z, y, x = (1 + max(0, count) for count in behind)
        return z, y, x

    def sizes(self, axis: int) -> list[int]:
        """Output voxels that columns write along an axis, in order."""
        places = (_with((0, 0, 0), axis, place) for place in range(1 + self.counts[axis]))
        ends = [min(self.size[axis], self._corner(place)[axis]) for place in places]
        return [end - begin for begin, end in pairwise(ends)]

    @property
    def ahead(self) -> int:
        """Steps of a column before the first that gives output."""
        return -(-self.margin // self.patch[self.axis]) if self.column else 0

    def steps(self, ahead: int) -> int:
        """Steps of all columns in which something is computed that begins `ahead` planes before the output does."""
        if not self.column:
            return len(self)
        thick = self.patch[self.axis]
        whole, rest = divmod(self.size[self.axis], self.column)
        in_a_row = whole + (rest > 0)
        output = whole * (self.column // thick) - (-rest // thick)
        return len(self) // in_a_row * (output - in_a_row * (-ahead // thick))

    def __len__(self) -> int:
        return prod(self.counts)

    @overload
    def __getitem__(self, index: int) -> Column: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Column, ...]: ...

    def __getitem__(self, index: int | slice) -> Column | tuple[Column, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        _, rows, wide = self.counts
        rest, x = divmod(range(len(self))[index], wide)  # IndexError beyond the end
        z, y = divmod(rest, rows)
        write_lo, write_hi = self._corner((z, y, x)), self._corner((z + 1, y + 1, x + 1))
        write = Box(write_lo, write_hi).clipped(Box((0, 0, 0), self.size))
        lo = tuple(max(0, min(w, s - p)) for w, s, p in zip(write_lo, self.size, self.patch, strict=True))
        out_lo = (lo[0], lo[1], lo[2])
        if self.column == 0:
            return Column((Patch(out_lo, Box(out_lo, add(out_lo, self.patch)), write),))
        return Column(tuple(self._steps(out_lo, write)))

    def _corner(self, place: Vec3) -> Vec3:
        """Where a column on the grid begins to write."""
        later = self.later or self.grid
        ends = zip(place, self.grid, later, strict=True)
        z, y, x = (first + (count - 1) * size if count else 0 for count, first, size in ends)
        return z, y, x

    def _steps(self, lo: Vec3, write: Box) -> Iterator[Patch]:
        """Of the column that writes `write`, whose steps stand at `lo` across the axis."""
        thick, axis = self.patch[self.axis], self.axis
        first, end = write.lo[axis] - self.ahead * thick, write.hi[axis]
        for plane in range(first, end, thick):
            out_lo = _with(lo, axis, plane)
            out = Box(out_lo, add(out_lo, self.patch))
            yield Patch(_with(out_lo, axis, plane + self.margin), out, write.clipped(out))


def _with(v: Vec3, axis: int, size: int) -> Vec3:
    z, y, x = (size if i == axis else other for i, other in enumerate(v))
    return z, y, x


def cover(size: Vec3, patch: Vec3) -> Cover:
    """Patches of size `patch`, each for itself, that write a dense output of (z, y, x) voxels, each voxel once."""
    return Cover(size, patch)
