"""Cover a box of dense output with columns, and columns with steps. A patch is a column of one step.

A column that streams reads its input planes in order, each once. Its first steps give no output: they read the field of
view. If the output ends within the last step, the rest of that step is computed but not written.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple, overload

from znnpy.shapes import Vec3, add, ceil_divide, subtract


@dataclass(frozen=True, slots=True)
class Box:
    """The voxels lo <= (z, y, x) < hi."""

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
        """Index of the voxels in a (z, y, x) array."""
        return (
            slice(self.lo[0], self.hi[0]),
            slice(self.lo[1], self.hi[1]),
            slice(self.lo[2], self.hi[2]),
        )

    def shifted(self, by: Vec3) -> Box:
        return Box(add(self.lo, by), add(self.hi, by))

    def clipped(self, to: Box) -> Box:
        """Return the part inside `to`; an empty box has size 0 along some axis, never a negative size."""
        lo = tuple(min(max(a, b), c) for a, b, c in zip(self.lo, to.lo, to.hi, strict=True))
        hi = tuple(max(min(a, b), c) for a, b, c in zip(self.hi, to.hi, lo, strict=True))
        return Box((lo[0], lo[1], lo[2]), (hi[0], hi[1], hi[2]))


class Piece(NamedTuple):
    """The part of one output that a step computes, and what of it is written."""

    out: Box
    write: Box


@dataclass(frozen=True, slots=True)
class Patch:
    """One step of a session: what is read, what is computed, and which part of it is written.

    `out` is the full output of a step, always of the planned size; in the first steps of a column that streams it lies
    before the column. `write` is the part that no other patch writes; it is empty in those first steps. `read` is where
    the input begins. All are in voxels of the dense output; an output voxel at p depends on input from p on.

    Steps of a graph differ in size (`graph_columns`): `size` is that of the input, and `step` says what is computed.
    `out` and `write` are those of its first output, and `others` of the further ones.

    A step outside a mask is not computed: zeros are written (`znnpy.run.masked`). A step that is repeated was computed
    before, in another column or by an earlier run; it counts for nothing, and gives no output.
    """

    read: Vec3
    out: Box
    write: Box
    size: Vec3 | None = None  # None: as large as the plan says
    step: object | None = None
    others: tuple[Piece, ...] = ()
    computed: bool = True
    repeated: bool = False

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The parts of the outputs that are computed and written, one of each."""
        return (Piece(self.out, self.write), *self.others)

    @property
    def writes(self) -> bool:
        """Return whether anything is written: the first steps of a column that streams give no output."""
        return self.write.voxels > 0 or any(piece.write.voxels for piece in self.others)

    def shifted(self, by: Vec3) -> Patch:
        return replace(self, read=add(self.read, by), out=self.out.shifted(by), write=self.write.shifted(by))


@dataclass(frozen=True, slots=True)
class Column:
    """Patches that run in order; the unit that a journal records and a resumed run repeats."""

    steps: tuple[Patch, ...]

    @property
    def voxels(self) -> int:
        """Number of voxels of the first output that are written."""
        return sum(step.write.voxels for step in self.steps)

    @property
    def computed_voxels(self) -> int:
        """Number of them that are computed: the others lie outside a mask."""
        return sum(step.write.voxels for step in self.steps if step.computed)

    def shifted(self, by: Vec3) -> Column:
        return Column(tuple(step.shifted(by) for step in self.steps))


class Columns(Sequence[Column]):
    """Columns on a grid, the first axis slowest. Each is made when it is requested."""

    __slots__ = ()

    @property
    @abstractmethod
    def counts(self) -> Vec3:
        """Number of columns along each axis of the grid."""

    @abstractmethod
    def _at(self, place: Vec3) -> Column:
        """Return the column at a place of the grid."""

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
        return self._at((z, y, x))


