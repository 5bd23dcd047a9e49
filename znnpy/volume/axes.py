"""How the axes of a stored array become those of a volume: (c, z, y, x), at one point of time.

Formats that name their axes give the names to `arranged`. Axes without names are (z, y, x) or (c, z, y, x) after any
number of axes of length 1, as `Volume` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.messages import excerpt, option
from znnpy.patches import Box
from znnpy.shapes import Vec3
from znnpy.volume.regions import Region

SPACE = "zyx"
CHANNEL, TIME = "c", "t"


@dataclass(frozen=True, slots=True)
class Arranged:
    """The axes of a stored array, each with its length, and which of them a volume has.

    stored    length of each axis
    order     the stored axis of c, z, y and x; None: there is no such axis, and one voxel along it
    fixed     index along each stored axis that the volume does not have
    times     number of points of time; None: there is no axis of time
    """

    stored: tuple[int, ...]
    order: tuple[int | None, int | None, int | None, int | None]
    fixed: tuple[tuple[int, int], ...] = ()
    times: int | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the volume, (c, z, y, x)."""
        c, z, y, x = (1 if axis is None else self.stored[axis] for axis in self.order)
        return c, z, y, x

    def region(self, box: Box) -> Region:
        """Return all channels of a box, along the stored axes."""
        lo, hi = [0] * len(self.stored), [1] * len(self.stored)
        for axis, index in self.fixed:
            lo[axis], hi[axis] = index, index + 1
        for place, first, end in zip(self.order, (0, *box.lo), (self.shape[0], *box.hi), strict=True):
            if place is not None:
                lo[place], hi[place] = first, end
        return Region(tuple(lo), tuple(hi))

    def view(self, out: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return `out` (c, z, y, x) as an array of a stored region, a view of the same memory."""
        there = [axis for axis in self.order if axis is not None]
        missing = tuple(place for place, axis in enumerate(self.order) if axis is None)
        turned = np.squeeze(out, missing).transpose(np.argsort(there))
        return np.expand_dims(turned, tuple(axis for axis, _ in self.fixed))

    def per_axis(self, sizes: Sequence[int]) -> Vec3:
        """Return what is given for each stored axis for z, y and x; 1 for an axis that is not stored."""
        _, z, y, x = (1 if axis is None else sizes[axis] for axis in self.order)
        return z, y, x


def arranged(names: Sequence[str], shape: Sequence[int], time: int | None, what: object) -> Arranged:
    """Return how an array with named axes becomes a volume.

    names  of its axes: "z", "y", "x", "c" for channels, "t" for time; others must have length 1
    time   the point of time to read, counted from 0; None: there must be one alone
    what   the volume, for messages

    VolumeError: an axis that is not known, no x or y, several points of time of which none is named, or none such.
    """
    if len(names) != len(shape):
        raise VolumeError(f"{what} has {len(shape)} axes, and its metadata name {len(names)}; copy it again")
    if len(set(names)) != len(names):
        raise VolumeError(f"{what} has two axes of one name: {excerpt(','.join(names), 60)}; rename one of them")
    places = {name: place for place, name in enumerate(names)}
    if "y" not in places or "x" not in places:
        raise VolumeError(f"{what} has the axes {excerpt(','.join(names), 60)}, and a volume has z, y and x")
    if time is not None and TIME not in places:
        raise VolumeError(f"{what} has no points of time: leave out {option('time')}")
    fixed = []
    for name, place in places.items():
        length = shape[place]
        if name == TIME:
            fixed.append((place, _point(time, length, what)))
        elif name not in (CHANNEL, *SPACE):
            if length != 1:
                raise VolumeError(
                    f"{what} has an axis {excerpt(name, 40)!r} of length {length:,}, and only z, y, x, c (channels) "
                    "and t (time) are known; store one part of it"
                )
            fixed.append((place, 0))
    order = (places.get(CHANNEL), places.get("z"), places.get("y"), places.get("x"))
    times = shape[places[TIME]] if TIME in places else None
    return Arranged(tuple(shape), order, tuple(sorted(fixed)), times)


def _point(time: int | None, length: int, what: object) -> int:
    """Return the index of a point of time among so many."""
    if time is None and length != 1:
        raise VolumeError(f"{what} has {length:,} points of time; choose one, from 0, with {option('time')}")
    index = time or 0
    if not 0 <= index < length:
        raise VolumeError(f"{what} has {length:,} points of time, from 0 to {length - 1:,}, and no {index:,}")
    return index
