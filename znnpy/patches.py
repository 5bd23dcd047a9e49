"""Cover a box of dense output with patches. A patch is a column of one step: columns are what a run walks through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import overload

from znnpy.shapes import Vec3, add, ceil_divide, multiply, subtract


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
    """One run of the session: what is computed, and which part of it is kept.

    `out` is the full output patch, always of the planned size; `write` the part of it that no other patch writes.
    Both count voxels of the dense output. The input patch starts at `out.lo` too and is field of view - 1 larger.
    """

    out: Box
    write: Box


@dataclass(frozen=True, slots=True)
class Column:
    """Patches that run one after the other; the unit that a journal records and a resume repeats."""

    steps: tuple[Patch, ...]

    @property
    def voxels(self) -> int:
        """Output voxels written."""
        return sum(step.write.voxels for step in self.steps)


@dataclass(frozen=True, slots=True)
class Cover(Sequence[Column]):
    """Columns whose `write` boxes partition the dense output [0, size). Made one by one, when asked for.

    Patches stand on a grid of step `patch`, z slowest. The last along an axis moves inwards and writes only what is
    left over. Where the output is smaller than the patch, the patch reaches beyond it (its input beyond the volume).
    """

    size: Vec3
    patch: Vec3

    def __len__(self) -> int:
        return prod(ceil_divide(self.size, self.patch))

    @overload
    def __getitem__(self, index: int) -> Column: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Column, ...]: ...

    def __getitem__(self, index: int | slice) -> Column | tuple[Column, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        rest, x = divmod(range(len(self))[index], ceil_divide(self.size, self.patch)[2])  # IndexError beyond the end
        z, y = divmod(rest, ceil_divide(self.size, self.patch)[1])
        write_lo = multiply((z, y, x), self.patch)
        write = Box(write_lo, add(write_lo, self.patch)).clipped(Box((0, 0, 0), self.size))
        lo = tuple(max(0, min(w, s - p)) for w, s, p in zip(write_lo, self.size, self.patch, strict=True))
        out_lo = (lo[0], lo[1], lo[2])
        return Column((Patch(Box(out_lo, add(out_lo, self.patch)), write),))


def cover(size: Vec3, patch: Vec3) -> Cover:
    """Columns of patches of size `patch` that write a dense output of (z, y, x) voxels, each voxel once."""
    return Cover(size, patch)
