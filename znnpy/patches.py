"""Cover a box of dense output with patches. A patch is a column of one step: columns are what a run walks through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

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


def cover(size: Vec3, patch: Vec3) -> tuple[Column, ...]:
    """Columns whose `write` boxes partition the dense output [0, size).

    Patches stand on a grid of step `patch`, z slowest. The last along an axis moves inwards and writes only what is
    left over. Where the output is smaller than the patch, the patch reaches beyond it (its input beyond the volume).
    """
    return tuple(Column((step,)) for step in _grid(size, patch))


def _grid(size: Vec3, patch: Vec3) -> Iterator[Patch]:
    counts = ceil_divide(size, patch)
    for index in product(*map(range, counts)):
        write_lo = (index[0] * patch[0], index[1] * patch[1], index[2] * patch[2])
        write = Box(write_lo, add(write_lo, patch)).clipped(Box((0, 0, 0), size))
        lo = tuple(max(0, min(w, s - p)) for w, s, p in zip(write_lo, size, patch, strict=True))
        out_lo = (lo[0], lo[1], lo[2])
        yield Patch(Box(out_lo, add(out_lo, patch)), write)
