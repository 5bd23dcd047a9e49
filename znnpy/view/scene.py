"""Open what is looked at: each array with its kind, its contrast, and its place among the others.

All arrays lie in one scene. Its voxels are those of the volume, or of the prediction where no volume is given, counted
as the volume counts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.messages import excerpt
from znnpy.shapes import Vec3, text
from znnpy.volume.base import MissingVoxels, Volume
from znnpy.volume.lengths import meters
from znnpy.volume.location import Location, volume_location
from znnpy.volume.provenance import Provenance, array_names
from znnpy.volume.registry import open_volume
from znnpy.volume.sample import sample_of
from znnpy.volume.space import Space
from znnpy.volume.space_units import in_unit
from znnpy.volume.written import attributes_of, dataset_of

Kind = Literal["grey", "prediction", "labels"]
Matrix = npt.NDArray[np.float64]  # (4, 4): position (z, y, x, 1) of a voxel's centre to that in voxels of the scene

DEVIATIONS = 2.5  # from the mean grey to black and to white
BYTE = 255.0
NANOMETER = 1e-9
NO_SCALE = (1.0, 1.0, 1.0)  # written without a unit by formats that always state a size
STRAIGHT = 1e-6  # relative size of what a matrix may hold beside its diagonal


@dataclass(frozen=True, slots=True)
class Layer:
    """An array of the scene. Its volume is open.

    place     of its voxels in the scene
    contrast  the values that are drawn as black and as white, or as nothing and as full colour
    coarser   the same image at lower resolutions: how many voxels one of theirs stands for, and the open volume
    """

    name: str
    kind: Kind
    volume: Volume
    place: Matrix
    contrast: tuple[float, float]
    coarser: tuple[tuple[Vec3, Volume], ...] = ()

    @property
    def is_straight(self) -> bool:
        """Return whether its axes run as those of the scene."""
        linear = self.place[:3, :3]
        return bool(np.abs(linear - np.diag(np.diag(linear))).max() <= STRAIGHT * np.abs(linear).max())

    @property
    def corners(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Lowest and highest corner of its voxels in the scene, (z, y, x), where voxel i reaches from i to i + 1."""
        ends = np.array([(z, y, x, 1) for z in (0, 1) for y in (0, 1) for x in (0, 1)], np.float64)
        ends[:, :3] = ends[:, :3] * self.volume.size - 0.5
        found = (ends @ self.place.T)[:, :3] + 0.5
        return found.min(axis=0), found.max(axis=0)


@dataclass(frozen=True)
class Scene:
    """The arrays that are looked at, the lowest first.

    scale  size of a voxel (z, y, x) in meters; None: it is not known
    notes  sentences on what was assumed
    """

    layers: tuple[Layer, ...]
    scale: tuple[float, float, float] | None
    notes: tuple[str, ...] = ()

    @cached_property
    def focus(self) -> Layer:
        """The layer in whose middle one looks first: the prediction."""
        return next(layer for layer in self.layers if layer.kind != "grey")


@dataclass(frozen=True, slots=True)
class _Array:
    """An array of a prediction, and what it says of itself."""

    name: str
    volume: Volume
    attributes: dict[str, Any]


@contextmanager
def opened_scene(prediction: str, volume: str | None = None, labels: Sequence[str] = ()) -> Iterator[Scene]:
    """Open the arrays of a prediction, with the volume below and labels above them.

    VolumeError says which of them cannot be read.
    """
    with ExitStack() as stack:
        claim, arrays = _arrays(volume_location(prediction), stack)
        below = None if volume is None else stack.enter_context(_predicted(volume_location(volume), claim))
        marked = [stack.enter_context(open_volume(volume_location(place))) for place in labels]
        reference = arrays[0].volume if below is None else below
        scale, notes = _scale(reference.space, arrays[0] if below is None else None)
        notes += _doubts(claim, below)
        layers: list[Layer] = []
        if below is not None:
            grey = _grey_contrast(below)
            layers.append(Layer("volume", "grey", below, np.eye(4), grey, _coarser(below, stack)))
        for one in arrays:
            kind = _kind(claim, one.volume)
            place, note = _placed(one, below)
            notes += note
            contrast = _contrast(claim, one.volume)
            layers.append(Layer(one.name, kind, one.volume, place, contrast, _coarser(one.volume, stack)))
        for above in marked:
            name = _free(above.location.name, [layer.name for layer in layers])
            place = _label_place(above, layers, reference)
            layers.append(Layer(name, "labels", above, place, (0.0, 1.0), _coarser(above, stack)))
        yield Scene(tuple(layers), scale, notes)


