"""Positions of the windows of a volume.

Both packages centre a volume that is smaller than a window in zeros, of which the odd one lies behind it. Windows then
lie on a grid, and the last along an axis ends with the volume:

* MONAI moves windows by `int(size * (1 - overlap))` voxels and shifts the last one back;
* nnU-Net takes as few windows as steps of at most `size * tile_step_size` voxels need, and spreads them evenly.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from znnpy.patches import Box
from znnpy.shapes import Vec3, add, subtract, text
from znnpy.windows.settings import Windows

MOST_WINDOWS = 10**7  # of a region, since more take too long to plan


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
    def _along(self) -> tuple[Along, Along, Along]:
        """The windows along each axis, which are not listed: there may be very many."""
        sizes = self.windows.size
        if self.windows.rule == "monai":
            z, y, x = map(_monai, self.padded, sizes, self.windows.overlap)
        else:
            z, y, x = map(_nnunet, self.padded, sizes, self.windows.steps)
        return z, y, x

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """For each axis the first voxels of windows in the padded volume, ascending and distinct."""
        z, y, x = (tuple(map(start, range(count))) for count, start in self._along)
        return z, y, x

    @property
    def counts(self) -> Vec3:
        """Number of windows along each axis."""
        z, y, x = (count for count, _ in self._along)
        return z, y, x

    @property
    def inside(self) -> Box:
        """The volume within the padded one."""
        return Box(self.before, add(self.before, self.volume))

    def touching(self, box: Box) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return for each axis the starts of the windows that have voxels in a box of the padded volume."""
        places = zip(self._along, self._places(box), strict=True)
        z, y, x = (tuple(map(start, found)) for (_, start), found in places)
        return z, y, x

    def why_too_many(self, box: Box) -> str | None:
        """Return why the windows that have voxels in a box of the padded volume are more than can be planned.

        None if they are not. The windows are counted, and not listed.
        """
        many = prod(map(len, self._places(box)))
        if many <= MOST_WINDOWS:
            return None
        return (
            f"windows of {text(self.windows.size)} that overlap by {max(self.windows.overlap):g} are {many:,} in a "
            f"volume of {text(self.volume)}, more than the {MOST_WINDOWS:,} that can be planned"
        )

    def _places(self, box: Box) -> tuple[range, range, range]:
        """Return for each axis the places of the windows that have voxels in a box of the padded volume."""
        z, y, x = (
            range(
                bisect_right(range(count), lo - size, key=start),
                bisect_left(range(count), hi, key=start),
            )
            for (count, start), size, lo, hi in zip(self._along, self.windows.size, box.lo, box.hi, strict=True)
        )
        return z, y, x


Along = tuple[int, Callable[[int], int]]  # number of windows along an axis, and the function from place to first voxel


def _monai(length: int, size: int, overlap: float) -> Along:
    """Return windows as `monai.data.utils.dense_patch_slices` has them, for the interval of `monai.inferers.utils`."""
    interval = max(1, int(size * (1 - overlap)))
    steps = -(-(length - size) // interval)
    return steps + 1, lambda step: min(step * interval, length - size)


def _nnunet(length: int, size: int, step: float) -> Along:
    """Return windows as nnU-Net's `compute_steps_for_sliding_window` has them; halves are rounded to even numbers.

    Windows of one voxel do not overlap. nnU-Net repeats them, each with one weight, which leaves averages as they are.
    """
    steps = ceil((length - size) / max(1, size * step))
    each = (length - size) / max(1, steps)
    return steps + 1, lambda place: round(each * place)
