"""A part of a volume as the caller names it: in voxels, or by physical position."""

from __future__ import annotations

import re
from fractions import Fraction
from math import ceil

from znnpy.errors import VolumeError
from znnpy.messages import excerpt, option
from znnpy.patches import Box
from znnpy.shapes import Vec3, text
from znnpy.volume.lengths import UNITS, in_voxels, length_of
from znnpy.volume.space import Space

TIE = Fraction(1, 10**6)  # of a voxel: sizes of voxels such as 0.3 um are not exact in binary numbers


def parse_roi(roi: str, size: Vec3, space: Space | None = None, what: object = "the volume") -> Box:
    """Return the box that `z0:z1,y0:y1,x0:x1` names in a volume of `size`; an end may be open, as in `10:,:50,:`.

    An end with a unit, such as `10um`, is a position in the volume's own coordinates: the box has the voxels whose
    centres lie from the first end on, and before the second.

    space  of the volume; None: it states none
    what   the volume, for messages

    VolumeError if it is malformed, empty, or reaches outside, and if there is a unit and the volume has no voxel size
    in one; ValueError if it is not text.
    """
    if not isinstance(roi, str):
        raise ValueError(f"roi is text of the form 'z0:z1,y0:y1,x0:x1', not {excerpt(repr(roi))}")
    parts = [part.split(":") for part in re.sub(r"\s", "", roi).split(",")]
    if len(parts) != 3 or any(len(ends) != 2 for ends in parts):
        raise _malformed(roi, size)
    lo, hi = [], []
    for axis, (first, end) in enumerate(parts):
        if any(one.isdecimal() for one in (first, end)) and has_unit(f"{first}:{end}"):
            raise VolumeError(
                f"{option('roi')} {excerpt(roi)} has one end along {'zyx'[axis]} in voxels and one with a unit: give "
                "both with a unit, or none"
            )
        lo.append(_end(first, 0, axis, space, what, (roi, size)))
        hi.append(_end(end, size[axis], axis, space, what, (roi, size)))
    box = Box((lo[0], lo[1], lo[2]), (hi[0], hi[1], hi[2]))
    check_inside(box, size, f" ({excerpt(roi)} in voxels)" if has_unit(roi) else "")
    return box


def has_unit(roi: str) -> bool:
    """Return whether a region has ends with units."""
    return re.search(r"[^\W\d_]", roi) is not None


def _end(end: str, open_end: int, axis: int, space: Space | None, what: object, asked: tuple[str, Vec3]) -> int:
    """Return an end of the region along an axis in voxels."""
    if not end:
        return open_end
    if re.fullmatch(r"[0-9]+", end):
        return int(end)
    length = length_of(end)
    if length is None:
        raise _malformed(*asked)
    if space is None:
        raise VolumeError(
            f"{what} states no voxel size in its metadata, so it is not known where {excerpt(end, 40)} lies; give "
            f"{option('roi')} in voxels, of which it has {text(asked[1])}"
        )
    at = in_voxels(length, space.translation[axis], space.scale[axis], space.units[axis], what)
    return ceil(at - TIE)


def _malformed(roi: str, size: Vec3) -> VolumeError:
    return VolumeError(
        f"{option('roi')} {excerpt(repr(roi))} is not of the form z0:z1,y0:y1,x0:x1; "
        "count voxels from 0 and leave an end open for the "
        f"volume's, such as 10:,:50,: (the volume is {text(size)}), or give positions in {UNITS}, such as 10um:20um"
    )


def check_inside(roi: Box, size: Vec3, meant: str = "") -> None:
    """Raise VolumeError if a region is empty or reaches outside; `meant` says how it was named."""
    for axis, lo, hi, n in zip("zyx", roi.lo, roi.hi, size, strict=True):
        if lo < 0 or hi > n:
            raise VolumeError(
                f"{option('roi')} reaches outside the volume along {axis}: {lo}:{hi} of 0:{n}{meant}; "
                f"give a region inside {text(size)} voxels"
            )
        if lo >= hi:
            raise VolumeError(
                f"{option('roi')} is empty along {axis}: {lo}:{hi}{meant}; give an end beyond {lo}, at most {n}"
            )