@dataclass(frozen=True, slots=True)
class Cover(Columns):
    """Columns whose `write` boxes partition the dense output [0, size). Each is made when it is requested.

    Columns lie on a grid, z slowest. The last column along an axis is moved inwards and writes only the remainder,
    except along the axis of the columns, where it has fewer steps. If the output is smaller than the patch, the patch
    exceeds it (and its input the volume). Columns after the first along an axis may write less than the first.
    """

    size: Vec3
    patch: Vec3  # output of one step
    axis: int = 0  # axis of the columns
    column: int = 0  # output planes of a column along it, a multiple of the patch; 0: separate patches
    margin: int = 0  # field of view - 1 along it
    later: Vec3 | None = None  # voxels that patches after the first along each axis write; None: as many as the first

    @property
    def grid(self) -> Vec3:
        """Output voxels that a column writes, unless it is the last along an axis."""
        return with_size(self.patch, self.axis, self.column) if self.column else self.patch

    @property
    def counts(self) -> Vec3:
        """Number of columns along each axis."""
        if self.later is None:
            return ceil_divide(self.size, self.grid)
        behind = ceil_divide(subtract(self.size, self.grid), self.later)
        z, y, x = (1 + max(0, count) for count in behind)
        return z, y, x

    def sizes(self, axis: int) -> list[int]:
        """Return the number of output voxels that each column writes along an axis, in order."""
        places = (with_size((0, 0, 0), axis, place) for place in range(1 + self.counts[axis]))
        ends = [min(self.size[axis], self._corner(place)[axis]) for place in places]
        return [end - begin for begin, end in pairwise(ends)]

    def edges(self, axis: int) -> list[int]:
        """Return where steps with output begin to write along an axis, in order, and the end of the output."""
        if self.column and axis == self.axis:
            return [*range(0, self.size[axis], self.patch[axis]), self.size[axis]]
        return [0, *accumulate(self.sizes(axis))]

    @property
    def ahead(self) -> int:
        """Number of steps of a column before the first that gives output."""
        return -(-self.margin // self.patch[self.axis]) if self.column else 0

    def steps(self, ahead: int) -> int:
        """Return the steps of all columns, with those that compute up to `ahead` planes before the output."""
        if not self.column:
            return len(self)
        thick = self.patch[self.axis]
        whole, rest = divmod(self.size[self.axis], self.column)
        in_a_row = whole + (rest > 0)
        output = whole * (self.column // thick) - (-rest // thick)
        return len(self) // in_a_row * (output - in_a_row * (-ahead // thick))

    def _at(self, place: Vec3) -> Column:
        write_lo, write_hi = self._corner(place), self._corner(add(place, (1, 1, 1)))
        write = Box(write_lo, write_hi).clipped(Box((0, 0, 0), self.size))
        lo = tuple(max(0, min(w, s - p)) for w, s, p in zip(write_lo, self.size, self.patch, strict=True))
        out_lo = (lo[0], lo[1], lo[2])
        if self.column == 0:
            return Column((Patch(out_lo, Box(out_lo, add(out_lo, self.patch)), write),))
        return Column(tuple(self._steps(out_lo, write)))

    def _corner(self, place: Vec3) -> Vec3:
        """Return where a column on the grid begins to write."""
        later = self.later or self.grid
        ends = zip(place, self.grid, later, strict=True)
        z, y, x = (first + (count - 1) * size if count else 0 for count, first, size in ends)
        return z, y, x

    def _steps(self, lo: Vec3, write: Box) -> Iterator[Patch]:
        """Yield the steps of the column that writes `write`; they begin at `lo` across the axis."""
        thick, axis = self.patch[self.axis], self.axis
        first, end = write.lo[axis] - self.ahead * thick, write.hi[axis]
        for plane in range(first, end, thick):
            out_lo = with_size(lo, axis, plane)
            out = Box(out_lo, add(out_lo, self.patch))
            yield Patch(with_size(out_lo, axis, plane + self.margin), out, write.clipped(out))


def with_size(v: Vec3, axis: int, size: int) -> Vec3:
    """Return `v` with another size along `axis`."""
    z, y, x = v
    return (size, y, x) if axis == 0 else (z, size, x) if axis == 1 else (z, y, size)


def cover(size: Vec3, patch: Vec3) -> Cover:
    """Cover a dense output of (z, y, x) voxels with separate patches of size `patch` that write each voxel once."""
    return Cover(size, patch)
