"""Boxes of arrays with any number of axes: intersections, differences, runs of elements, and cuts along chunks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True, slots=True)
class Region:
    """The elements `lo` to `hi` of an array along each of its axes, `hi` not included."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of elements along each axis; 0 where there are none."""
        return tuple(max(0, hi - lo) for lo, hi in zip(self.lo, self.hi, strict=True))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the elements in the array."""
        return tuple(slice(lo, hi) for lo, hi in zip(self.lo, self.hi, strict=True))

    def clipped(self, other: Region) -> Region:
        """Return the intersection of two regions."""
        lo = tuple(map(max, self.lo, other.lo))
        return Region(lo, tuple(map(max, lo, map(min, self.hi, other.hi))))

    def in_steps(self, step: Sequence[int]) -> Region:
        """Return the indices of the blocks, of `step` elements along each axis, that hold elements of the region."""
        lo = tuple(at // size for at, size in zip(self.lo, step, strict=True))
        return Region(lo, tuple(-(-at // size) for at, size in zip(self.hi, step, strict=True)))

    def shifted(self, by: Sequence[int]) -> Region:
        """Return the region moved by this number of elements along each axis."""
        return Region(
            tuple(at + step for at, step in zip(self.lo, by, strict=True)),
            tuple(at + step for at, step in zip(self.hi, by, strict=True)),
        )

    def without(self, others: Sequence[Region]) -> Iterator[Region]:
        """Yield regions that do not overlap and hold every element of this one that no other holds."""
        holes = [hole for other in others if (hole := self.clipped(other)).elements]
        along = max(range(len(self.lo)), key=lambda axis: len({hole.lo[axis] for hole in holes}), default=0)
        holes.sort(key=lambda hole: hole.lo[along])  # so that holes after a part are not tested
        waiting = [(self, 0)] if self.elements else []  # parts, each with the first hole that may still cut it
        while waiting:
            part, number = waiting.pop()
            end = bisect_left(holes, part.hi[along], key=lambda hole: hole.lo[along])
            while number < end and not part.clipped(holes[number]).elements:
                number += 1
            if number >= end:
                yield part
            else:
                waiting += [(rest, number + 1) for rest in part._around(holes[number])]

    def _around(self, hole: Region) -> Iterator[Region]:
        """Yield regions with the elements of this one outside `hole`, which may cross the edges of this one."""
        rest, hole = self, self.clipped(hole)
        for axis in range(len(self.lo)):
            before = Region(rest.lo, _with(rest.hi, axis, hole.lo[axis]))
            after = Region(_with(rest.lo, axis, hole.hi[axis]), rest.hi)
            yield from (part for part in (before, after) if part.elements)
            rest = Region(_with(rest.lo, axis, hole.lo[axis]), _with(rest.hi, axis, hole.hi[axis]))


def run_of(shape: Sequence[int], first: int, end: int) -> Iterator[Region]:
    """Yield elements `first` to `end` (not included) of an array of this shape in C order, as few regions."""
    if first >= end:
        return
    if len(shape) == 1:
        yield Region((first,), (end,))
        return
    below = prod(shape[1:])
    begin, stop = -(-first // below), end // below  # complete entries of the first axis
    inner = tuple(shape[1:])
    if begin > stop:  # everything lies within one entry
        yield from _within(stop, run_of(inner, first - stop * below, end - stop * below))
        return
    yield from _within(begin - 1, run_of(inner, first - (begin - 1) * below, below) if first % below else ())
    if begin < stop:
        yield Region((begin, *(0 for _ in inner)), (stop, *inner))
    yield from _within(stop, run_of(inner, 0, end - stop * below))


def _within(entry: int, regions: Iterator[Region] | tuple[()]) -> Iterator[Region]:
    """Yield regions of one entry of the axis in front of theirs."""
    for region in regions:
        yield Region((entry, *region.lo), (entry + 1, *region.hi))


def _with(numbers: tuple[int, ...], axis: int, number: int) -> tuple[int, ...]:
    return (*numbers[:axis], number, *numbers[axis + 1 :])


def pieces(region: Region, chunk: Sequence[int], *, elements: int, chunks: int) -> Iterator[Region]:
    """Yield a region cut along the edges of chunks, so that no chunk lies in two pieces.

    chunk     elements of a chunk along each axis; the first chunk begins at 0
    elements  largest number of elements in a piece
    chunks    largest number of chunks that a piece touches; a single chunk is never cut
    """
    first = [lo // size for lo, size in zip(region.lo, chunk, strict=True)]
    counts = [-(-hi // size) - at for hi, size, at in zip(region.hi, chunk, first, strict=True)]
    most = max(1, min(chunks, elements // prod(chunk)))
    steps = [1] * len(counts)
    for axis in reversed(range(len(counts))):
        steps[axis] = max(1, min(counts[axis], most // prod(steps)))
        if steps[axis] < counts[axis]:
            break
    for index in product(*(range(0, count, step) for count, step in zip(counts, steps, strict=True))):
        lo = tuple((at + i) * size for at, i, size in zip(first, index, chunk, strict=True))
        piece = Region(lo, tuple(a + step * size for a, step, size in zip(lo, steps, chunk, strict=True)))
        yield piece.clipped(region)
