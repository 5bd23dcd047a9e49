"""The sums of the results of windows, from the first window that adds to a voxel until the last one did.

What a row of windows keeps for the next row lies in a ring of planes, and what the row itself finishes in a ring of
lines along the second axis: see `WindowCover.sums`. Coordinates are turned, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import ValuesOverflowError
from znnpy.geometry import Interval
from znnpy.kernels.aligned import aligned_bytes, touch
from znnpy.kernels.cpu.blend import add_weighted
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.messages import option
from znnpy.planner.plan import Sums
from znnpy.shapes import Vec3
from znnpy.window_cover import WindowCover
from znnpy.window_lines import Line

Array = npt.NDArray[Any]


class WindowSums:
    """The sums of one part of the output at a time; windows come in the order of `WindowCover`."""

    def __init__(
        self,
        cover: WindowCover,
        sums: Sums,
        maps: int,
        pool: ThreadPool,
        prepared: Callable[[int], None] | None = None,
    ) -> None:
        kept, row = cover.sums(maps)
        self._lines, self._pool = cover.lines, pool
        self._kept = _zeros(kept, np.dtype(sums.dtype), pool, prepared)
        self._row = _zeros(row, np.dtype(np.float32), pool, prepared)
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

        def take(lo: int, hi: int, worker: int) -> None:
            del worker
            for z in range(lo, hi):
                for ring, part in _wrapped(lines, second.lo, self._row.shape[1]):
                    if done.lo + z < end:
                        there = slice(part.lo - second.lo, part.hi - second.lo)
                        np.copyto(self._row[z, ring], self._plane(done.lo + z)[there], casting="unsafe")
                        self._check(self._row[z, ring])
                    else:
                        self._row[z, ring] = 0

        def clear(lo: int, hi: int, worker: int) -> None:
            del worker
            for z in range(lo, hi):
                self._plane(z + begin)[kept] = 0

        begin = max(end, done.hi)
        self._pool.each(take, done.size, least=self._least(done.size))
        planes = max(0, covered.hi - begin)
        self._pool.each(clear, planes, least=self._least(planes))  # these take the places of planes taken out
        self._ends[kept] = covered.hi

    def _check(self, sums: Array) -> None:
        """Raise ValuesOverflowError if sums that were kept in float16 exceeded it."""
        if self._kept.dtype == np.float16 and not np.isfinite(sums).all():
            raise ValuesOverflowError(
                "sums of windows exceed float16, in which a row keeps them for the next one within this memory; give "
                f"more memory ({option('ram')}), so that they are kept in float32"
            )

    def _least(self, planes: int) -> int:
        """Return how many planes a thread takes: a few calls cost less than many."""
        return max(1, -(-planes // self._pool.threads))

    def _plane(self, z: int) -> Array:
        """Return where a plane is kept."""
        plane: Array = self._kept[(z - self._line[0].lo) % self._kept.shape[0]]
        return plane

    def add(self, result: Array, weights: npt.NDArray[np.float32], share: float, member: int) -> None:
        """Add what the window gives (z, y, x, maps), times its weights (z, y, x), times a share.

        member  of an ensemble that is blended apart, whose maps follow those of the members before
        """
        maps = slice(member * result.shape[3], (member + 1) * result.shape[3])
        first, second, third = self._line
        starts = [line.starts[place] for line, place in zip(self._line, self._place, strict=True)]
        planes, lines, columns = (line.covered(place) for line, place in zip(self._line, self._place, strict=True))
        done = first.done(self._place[0])
        across = slice(columns.lo - third.lo, columns.hi - third.lo)
        ring = list(_wrapped(lines, second.lo, self._row.shape[1]))

        def piece(lo: int, hi: int, worker: int) -> None:
            del worker
            for z in range(planes.lo + lo, planes.lo + hi):
                if z < done.hi:
                    targets = [(self._row[z - done.lo, there, across, maps], part) for there, part in ring]
                else:
                    targets = [(self._plane(z)[lines.lo - second.lo : lines.hi - second.lo, across, maps], lines)]
                for target, part in targets:
                    mine = (
                        z - starts[0],
                        slice(part.lo - starts[1], part.hi - starts[1]),
                        slice(columns.lo - starts[2], columns.hi - starts[2]),
                    )
                    add_weighted(target, result[mine], weights[mine], share)

        self._pool.each(piece, planes.size, least=self._least(planes.size))

    def finished(self) -> Iterator[tuple[Interval, Array]]:
        """Yield the lines along the second axis that the window finishes, and their sums (z, y, x, maps)."""
        first, second, third = self._line
        row, at, column = self._place
        planes, across = first.done(row).size, third.done(column)
        for ring, part in _wrapped(second.done(at), second.lo, self._row.shape[1]):
            yield part, self._row[:planes, ring, across.lo - third.lo : across.hi - third.lo]


def _wrapped(lines: Interval, first: int, size: int) -> Iterator[tuple[slice, Interval]]:
    """Yield the places of some lines in a ring of so many, and which lines these are."""
    at = lines.lo
    while at < lines.hi:
        place = (at - first) % size
        count = min(lines.hi - at, size - place)
        yield slice(place, place + count), Interval(at, at + count)
        at += count


def _zeros(
    shape: tuple[int, ...], dtype: np.dtype[Any], pool: ThreadPool, prepared: Callable[[int], None] | None
) -> Array:
    """Return an array whose memory was written to."""
    block = aligned_bytes(int(np.prod(shape)) * dtype.itemsize)
    touch(block, pool, prepared)
    return block.view(dtype).reshape(shape)
