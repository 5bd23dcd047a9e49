"""The position of a volume's voxels in the specimen, according to its metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.volume.stored_array import spelled

AXES = ("z", "y", "x")
MOST_SCALES = 100  # datasets of a multiscale group, and transformations of one
SMALLEST, LARGEST = 1e-20, 1e20  # size of a voxel in any unit, and the largest position: all formats hold these
LONGEST_NAME = 64  # characters of the name of an axis or a unit

Affine = tuple[tuple[float, float, float, float], tuple[float, float, float, float], tuple[float, float, float, float]]


@dataclass(frozen=True, slots=True)
class Space:
    """The position of voxel (z, y, x) is `translation + scale * (z, y, x)`, in units.

    affine  where the axes of the voxels are turned or run the other way: three rows of four numbers, whose product
            with voxel (x, y, z, 1) is its position to the right, to the front and upwards, as NIfTI has it; its last
            column is the translation, and the lengths of the others are the scale
    """

    scale: tuple[float, float, float]
    translation: tuple[float, float, float] = (0.0, 0.0, 0.0)
    units: tuple[str | None, str | None, str | None] = (None, None, None)  # "nanometer", for example
    axes: tuple[str, ...] = AXES  # names of the axes of the stored array
    affine: Affine | None = None

    @property
    def is_possible(self) -> bool:
        """Whether the numbers are within what any specimen can have; damaged metadata may state others."""
        return all(SMALLEST <= size <= LARGEST for size in self.scale) and all(
            abs(at) <= LARGEST for at in self.translation
        )

    @classmethod
    def turned(cls, affine: npt.NDArray[np.float64], unit: str | None) -> Space | None:
        """Return the space of an affine matrix (3, 4); None if it places no voxels."""
        with np.errstate(all="ignore"):
            sizes = np.sqrt((affine[:, :3] ** 2).sum(axis=0))
        if not np.isfinite(affine).all() or not (np.isfinite(sizes) & (sizes > 0)).all():
            return None
        rows = tuple((float(x), float(y), float(z), float(t)) for x, y, z, t in affine)
        is_plain = np.array_equal(affine[:, :3], np.diag(sizes))
        x, y, z = map(float, sizes)
        return cls(
            (z, y, x),
            (rows[2][3], rows[1][3], rows[0][3]),
            (unit, unit, unit),
            affine=None if is_plain else (rows[0], rows[1], rows[2]),
        )

    def behind(self, offset: tuple[float, float, float], step: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> Space:
        """Return the space of an array that begins at `offset` (z, y, x), with voxels `step` times as large."""
        if self.affine is not None:
            moved = np.array(self.affine)
            moved[:, 3] += moved[:, :3] @ offset[::-1]
            moved[:, :3] *= step[::-1]
            found = Space.turned(moved, self.units[0])
            assert found is not None  # it was one before
            return found
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
    """The arrays of one image at several resolutions, as described by OME-Zarr 0.4, 0.5 and 0.6.

    paths   names of the arrays in the group, the finest first
    spaces  of each; None where its transformations are damaged, or others than scales and translations
    names   of the axes of all arrays, as `znnpy.volume.axes` spells them; None: they are damaged
    """

    paths: tuple[str, ...]
    spaces: tuple[Space | None, ...]
    names: tuple[str, ...] | None = None

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
        axes = _axes(image)
        names = None if axes is None else tuple(_axis_name(axis) for axis in axes)
        if axes is None or names is None or len(set(names)) != len(names):
            return cls(paths, (None,) * len(paths))
        return cls(paths, tuple(_space(axes, names, one, image) for one in datasets), names)


def _axes(image: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Return the axes of an image, in 0.6 those of its first coordinate system; None if they are damaged."""
    axes, systems = image.get("axes"), image.get("coordinateSystems")
    if axes is None and isinstance(systems, list) and systems and isinstance(systems[0], Mapping):
        axes = systems[0].get("axes")
    return axes if isinstance(axes, list) and all(_is_axis(axis) for axis in axes) else None


def _axis_name(axis: Mapping[str, Any]) -> str:
    """Return the name of an axis by its type, since channels and time may have any name, or else by its name."""
    kind = axis.get("type")
    kind = kind if isinstance(kind, str) else ""
    return {"channel": "c", "time": "t"}.get(kind) or spelled(axis["name"])


def _space(
    axes: list[Mapping[str, Any]], names: tuple[str, ...], dataset: Mapping[str, Any], image: Mapping[str, Any]
) -> Space | None:
    """Return the space of one dataset, whose transformations are applied before those of the image."""
    steps: list[Any] = []
    for holder in (dataset, image):
        found = holder.get("coordinateTransformations", [])
        if not isinstance(found, list) or len(found) > MOST_SCALES:
            return None
        for step in found:
            inner = step.get("transformations") if isinstance(step, Mapping) and _type(step) == "sequence" else [step]
            if not isinstance(inner, list) or len(inner) > MOST_SCALES:
                return None
            steps += inner
    scale, translation = [1.0] * len(names), [0.0] * len(names)
    for step in steps:
        kind = _type(step) if isinstance(step, Mapping) else ""
        if kind == "identity":
            continue
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
    places = {name: place for place, name in enumerate(names)}
    if not {"y", "x"} <= set(places):
        return None
    z, y, x = (places.get(name) for name in AXES)
    return Space(
        (_at(scale, z, 1.0), _at(scale, y, 1.0), _at(scale, x, 1.0)),
        (_at(translation, z, 0.0), _at(translation, y, 0.0), _at(translation, x, 0.0)),
        tuple(None if place is None else axes[place].get("unit") for place in (z, y, x)),  # type: ignore[arg-type]
        names,
    )


def _type(step: Mapping[str, Any]) -> str:
    kind = step.get("type")
    return kind if isinstance(kind, str) else ""


def _at(numbers: Sequence[float], place: int | None, otherwise: float) -> float:
    return otherwise if place is None else numbers[place]


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
