"""Marks the outputs that depend on input voxels that are not finite."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from znnpy.planner.plan import Plan
from znnpy.shapes import Vec3, add, subtract, valid

SEEN_BYTES = 2**20  # bytes of a mask that are copied at once

Mask = npt.NDArray[np.bool_]


class NanMask:
    """Finds the outputs that depend on a voxel that is not finite, from what each step of a column reads."""

    def __init__(self, plan: Plan, field_of_view: Vec3) -> None:
        self._field_of_view, self._axis = field_of_view, plan.axis
        size = add(plan.patch_out, field_of_view)
        self._window = subtract(size, (1, 1, 1))  # input that the output of a step depends on
        self._new = plan.patch_in[plan.axis]
        self._read: Mask | None = None  # mask of that window, kept once any mask was not empty

    def after(self, bad: Mask | None, *, writes: bool) -> Mask | None:
        """Return where the output of a step is NaN, (z, y, x) bool; None where it is nowhere, or nothing is written.

        bad  where the voxels that the step read are not finite; None where all are finite. Overwritten.

        Masks of an earlier column are gone before there is output: the first steps of a column read a whole window.
        """
        if self._new == self._window[self._axis]:
            return None if bad is None else seen(bad, self._field_of_view)
        if self._read is None:
            if bad is None:
                return None
            self._read = np.zeros(self._window, np.bool_)
        planes = np.moveaxis(self._read, self._axis, 0)
        for plane in range(len(planes) - self._new):  # ascending: each plane moves to where nothing is needed any more
            planes[plane] = planes[plane + self._new]
        planes[-self._new :] = False if bad is None else np.moveaxis(bad, self._axis, 0)
        return seen(self._read.copy(), self._field_of_view) if writes and planes.any() else None


def seen(bad: Mask, field_of_view: Vec3) -> Mask:
    """Return which outputs have a bad voxel in their field of view: (n - fov + 1 per axis) bool, axes (z, y, x).

    bad  (z, y, x) bool, C order; overwritten, and the result is a part of it, so that no second mask is needed

    Windows grow by doubling along one axis after the other: 2 log2(fov) passes of `or` instead of fov^3.
    """
    rows = bad.reshape(-1, bad.shape[2])
    high = max(1, SEEN_BYTES // rows.shape[1])
    for axis, extent in enumerate(field_of_view):
        width = 1
        while width < extent:
            step = min(width, extent - width)
            if axis == 2:
                for first in range(0, len(rows), high):  # in parts, because numpy copies operands that overlap
                    some = rows[first : first + high]
                    some[:, :-step] |= some[:, step:]
            else:
                planes = np.moveaxis(bad, axis, 0)
                for plane in range(len(planes) - step):  # ascending: each plane is combined with an unchanged one
                    planes[plane] |= planes[plane + step]
            width += step
    z, y, x = valid((bad.shape[0], bad.shape[1], bad.shape[2]), field_of_view)
    return bad[:z, :y, :x]
