"""Positions of the windows of a volume.

Both packages centre a volume that is smaller than a window in zeros, of which the odd one lies behind it. Windows then
lie on a grid, and the last along an axis ends with the volume:

* MONAI moves windows by `int(size * (1 - overlap))` voxels and shifts the last one back;
* nnU-Net takes as few windows as steps of at most `size * tile_step_size` voxels need, and spreads them evenly.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from znnpy.patches import Box
from znnpy.shapes import Vec3, add, subtract
from znnpy.windows.settings import Windows


@dataclass(frozen=True)
class WindowGrid:
    """The windows of a volume, in the order in which both packages compute them: z slowest, x fastest."""

    volume: Vec3
    windows: Windows

    @cached_property
    def before(self) -> Vec3:
        """Voxels of zeros in front of the volume, where it is smaller than a window."""
        z, y, x = (max(0, n - m) // 2 for n, m in zip(self.windows.size, self.volume, strict=True))
        return z, y, x

    @cached_property
    def behind(self) -> Vec3:
        """Voxels of zeros behind the volume."""
        return subtract(subtract(self.padded, self.volume), self.before)

    @cached_property
    def padded(self) -> Vec3:
        """Size of the volume with those zeros: no axis is smaller than a window."""
        z, y, x = (max(n, m) for n, m in zip(self.windows.size, self.volume, strict=True))
        return z, y, x

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """For each axis the first voxels of windows in the padded volume, ascending and distinct."""
        sizes = self.windows.size
        if self.windows.rule == "monai":
            z, y, x = map(_monai, self.padded, sizes, self.windows.overlap)
        else:
            z, y, x = map(_nnunet, self.padded, sizes, self.windows.steps)
        return z, y, x

    @cached_property
    def counts(self) -> Vec3:
        """Number of windows along each axis."""
        z, y, x = map(len, self.starts)
        return z, y, x

    @property
    def inside(self) -> Box:
        """The volume within the padded one."""
        return Box(self.before, add(self.before, self.volume))

    def touching(self, box: Box) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return for each axis the starts of the windows that have voxels in a box of the padded volume."""
        z, y, x = (
            at[bisect_right(at, lo - size) : bisect_left(at, hi)]
            for at, size, lo, hi in zip(self.starts, self.windows.size, box.lo, box.hi, strict=True)
        )
        return z, y, x


def _monai(length: int, size: int, overlap: float) -> tuple[int, ...]:
    """Return starts as `monai.data.utils.dense_patch_slices` has them, for the interval of `monai.inferers.utils`."""
    interval = max(1, int(size * (1 - overlap)))
    steps = -(-(length - size) // interval)
    return tuple(min(step * interval, length - size) for step in range(steps + 1))


def _nnunet(length: int, size: int, step: float) -> tuple[int, ...]:
    """Return starts as nnU-Net's `compute_steps_for_sliding_window` has them; halves are rounded to even numbers.

    Windows of one voxel do not overlap. nnU-Net repeats them, each with one weight, which leaves averages as they are.
    """
    steps = ceil((length - size) / max(1, size * step))
    return tuple(round((length - size) / max(1, steps) * i) for i in range(steps + 1))
