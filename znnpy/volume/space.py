"""The position of a volume's voxels in the specimen, according to its metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

AXES = ("z", "y", "x")
MOST_SCALES = 100  # datasets of a multiscale group, and transformations of one
LONGEST_NAME = 64  # characters of the name of an axis or a unit


@dataclass(frozen=True, slots=True)
class Space:
    """The position of voxel (z, y, x) is `translation + scale * (z, y, x)`, in units."""

    scale: tuple[float, float, float]
    translation: tuple[float, float, float] = (0.0, 0.0, 0.0)
    units: tuple[str | None, str | None, str | None] = (None, None, None)  # "nanometer", for example
    axes: tuple[str, ...] = AXES  # names of the axes of the stored array

    def behind(self, offset: tuple[float, float, float], step: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> Space:
        """Return the space of an array that begins at `offset` (z, y, x), with voxels `step` times as large."""
        z, y, x = (t + s * o for t, s, o in zip(self.translation, self.scale, offset, strict=True))
        scale = (self.scale[0] * step[0], self.scale[1] * step[1], self.scale[2] * step[2])
        return Space(scale, (z, y, x), self.units)

    def attributes(self, *, first: bool = True) -> dict[str, Any]:
        """Return the attributes of an array: resolution and translation, (z, y, x) float64, names of axes and units.

        first  add `offset`, the position of the first voxel, as programs read it that know `resolution`: they take it
               to be in units once there is a resolution
        """
        at = np.array(self.translation, np.float64)
        return {
            "axes": ",".join(AXES),
            "resolution": np.array(self.scale, np.float64),
            "translation": at,
            "units": ",".join(unit or "" for unit in self.units),
            **({"offset": at} if first else {}),
        }


def image_of(name: str, levels: Sequence[tuple[str, Space]], maps: int, version: str) -> dict[str, Any]:
    """Return the description of an image in the metadata of OME-Zarr 0.4 and 0.5.

    levels  path and space of each resolution, the finest first
    maps    number of maps of the arrays; more than one need a channel axis in front
    """
    channel = [{"name": "c", "type": "channel"}] if maps > 1 else []
    axes = [
        {"name": axis, "type": "space"} | ({"unit": unit} if unit else {})
        for axis, unit in zip(AXES, levels[0][1].units, strict=True)
    ]
    datasets = [
        {
            "path": path,
            "coordinateTransformations": [
                {"type": "scale", "scale": [1.0] * len(channel) + [float(n) for n in space.scale]},
                {"type": "translation", "translation": [0.0] * len(channel) + [float(n) for n in space.translation]},
            ],
        }
        for path, space in levels
    ]
    image: dict[str, Any] = {"name": name, "axes": channel + axes, "datasets": datasets}
    if len(levels) > 1:
        image["type"] = "mean"
    return image if version == "0.5" else {"version": version, **image}


@dataclass(frozen=True, slots=True)
class Scales:
    """The arrays of one image at several resolutions, as described by OME-Zarr 0.4 and 0.5."""

    paths: tuple[str, ...]  # names of the arrays in the group, the finest first
    spaces: tuple[Space | None, ...]

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Scales | None:
        """Read the attributes of a group; None if they describe no image or are damaged."""
        holder = attributes.get("ome", attributes)
        images = holder.get("multiscales") if isinstance(holder, Mapping) else None
        if not isinstance(images, list) or not images or not isinstance(images[0], Mapping):
            return None
        image = images[0]
        datasets = image.get("datasets")
        if not isinstance(datasets, list) or not 0 < len(datasets) <= MOST_SCALES:
            return None
        if not all(isinstance(one, Mapping) and isinstance(one.get("path"), str) for one in datasets):
            return None
        paths = tuple(one["path"].strip("/") for one in datasets)
        return cls(paths, tuple(_space(image.get("axes"), one, image) for one in datasets))


def _space(axes: Any, dataset: Mapping[str, Any], image: Mapping[str, Any]) -> Space | None:
    """Return the space of one dataset, whose transformations are applied before those of the image."""
    if not isinstance(axes, list) or not all(_is_axis(axis) for axis in axes):
        return None
    names = tuple(axis["name"] for axis in axes)
    if len(set(names)) != len(names) or names[-3:] != AXES:
        return None
    scale, translation = [1.0] * len(names), [0.0] * len(names)
    steps: list[Any] = []
    for holder in (dataset, image):
        found = holder.get("coordinateTransformations", [])
        if not isinstance(found, list) or len(found) > MOST_SCALES:
            return None
        steps += found
    for step in steps:
        kind = step.get("type") if isinstance(step, Mapping) else None
        numbers = _numbers(step.get(kind), len(names)) if kind in ("scale", "translation") else None
        if numbers is None:
            return None
        if kind == "scale":
            scale = [a * b for a, b in zip(scale, numbers, strict=True)]
            translation = [a * b for a, b in zip(translation, numbers, strict=True)]
        else:
            translation = [a + b for a, b in zip(translation, numbers, strict=True)]
    if not all(isfinite(n) and n > 0 for n in scale) or not all(map(isfinite, translation)):
        return None
    z, y, x = (axis.get("unit") for axis in axes[-3:])
    return Space(
        (scale[-3], scale[-2], scale[-1]), (translation[-3], translation[-2], translation[-1]), (z, y, x), names
    )


def _is_axis(axis: Any) -> bool:
    if not isinstance(axis, Mapping):
        return False
    name, unit = axis.get("name"), axis.get("unit")
    return all(isinstance(word, str) and len(word) <= LONGEST_NAME for word in (name, unit or ""))


def _numbers(value: Any, count: int) -> Sequence[float] | None:
    if not isinstance(value, list) or len(value) != count:
        return None
    if not all(type(number) in (int, float) and abs(number) < 1e300 for number in value):
        return None
    return [float(number) for number in value]
