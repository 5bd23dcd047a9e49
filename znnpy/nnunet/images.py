"""Read the images of a case from NIfTI files, with the axes and the spacing that nnU-Net's readers give them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.messages import excerpt
from znnpy.nnunet.label_file import loaded
from znnpy.nnunet.plans import Plans, Reader, Spacing
from znnpy.patches import Box
from znnpy.shapes import Vec3
from znnpy.volume.base import Volume
from znnpy.volume.registry import open_volume
from znnpy.volume.space import Space

MILLIMETERS = {1: 1000.0, 3: 0.001}  # of the units of a header, by their number; of the others, 1
CLOSE = 1e-6  # relative difference of spacings that are the same
_FIRST = re.compile(r"(.+)_0000(\.nii(?:\.gz)?)", re.DOTALL)
_SUFFIXES = (".nii", ".nii.gz")

Turn = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class CaseImages:
    """The images of a case, one of each channel, (z, y, x).

    spacing  along z, y and x
    space    position of the voxels of the files
    turn     for each axis x, y, z of the files, which axis of the images it is and whether it runs the same way (1) or
             the other (-1); None: images are as the files have them
    """

    files: tuple[Path, ...]
    images: tuple[npt.NDArray[Any], ...]
    spacing: Spacing
    space: Space | None
    turn: Turn | None = None

    def as_stored(self, labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array (z, y, x) over the images with the axes of the files."""
        if self.turn is None:
            return labels
        back = labels.transpose(2, 1, 0).transpose([axis for axis, _ in self.turn])
        return np.ascontiguousarray(_mirrored(back, self.turn).transpose(2, 1, 0))


def files_of(given: str | Path | Sequence[str | Path], channels: int) -> tuple[Path, ...]:
    """Return the files of a case, one of each channel: those given, or for `case_0000.nii.gz` also its siblings.

    VolumeError: there are too few or too many.
    """
    files = tuple(Path(one) for one in ([given] if isinstance(given, str | Path) else given))
    if len(files) == 1 and channels > 1:
        match = _FIRST.fullmatch(files[0].name)
        if match is None:
            raise VolumeError(
                f"the model takes {channels} channels, and {files[0]} does not end in _0000.nii.gz, by which the files "
                "of the others would be found; rename the files, or give all of them in order"
            )
        files = tuple(files[0].with_name(f"{match[1]}_{channel:04d}{match[2]}") for channel in range(channels))
        if missing := [file.name for file in files[1:] if not file.is_file()]:
            raise VolumeError(
                f"the model takes {channels} channels, and beside {files[0]} there is no {excerpt(missing[0], 60)}; "
                "copy it there"
            )
    if len(files) != channels:
        raise VolumeError(f"the model takes {channels} channels, and {len(files)} files are given; give one of each")
    return files


def read_images(given: str | Path | Sequence[str | Path], plans: Plans) -> CaseImages:
    """Read the images of a case.

    VolumeError: files are missing, damaged, of other formats, or do not fit each other; MissingExtraError without
    nibabel.
    """
    files = files_of(given, len(plans.normalisations))
    found = [_read(file, plans.reader) for file in files]
    first = found[0]
    for file, one in zip(files, found, strict=True):
        same = np.allclose(one.spacing, first.spacing, rtol=CLOSE, atol=0)
        if one.images[0].shape != first.images[0].shape or not same or one.turn != first.turn:
            raise VolumeError(
                f"{file} has {one.images[0].shape} voxels of {one.spacing} and {files[0]} has {first.images[0].shape} "
                f"of {first.spacing}; give images of one case with the same size, spacing and orientation"
            )
    return CaseImages(files, tuple(one.images[0] for one in found), first.spacing, first.space, first.turn)


def stated_size(file: Path, plans: Plans) -> tuple[Vec3, Spacing, int]:
    """Return size and spacing of an image of a case, and the bytes of its voxels, without reading them."""
    with _opened(file) as volume:
        size, nbytes = volume.size, prod(volume.size) * volume.dtype.itemsize
    spacing, turn = _placed(file, plans.reader)
    if turn is not None:
        x, y, z = (size[2 - axis] for axis in _order(turn))
        size = (z, y, x)
    return size, spacing, nbytes


def _opened(file: Path) -> Volume:
    """Open an image with one channel."""
    if not file.name.lower().endswith(_SUFFIXES):
        raise VolumeError(f"{file} is not NIfTI, the only format of cases of nnU-Net that is read; save it as .nii.gz")
    volume = open_volume(file)
    if volume.channels != 1:
        volume.close()
        raise VolumeError(f"{file} holds {volume.channels} channels; give a file of each")
    return volume


def _read(file: Path, reader: Reader) -> CaseImages:
    with _opened(file) as volume:
        out = np.empty((1, *volume.size), volume.dtype)
        volume.read(Box((0, 0, 0), volume.size), out)
        space = volume.space
    spacing, turn = _placed(file, reader)
    image = out[0]
    if turn is not None:
        image = _mirrored(image.transpose(2, 1, 0), turn).transpose(_order(turn)).transpose(2, 1, 0)
    return CaseImages((file,), (np.ascontiguousarray(image),), spacing, space, turn)


def _placed(file: Path, reader: Reader) -> tuple[Spacing, Turn | None]:
    """Return the spacing along z, y and x of an image, and how the axes of its file are turned."""
    sizes, units, affine = _header(file)
    if reader == "SimpleITKIO":
        scale = MILLIMETERS.get(units & 7, 1.0)
        sizes = tuple(abs(size) * scale for size in sizes)
    turn = _turn(affine, file) if reader == "NibabelIOWithReorient" else None
    x, y, z = sizes if turn is None else (sizes[axis] for axis in _order(turn))
    return (z, y, x), turn


def _order(turn: Turn) -> list[int]:
    """Return the axis of a file that each axis x, y and z of its image is."""
    return sorted(range(3), key=lambda axis: turn[axis][0])


def _header(file: Path) -> tuple[tuple[float, ...], int, npt.NDArray[np.float64]]:
    """Return sizes of a voxel along x, y and z, the number of their unit, and the matrix that places voxels."""
    found = loaded(file)
    from nibabel.openers import ImageOpener

    try:
        with ImageOpener(file) as opened:  # a header that is checked has sizes of 1 in the place of 0
            stated = type(found.header).from_fileobj(opened, check=False)["pixdim"][1:4]
        zooms = zip(stated, found.header.get_zooms()[:3], strict=True)
        sizes = tuple(float(size) if said else 0.0 for said, size in zooms)
        return sizes, int(found.header["xyzt_units"]), np.asarray(found.affine, np.float64)
    except Exception as error:  # the library raises whatever a damaged header leads to
        raise VolumeError(f"{file} cannot be read as NIfTI: {excerpt(error)}; write it again") from None


def _turn(affine: npt.NDArray[np.float64], file: Path) -> Turn:
    """Return how axes are turned so that they run to the right, to the front and upwards."""
    from nibabel.orientations import io_orientation

    found = io_orientation(affine) if np.isfinite(affine).all() else np.full((3, 2), np.nan)
    if not np.isfinite(found).all():
        raise VolumeError(f"{file} states no orientation that axes can be turned by; correct its affine")
    x, y, z = ((int(axis), int(way)) for axis, way in found)
    return x, y, z


def _mirrored(array: npt.NDArray[Any], turn: Turn) -> npt.NDArray[Any]:
    """Return an array (x, y, z) with the axes reversed that run the other way."""
    return array[tuple(slice(None, None, way) for _, way in turn)]
