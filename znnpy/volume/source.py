"""Read the input patches of a volume, with region, borders and voxels that are not finite. Patches are always full.

Dense output voxel p depends on the input voxels p .. p + field of view - 1, counted from the first input voxel. With
border `valid` that is the first voxel of the region. With border `reflect` the output is as large as the region, and
the first input voxel lies (field of view - 1) // 2 before it. The voxels around the region are those of the volume, and
beyond its faces mirrored ones (numpy's "reflect", repeated if the volume is smaller than the padding).

A graph that is computed whole reads the volume itself, padded behind its far faces to a size that the network admits.
A region names the output voxels whose centres lie in it, and next to a face those beyond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.admissible import admissible, origins, seen_by_one
from znnpy.errors import ShapeError, VolumeError
from znnpy.geometry import Geometry
from znnpy.graph_columns import Area
from znnpy.messages import excerpt, option
from znnpy.network import Network, PadToPeriod
from znnpy.option_values import BORDERS, Border
from znnpy.patches import Box
from znnpy.shapes import Vec3, add, subtract, text
from znnpy.volume.base import Volume
from znnpy.volume.chunk_layers import ChunkLayers
from znnpy.volume.roi import check_inside

SLAB_BYTES = 2 * 2**20  # part of a patch that is assembled or checked at once

Index = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


class Source:
    """The input patches of a run."""

    def __init__(self, volume: Volume, *, roi: Box | None, border: Border, network: Network, allow_nan: bool) -> None:
        """Check that network, volume and region fit together.

        roi        region of the volume to predict from (`valid`) or to predict (`reflect`); None: all of it.
        border     "valid" | "reflect".
        allow_nan  replace NaN and inf by the mean and report where they were, instead of VolumeError.

        VolumeError: channels differ, region outside the volume. ShapeError: smaller than the field of view.
        """
        if border not in BORDERS:
            raise ValueError(f"border is {' or '.join(map(repr, BORDERS))}, not {border!r}")
        if volume.channels != network.input_channels:
            raise VolumeError(
                f"{volume} has {volume.channels} channels, (c, z, y, x) = {volume.shape}, and network {network.name} "
                f"takes {network.input_channels}; give a volume with {network.input_channels}, axes in this order"
            )
        region = Box((0, 0, 0), volume.size) if roi is None else roi
        check_inside(region, volume.size)
        self.area: Area | None = None  # of a graph that is computed whole
        self._how: PadToPeriod = "reflect"  # what lies beyond the faces
        self.volume = volume
        self._layers = ChunkLayers(volume)
        self.allow_nan = allow_nan
        self.dtype = volume.dtype
        self.channels = volume.channels
        if network.meaning == "windows":
            self._windows(network, region, border)
            self._mean = _representable(network, volume)
            return
        if network.meaning == "whole":
            self._whole(network, region, border)
            self._mean = _representable(network, volume)
            return
        fov = network.field_of_view
        before = ((fov[0] - 1) // 2, (fov[1] - 1) // 2, (fov[2] - 1) // 2)
        if border == "valid":
            wanted = Box((0, 0, 0), _dense_size(network, region.size, is_roi=roi is not None))
            first = add(region.lo, before)
            self.domain = region  # input voxels that outputs depend on, in volume coordinates; may exceed the volume
        else:
            wanted, first = Box((0, 0, 0), region.size), region.lo
            lo = subtract(region.lo, before)
            self.domain = Box(lo, subtract(add(add(lo, region.size), fov), (1, 1, 1)))
        self.outputs: tuple[Predicted, ...] = (Predicted(wanted, _floats(first), (1.0, 1.0, 1.0)),)
        self.field_of_view = fov
        self._mean = _representable(network, volume)

    def _windows(self, network: Network, region: Box, border: Border) -> None:
        """Find what is predicted of a network that is computed in windows: as many voxels as the region has."""
        self._refuse_sliding(network, border)
        self.outputs = (Predicted(region, _floats(region.lo), (1.0, 1.0, 1.0)),)
        self.area = Area(self.volume.size, region)
        assert network.windows is not None, "networks that are computed in windows have it"
        self.field_of_view = network.windows.size
        self.domain = Box((0, 0, 0), self.volume.size)

    def _refuse_sliding(self, network: Network, border: Border) -> None:
        """Raise an error for what only networks that slide over a volume can do."""
        if border != "valid":
            raise ShapeError(
                f"{option('border', border)} is for networks that slide over a volume, and {network.name} pads by "
                f"itself; leave out {option('border')}"
            )
        if self.allow_nan:
            where = "whole" if network.meaning == "whole" else "in windows"
            raise VolumeError(
                f"{network.name} is computed {where}, and every voxel that is not finite reaches far; leave out "
                f"{option('allow_nan', True)}, and repair the volume"
            )

    def _whole(self, network: Network, region: Box, border: Border) -> None:
        """Find what is predicted of a graph that is computed whole."""
        self._refuse_sliding(network, border)
        geometry = admissible(network, self.volume.size)
        self.outputs = predicted(geometry, self.volume.size, region)
        self.area = area_of(self.volume.size, self.outputs)
        self.field_of_view = seen_by_one(network)
        self.domain, self._how = Box((0, 0, 0), geometry.volume), network.pad_to_period

    def of(self, volume: Volume, network: Network) -> Source:
        """Return the source of another volume of the same shape, for the same network up to its normalisation."""
        made = copy(self)
        made.volume, made.dtype, made._layers = volume, volume.dtype, ChunkLayers(volume)
        made._mean = _representable(network, volume)
        return made

    def keep_chunks(self, most_bytes: int) -> None:
        """Keep the chunks that the next step needs too, in at most so many bytes."""
        self._layers = ChunkLayers(self.volume, most_bytes)

    @property
    def output(self) -> Vec3:
        """Voxels of the first output."""
        return self.outputs[0].size

    @property
    def offset(self) -> Vec3:
        """Volume coordinates of the first voxel of the first output."""
        return self.outputs[0].offset

    def check_one_size(self, network: Network, advice: str) -> None:
        """Raise ShapeError if outputs of a network differ in size, and one array is to hold them all."""
        for tensor, one in zip(network.outputs[1:], self.outputs[1:], strict=True):
            if one.size != self.output:
                first = network.names[network.outputs[0] - 1]
                raise ShapeError(
                    f"{network.name} gives {text(self.output)} voxels of {first} and {text(one.size)} of "
                    f"{network.names[tensor - 1]}, which one array cannot hold; {advice}"
                )

    @property
    def needed(self) -> Box:
        """Smallest box of the volume with every voxel that patches read, mirrored ones included."""
        if self.area is not None:
            return Box((0, 0, 0), self.volume.size)
        z, y, x = _mirrored(self.domain, self.volume.size)
        lo, hi = zip(*((int(along.min()), int(along.max()) + 1) for along in (z, y, x)), strict=True)
        return Box((lo[0], lo[1], lo[2]), (hi[0], hi[1], hi[2]))

    def read(self, lo: Vec3, out: npt.NDArray[Any]) -> Mask | None:
        """Fill `out` with the input patch whose first voxel has the dense-output coordinate `lo`.

        out  (c, *patch_in) of `self.dtype`, C order; overwritten. Voxels that no output depends on get the mean, so
             they are about 0 once normalised.

        Returns (z, y, x) bool of the patch's size, True where a channel was not finite; None if all are finite.
        Without `allow_nan`, VolumeError counts them and names the first.
        """
        if not out.size:  # a step of a graph that needs no new planes
            return None
        first = add(lo, self.domain.lo)
        box = Box(first, (first[0] + out.shape[1], first[1] + out.shape[2], first[2] + out.shape[3]))
        inside = box.clipped(self.domain)
        part = out
        if inside == box and box.clipped(Box((0, 0, 0), self.volume.size)) == box:
            self._layers.read(box, out)
        else:
            for channel, mean in enumerate(self._mean):
                out[channel] = mean
            if not inside.voxels:
                return None
            part = out[(slice(None), *inside.shifted(subtract((0, 0, 0), box.lo)).slices)]
            if inside.clipped(Box((0, 0, 0), self.volume.size)) == inside:
                self._layers.read(inside, part)
            elif self._how == "zeros":
                part[...] = 0
                there = inside.clipped(Box((0, 0, 0), self.volume.size))
                if there.voxels:
                    self._layers.read(there, part[(slice(None), *there.shifted(subtract((0, 0, 0), inside.lo)).slices)])
            else:
                self._gather(self._indices(inside), part)
        if self.dtype.kind != "f" or all(np.isfinite(part[:, z, y]).all() for z, y in _slabs(part)):
            return None
        if not self.allow_nan:
            raise self._refusal(part, self._indices(inside))
        mask = np.zeros(out.shape[1:], np.bool_)
        self._replace(part, mask[inside.shifted(subtract((0, 0, 0), box.lo)).slices])
        return mask

    def _indices(self, box: Box) -> tuple[Index, Index, Index]:
        """Return volume coordinates per axis of a box that may exceed the volume."""
        if self._how != "replicate":
            return _mirrored(box, self.volume.size)
        z, y, x = (
            np.clip(np.arange(lo, hi, dtype=np.intp), 0, n - 1)
            for lo, hi, n in zip(box.lo, box.hi, self.volume.size, strict=True)
        )
        return z, y, x

    def _gather(self, indices: tuple[Index, Index, Index], out: npt.NDArray[Any]) -> None:
        """Copy the voxels at these volume coordinates into `out`, slab by slab to save memory."""
        ix = indices[2]
        for z, y in _slabs(out):
            iz, iy = indices[0][z], indices[1][y]
            lo = (int(iz.min()), int(iy.min()), int(ix.min()))
            box = Box(lo, (int(iz.max()) + 1, int(iy.max()) + 1, int(ix.max()) + 1))
            slab = np.empty((self.channels, *box.size), self.dtype)
            self._layers.read(box, slab)
            for plane, at in zip(range(z.start, z.stop), iz - lo[0], strict=True):
                out[:, plane, y] = _picked(slab[:, at], iy - lo[1], ix - lo[2])

    def _replace(self, part: npt.NDArray[Any], bad: Mask) -> None:
        """Replace values of `part` that are not finite by the mean, and set `bad` to True there."""
        for z, y in _slabs(part):
            voxels = part[:, z, y]
            holes = np.isfinite(voxels)
            np.logical_not(holes, out=holes)
            np.any(holes, axis=0, out=bad[z, y])
            for channel, mean in enumerate(self._mean):
                np.copyto(voxels[channel], mean, where=holes[channel])

    def _refusal(self, part: npt.NDArray[Any], indices: tuple[Index, Index, Index]) -> VolumeError:
        """Make the error that counts voxels that are not finite; `indices` are the volume coordinates of `part`."""
        (iz, z_at), (iy, y_at), (ix, x_at) = (np.unique(index, return_index=True) for index in indices)
        at: tuple[int, int, int] | None = None
        count = 0
        for z, y in _slabs(part[:, : len(iz), : len(iy)]):  # mirrored voxels count once, at their position
            bad = np.stack([~np.isfinite(_picked(part[:, at], y_at[y], x_at)).all(axis=0) for at in z_at[z]])
            found = int(np.count_nonzero(bad))
            if found and at is None:
                first = np.unravel_index(np.argmax(bad), bad.shape)
                at = int(iz[z][first[0]]), int(iy[y][first[1]]), int(ix[first[2]])
            count += found
        return VolumeError(
            f"{self.volume}: {count} {'voxel is' if count == 1 else 'voxels are'} NaN or infinite between (z, y, x) = "
            f"{(int(iz[0]), int(iy[0]), int(ix[0]))} and {(int(iz[-1]), int(iy[-1]), int(ix[-1]))}, the first at {at}; "
            f"repair the volume, or give {option('allow_nan', True)} to write NaN wherever the field of view holds one"
        )


@dataclass(frozen=True, slots=True)
class Predicted:
    """The part of one output that is predicted, and where it lies.

    wanted    voxels of the output, counted from its first voxel
    position  volume coordinates of the first predicted voxel's centre
    step      size of a voxel, in voxels of the volume
    """

    wanted: Box
    position: tuple[float, float, float]
    step: tuple[float, float, float]

    @property
    def size(self) -> Vec3:
        return self.wanted.size

    @property
    def offset(self) -> Vec3:
        """The position, rounded down to a voxel."""
        z, y, x = self.position
        return floor(z), floor(y), floor(x)


def predicted(geometry: Geometry, volume: Vec3, region: Box) -> tuple[Predicted, ...]:
    """Return the voxels of each output of a graph that are predicted.

    They are those whose centres lie in the region, and next to a face of the volume those beyond it too: layers that
    pad one side alone shift centres. As many as the volume was padded by behind its far faces are left out. ShapeError
    if an output has none.
    """
    where = origins(geometry)
    return tuple(_predicted(geometry, tensor, where[tensor], volume, region) for tensor in geometry.network.outputs)


def area_of(volume: Vec3, outputs: Sequence[Predicted]) -> Area:
    """Return the part of a volume that is predicted."""
    first, *others = (one.wanted for one in outputs)
    return Area(volume, first, tuple(others))


def _predicted(
    geometry: Geometry, tensor: int, origin: tuple[Fraction, Fraction, Fraction], volume: Vec3, region: Box
) -> Predicted:
    """Return the voxels of one output that are predicted; `origin` is the centre of its first voxel in the volume."""
    step, size = geometry.step(tensor), geometry.size(tensor)
    lo, hi = [], []
    for axis in range(3):
        most = size[axis] - int((geometry.volume[axis] - volume[axis]) / step[axis])
        first, end = (
            ceil((face - Fraction(1, 2) - origin[axis]) / step[axis]) for face in (region.lo[axis], region.hi[axis])
        )
        first = first if region.lo[axis] else 0
        end = end if region.hi[axis] < volume[axis] else most
        lo.append(min(max(0, first), most))
        hi.append(min(max(lo[-1], end), most))
        if hi[-1] <= lo[-1]:
            raise ShapeError(
                f"{geometry.network.name} has no output{_named(geometry.network, tensor)} between {region.lo[axis]} "
                f"and {region.hi[axis]} along "
                f"{'zyx'[axis]}, in a volume of {text(volume)}; give a larger region or volume"
            )
    wanted = Box((lo[0], lo[1], lo[2]), (hi[0], hi[1], hi[2]))
    z, y, x = (origin[axis] + lo[axis] * step[axis] for axis in range(3))
    return Predicted(wanted, _floats((z, y, x)), _floats(step))


def _named(network: Network, tensor: int) -> str:
    """Name an output where there are several."""
    return f" {excerpt(network.names[tensor - 1], 60)}" if len(network.outputs) > 1 else ""


def _floats(values: Iterable[int | Fraction]) -> tuple[float, float, float]:
    z, y, x = map(float, values)
    return z, y, x


def _dense_size(network: Network, size: Vec3, *, is_roi: bool) -> Vec3:
    fov = network.field_of_view
    for axis, n, needed in zip("zyx", size, fov, strict=True):
        if is_roi and n < needed:
            raise ShapeError(
                f"{option('roi')} is smaller than the field of view along {axis}: {text(size)} against {text(fov)}; "
                f"make it at least {needed - n} voxels larger there, or use {option('border', 'reflect')}"
            )
    return network.dense_size(size)


def _mirrored(box: Box, size: Vec3) -> tuple[Index, Index, Index]:
    """Return volume coordinates per axis of a box that may exceed the volume, mirrored without repeating the face."""

    def along(lo: int, hi: int, n: int) -> Index:
        if n == 1:
            return np.zeros(hi - lo, np.intp)
        folded = np.arange(lo, hi, dtype=np.intp) % (2 * n - 2)
        return np.minimum(folded, 2 * n - 2 - folded)

    z, y, x = (along(lo, hi, n) for lo, hi, n in zip(box.lo, box.hi, size, strict=True))
    return z, y, x


def _picked(plane: npt.NDArray[Any], y: Index, x: Index) -> npt.NDArray[Any]:
    """Return rows y and columns x of (c, y, x), one axis at a time: both at once would take three indices per voxel."""
    return plane[:, y][:, :, x]


def _slabs(part: npt.NDArray[Any]) -> Iterator[tuple[slice, slice]]:
    """Yield planes and rows of a (c, z, y, x) array in order, about SLAB_BYTES at once: whole planes or part of one."""
    channels, planes, rows, row = part.shape
    at_once = max(1, SLAB_BYTES // (channels * row * part.itemsize))  # rows
    thick, high = max(1, at_once // rows), min(rows, at_once)
    for z in range(0, planes, thick):
        for y in range(0, rows, high):
            yield slice(z, min(z + thick, planes)), slice(y, min(y + high, rows))


def _representable(network: Network, volume: Volume) -> tuple[Any, ...]:
    """Return for each channel the value of the volume's type that is nearest to the mean."""
    means = network.normalise.mean if network.normalise else (0.0,) * volume.channels
    if volume.dtype.kind == "f":
        return tuple(volume.dtype.type(mean) for mean in means)
    info = np.iinfo(volume.dtype)
    return tuple(volume.dtype.type(min(max(round(mean), int(info.min)), int(info.max))) for mean in means)
