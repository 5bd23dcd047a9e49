"""Spaces in another unit, and what is said where a format cannot hold all of a space."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from znnpy.messages import excerpt
from znnpy.volume.lengths import METERS, length_unit
from znnpy.volume.space import Affine, Space

_log = logging.getLogger(__name__)


def in_unit(space: Space, unit: str) -> Space | None:
    """Return a space in another unit of length; None where one of its units is not a length."""
    known = [length_unit(name) if name else None for name in space.units]
    if None in known:
        return None
    z, y, x = (_ratio(name or "", unit) for name in known)
    scale = (space.scale[0] * z, space.scale[1] * y, space.scale[2] * x)
    translation = (space.translation[0] * z, space.translation[1] * y, space.translation[2] * x)
    return replace(space, scale=scale, translation=translation, units=(unit,) * 3, affine=_scaled(space.affine, z))


def say_turned(spaces: Iterable[Space | None], holder: str) -> None:
    """Log once that the orientation of voxels is lost, where there is one, in a format that cannot hold it."""
    if any(space is not None and space.affine is not None for space in spaces):
        _log.warning(
            "%s",
            f"the axes of the volume are turned or mirrored in the specimen, which {holder} cannot hold: the output "
            "has its voxels in the order of the volume, their size, and the place of the first one",
        )


def say_unit(space: Space, holder: str) -> None:
    """Log that the unit of the voxel sizes is lost, which the format does not know."""
    units = ", ".join(sorted({unit for unit in space.units if unit}))
    _log.warning("%s", f"{holder} cannot hold the unit of the voxel size ({excerpt(units, 60)}), so it is left out")


def _ratio(old: str, new: str) -> float:
    """Return how many of the new unit an old one is."""
    return float(METERS[old] / METERS[new])


def _scaled(affine: Affine | None, by: float) -> Affine | None:
    if affine is None:
        return None
    first, second, third = ((a * by, b * by, c * by, d * by) for a, b, c, d in affine)
    return first, second, third