def _predicted(location: Location, claim: Provenance | None) -> Volume:
    """Open the volume below a prediction: where it holds several arrays, that which the prediction names."""
    if claim is None:
        return open_volume(location)
    named, fill = claim.job.volume, claim.job.fill_missing
    where: dict[str, Any] = {"scale": named.scale, "time": named.time}
    if fill is not None:
        with suppress(VolumeError):  # a copy of the volume may be in a format of which no part can be missing
            dataset = None if location.dataset else named.dataset
            return open_volume(location, dataset, MissingVoxels(float(fill)), **where)
    try:
        return open_volume(location, **where)
    except VolumeError:
        if location.dataset is not None or not named.dataset:
            raise
        return open_volume(location, named.dataset, **where)


def _arrays(location: Location, stack: ExitStack) -> tuple[Provenance | None, list[_Array]]:
    """Open the arrays of a prediction, or the one that is named; read what it claims, if znnpy wrote it."""
    whole = replace(location, dataset=None)
    said = attributes_of(whole)
    if "job" not in said:
        return None, [_Array("prediction", stack.enter_context(open_volume(location)), said)]
    names = array_names(whole)
    claim = Provenance.of(whole, names)
    found = []
    for name in names:
        dataset = dataset_of(whole, name)
        if location.dataset is None or location.dataset in (name, dataset):
            volume = stack.enter_context(open_volume(replace(whole, dataset=dataset)))
            found.append(_Array(name.rpartition("/")[2] or "prediction", volume, attributes_of(whole, name)))
    if found:
        return claim, found
    return None, [_Array("prediction", stack.enter_context(open_volume(location)), {})]  # another array of the file


