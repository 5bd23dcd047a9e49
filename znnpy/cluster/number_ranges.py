"""Sets of whole numbers that form few ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class NumberRanges:
    """A set of whole numbers from 0 on, kept as sorted ranges that do not touch.

    All methods take a time that grows with the logarithm of the number of ranges, except for the moving of pointers in
    two lists.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []  # each is the first number behind a range
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number)
        return at > 0 and number < self._stops[at - 1]

    def __iter__(self) -> Iterator[int]:
        for start, stop in zip(self._starts, self._stops, strict=True):
            yield from range(start, stop)

    def add(self, start: int, stop: int) -> None:
        """Add the numbers from `start` to `stop` - 1, of which some may be there already."""
        first, behind = bisect_left(self._stops, start), bisect_right(self._starts, stop)  # ranges that are touched
        if first < behind:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[behind - 1])
        self._replace(first, behind, [(start, stop)])

    def remove(self, start: int, stop: int) -> None:
        """Remove the numbers from `start` to `stop` - 1, of which some may be missing."""
        first, behind = bisect_right(self._stops, start), bisect_left(self._starts, stop)  # ranges that overlap
        if first < behind:
            kept = ((self._starts[first], start), (stop, self._stops[behind - 1]))
            self._replace(first, behind, [(lo, hi) for lo, hi in kept if lo < hi])

    def take(self, count: int, without: NumberRanges) -> list[int]:
        """Remove the `count` lowest numbers that are not in `without`, or as many as there are; return them sorted."""
        taken, at = list[int](), 0
        while len(taken) < count:
            place = bisect_right(self._stops, at)
            if place == len(self._stops):
                break
            start, stop = without.gap(max(at, self._starts[place]), self._stops[place])
            stop = min(stop, start + count - len(taken))
            taken += range(start, stop)
            self.remove(start, stop)
            at = max(start, stop)
        return taken

    def gap(self, start: int, stop: int) -> tuple[int, int]:
        """Return start and stop of the first numbers in a row from `start` to `stop` - 1 that are not in the set.

        Where there are none, the start returned is not below the stop.
        """
        place = bisect_right(self._stops, start)
        if place < len(self._starts) and self._starts[place] <= start:
            start, place = self._stops[place], place + 1
        return start, min(stop, self._starts[place]) if place < len(self._starts) else stop

    def _replace(self, first: int, behind: int, ranges: list[tuple[int, int]]) -> None:
        """Replace the ranges from place `first` to place `behind` - 1."""
        gone = sum(self._stops[first:behind]) - sum(self._starts[first:behind])
        self._starts[first:behind] = [start for start, _ in ranges]
        self._stops[first:behind] = [stop for _, stop in ranges]
        self._count += sum(stop - start for start, stop in ranges) - gone
