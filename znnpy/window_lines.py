"""Follow windows along one axis: what each adds to, what no later one touches, and what is kept for later ones."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from znnpy.geometry import Interval


@dataclass(frozen=True)
class Line:
    """The windows along an axis that touch the voxels `lo` to `hi`, which are wanted; nothing else is kept.

    starts  the first voxel of each window, ascending; together they cover what is wanted
    size    of a window
    """

    starts: tuple[int, ...]
    size: int
    lo: int
    hi: int

    @classmethod
    def over(cls, starts: Sequence[int], size: int, lo: int, hi: int) -> Line:
        """Return those of some windows that touch the voxels `lo` to `hi`; their starts ascend."""
        return cls(tuple(starts[bisect_right(starts, lo - size) : bisect_left(starts, hi)]), size, lo, hi)

    def __len__(self) -> int:
        return len(self.starts)

    def covered(self, index: int) -> Interval:
        """Return the wanted voxels that a window covers."""
        start = self.starts[index]
        return Interval(max(start, self.lo), min(start + self.size, self.hi))

    def done(self, index: int) -> Interval:
        """Return the wanted voxels that no window behind this one covers, and some before it did or it does."""
        return Interval(self._ends[index], self._ends[index + 1])

    def kept(self, index: int) -> Interval:
        """Return the voxels of this window, and of those before it, that windows behind it cover too."""
        return Interval(self.done(index).hi, self.covered(index).hi)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """The voxel with which each window begins to finish some; the last one is `hi`."""
        inner = (min(max(start, self.lo), self.hi) for start in self.starts[1:])
        return (self.lo, *inner, self.hi)

    @cached_property
    def most_covered(self) -> int:
        """The most voxels that a window covers."""
        return max(self.covered(index).size for index in range(len(self)))

    @cached_property
    def most_done(self) -> int:
        """The most voxels that a window finishes."""
        return max(self.done(index).size for index in range(len(self)))

    @cached_property
    def most_kept(self) -> int:
        """The most voxels that are kept behind a window."""
        return max(self.kept(index).size for index in range(len(self)))

    @cached_property
    def first(self) -> int:
        """The first window that finishes voxels; those before it begin in front of what is wanted."""
        return next(index for index in range(len(self)) if self.done(index).size)

    def before(self, index: int) -> range:
        """Return the windows before one that cover voxels which it or later ones finish."""
        begin = self.done(index).lo
        first = next(earlier for earlier in range(index + 1) if self.covered(earlier).hi > begin)
        return range(first, index)