def _coarser(volume: Volume, stack: ExitStack) -> tuple[tuple[Vec3, Volume], ...]:
    """Open the lower resolutions of an image, if it was opened at its finest, that stand for whole blocks of voxels."""
    scales = volume.about().scales
    if not scales or volume.dataset not in ("", scales[0].name):
        return ()
    found = []
    for number in range(1, len(scales)):
        level = stack.enter_context(open_volume(volume.location, scale=number))
        z, y, x = (round(fine / coarse) for fine, coarse in zip(volume.size, level.size, strict=True))
        if level.size == tuple(-(-size // factor) for size, factor in zip(volume.size, (z, y, x), strict=True)):
            found.append(((z, y, x), level))
    return tuple(found)


def _free(name: str, taken: Sequence[str]) -> str:
    """Return a name that no other layer has."""
    return next(one for one in (name, *(f"{name} {n}" for n in range(2, len(taken) + 3))) if one not in taken)


# --- places ---


def _scale(space: Space | None, alone: _Array | None) -> tuple[tuple[float, float, float] | None, tuple[str, ...]]:
    """Return the size of a voxel of the scene in meters, and a sentence where it had to be assumed.

    alone  a prediction without its volume, whose voxels may be larger than those of the scene
    """
    lengths = [] if space is None else [meters(unit) for unit in space.units]
    if space is None or (None in lengths and space.scale == NO_SCALE):
        return None, ("the size of a voxel is not stated, so positions are in voxels",)
    steps = np.ones(3) if alone is None or (place := _stated_place(alone)) is None else np.diag(place)[:3]
    z, y, x = (
        float(size / step) * (NANOMETER if length is None else float(length))
        for size, step, length in zip(space.scale, steps, lengths, strict=True)
    )
    if None in lengths:
        return (z, y, x), ("the unit of the voxel size is not stated, and taken to be nm",)
    return (z, y, x), ()


def _placed(one: _Array, below: Volume | None) -> tuple[Matrix, tuple[str, ...]]:
    """Return the place of an array of the prediction, and a sentence where it had to be assumed."""
    stated = _stated_place(one)
    if below is None:
        return (np.eye(4) if stated is None else stated), ()
    found = _between(below.space, one.volume.space)
    if found is None:
        found = stated
    if found is not None:
        return found, ()
    if one.volume.size == below.size:
        return np.eye(4), ()
    return _centred(one.volume.size, below.size), (
        f"{excerpt(one.name)} does not say where it lies in the volume, so it is drawn in the middle",
    )


def _label_place(one: Volume, others: Sequence[Layer], reference: Volume) -> Matrix:
    """Return the place of labels: that of their metadata, or of an array of the same size, or at the origin."""
    alike = [layer.place for layer in others if layer.volume.size == one.size]
    found = _between(reference.space, one.space) if reference is others[0].volume else None
    if found is not None and others[0].kind == "grey":
        return found
    return alike[-1] if alike else np.eye(4)


def _between(scene: Space | None, own: Space | None) -> Matrix | None:
    """Return the place of the voxels of one space among those of another; None if they cannot be compared."""
    if scene is None or own is None or (scene.affine is None) != (own.affine is None):
        return None
    unit = scene.units[0]
    if unit is not None and own.units != scene.units:  # without a unit it is taken to be the same
        scene, own = in_unit(scene, unit) or scene, in_unit(own, unit) or own
    found: Matrix = np.linalg.inv(_matrix(scene)) @ _matrix(own)
    return found


def _matrix(space: Space) -> Matrix:
    """Return the matrix (4, 4) from voxel (z, y, x, 1) to its position."""
    matrix = np.eye(4)
    if space.affine is None:
        matrix[:3, :3] = np.diag(space.scale)
        matrix[:3, 3] = space.translation
        return matrix
    turned = np.array(space.affine)
    matrix[:3, :3], matrix[:3, 3] = turned[::-1, 2::-1], turned[::-1, 3]
    return matrix


def _stated_place(one: _Array) -> Matrix | None:
    """Return the place that an output states in voxels of its volume; None if it states none."""
    said = one.attributes
    position = said.get("voxel_position", said.get("voxel_offset"))
    if position is None:
        return None
    matrix = np.eye(4)
    matrix[:3, 3] = _numbers(one, "position", position)
    matrix[:3, :3] = np.diag(_numbers(one, "voxel_step", said.get("voxel_step", (1.0, 1.0, 1.0))))
    return matrix


def _numbers(one: _Array, name: str, value: Any) -> Matrix:
    """Return three finite numbers; VolumeError for anything else."""
    try:
        found: Matrix = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        found = np.zeros(0)
    if found.shape != (3,) or not np.isfinite(found).all() or (name == "voxel_step" and (found <= 0).any()):
        raise VolumeError(
            f"the attribute {name} of {one.volume} is {excerpt(repr(value), 60)}, not three numbers; predict it again"
        )
    return found


def _centred(size: Vec3, around: Vec3) -> Matrix:
    matrix = np.eye(4)
    matrix[:3, 3] = [(whole - part) // 2 for part, whole in zip(size, around, strict=True)]
    return matrix


# --- kinds and contrasts ---


def _kind(claim: Provenance | None, volume: Volume) -> Kind:
    """Return how an array of a prediction is drawn: whole numbers of more than a byte are labels."""
    if claim is not None:
        return "labels" if claim.job.result.kind == "labels" else "prediction"
    return "labels" if volume.dtype.kind in "iu" and volume.dtype.itemsize > 1 else "prediction"


def _contrast(claim: Provenance | None, volume: Volume) -> tuple[float, float]:
    """Return the values of a prediction that are drawn as nothing and as full colour."""
    if volume.dtype == np.uint8:
        is_above = claim is not None and claim.job.result.kind == "above"
        return 0.0, 1.0 if is_above else BYTE
    lowest, highest = _range(volume)
    return (0.0, 1.0) if lowest >= 0 and highest <= 1 else _apart(lowest, highest)


def _grey_contrast(volume: Volume) -> tuple[float, float]:
    """Return the grey values that are drawn as black and as white."""
    return _apart(*_range(volume, DEVIATIONS))


def _range(volume: Volume, deviations: float = inf) -> tuple[float, float]:
    """Return lowest and highest of sampled values, within so many deviations of the mean."""
    greys = [greys for greys in sample_of(volume).channels if greys is not None]
    if not greys:
        return 0.0, 1.0
    low, high = min(one.lowest for one in greys), max(one.highest for one in greys)
    if deviations == inf:
        return low, high
    low = max(low, min(one.mean - deviations * one.std for one in greys))
    return low, min(high, max(one.mean + deviations * one.std for one in greys))


def _apart(low: float, high: float) -> tuple[float, float]:
    return (low, high) if low < high else (low, low + 1.0)


def _doubts(claim: Provenance | None, volume: Volume | None) -> tuple[str, ...]:
    """Return a sentence if the volume is not the one that the prediction names."""
    if claim is None or volume is None or claim.job.volume.shape == volume.shape:
        return ()
    return (
        f"the prediction was made from a volume of {text(claim.job.volume.shape[1:])} voxels, and {volume} has "
        f"{text(volume.size)}",
    )
