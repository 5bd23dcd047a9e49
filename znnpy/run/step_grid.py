"""All steps of a cover that touch a mask, found at once: there may be very many, and a plan is sought among covers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from znnpy.patches import Cover
from znnpy.shapes import Vec3
from znnpy.volume.mask import WantedOutput

# A part of a column that is computed: its first step, its first step with output, and the step behind its last.
Part = tuple[int, int, int]
Parts = Callable[[Sequence[int]], Sequence[Part]]  # of a column whose output is wanted in these steps
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class StepGrid:
    """The steps with output of a cover, and which of them may have wanted output.

    touched  by the place of the column, and the number of the step among those with output
    """

    cover: Cover
    touched: Flags

    @classmethod
    def of(cls, cover: Cover, wanted: WantedOutput) -> StepGrid:
        found = wanted.touched([np.array(cover.edges(axis)) for axis in range(3)])
        if not cover.column:
            return cls(cover, found[..., np.newaxis])
        found = np.moveaxis(found, cover.axis, 2)
        columns, steps = cover.counts[cover.axis], cover.column // cover.patch[cover.axis]
        padded = np.zeros((*found.shape[:2], columns * steps), np.bool_)  # the last column may have fewer steps
        padded[..., : found.shape[2]] = found
        return cls(cover, np.moveaxis(padded.reshape(*found.shape[:2], columns, steps), 2, cover.axis))

    def wanted_steps(self, place: Vec3) -> list[int]:
        """Return the steps of the column at a place, counted from its first step, whose output may be wanted."""
        found: list[int] = self._steps(self.touched[place])
        return found

    def _steps(self, touched: Flags) -> list[int]:
        found: list[int] = (np.flatnonzero(touched) + self.cover.ahead).tolist()
        return found

    @cached_property
    def _patterns(self) -> tuple[Flags, npt.NDArray[np.intp]]:
        """The steps that are touched in columns, each pattern once, and which pattern each column has."""
        rows = self.touched.reshape(-1, self.touched.shape[3])
        _, first, number = np.unique(np.packbits(rows, axis=1), axis=0, return_index=True, return_inverse=True)
        return rows[first], number.reshape(-1)

    def work(self, parts: Parts, steps_work: Callable[[int], float]) -> float:
        """Return the work of all columns; `steps_work` is that of so many steps behind each other."""
        rows, number = self._patterns
        each = [sum(steps_work(end - begin) for begin, _, end in parts(self._steps(row))) for row in rows]
        return float(np.dot(each, np.bincount(number, minlength=len(rows))))

    def voxels_outside(self, parts: Parts) -> int:
        """Return the voxels of the output that are not computed."""
        rows, number = self._patterns
        outside = np.ones(rows.shape, np.bool_)
        for row, flags in zip(rows, outside, strict=True):
            for _, gives, end in parts(self._steps(row)):
                flags[max(0, gives - self.cover.ahead) : end - self.cover.ahead] = False
        sizes = [np.diff(self.cover.edges(axis)) for axis in range(3)]
        left = outside[number].reshape(self.touched.shape)
        if not self.cover.column:
            left = left[..., 0]
        else:
            left = np.moveaxis(left, self.cover.axis, 2)
            left = left.reshape(*left.shape[:2], -1)[..., : len(sizes[self.cover.axis])]
            left = np.moveaxis(left, 2, self.cover.axis)
        return int(np.einsum("zyx,z,y,x->", left.astype(np.int64), *sizes))
