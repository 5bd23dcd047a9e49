"""Volumes in numpy's own forms: arrays in memory, and .npy files."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.formats.npy import read_npy_header
from znnpy.messages import excerpt
from znnpy.patches import Box
from znnpy.volume.about import About
from znnpy.volume.base import Reading, Volume
from znnpy.volume.location import Location
from znnpy.volume.raw import RawArray, RawVolume, opened
from znnpy.volume.storage_paths import storage_paths


def why_unwritable(array: npt.NDArray[Any]) -> str | None:
    """Return why elements cannot be written one by one, as the end of a sentence that begins with the array's name.

    None if they can. For that axes must be nested: a step along one axis goes beyond everything that the axes with
    smaller steps reach. Slices and transposes of ordinary arrays are nested.
    """
    if not array.flags.writeable:
        return "is read-only; give one that can be written to"
    reach = array.itemsize
    for step, count in sorted((abs(step), n) for step, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if step < reach:
            return f"has elements that share memory (its strides are {array.strides}); give numpy.empty of its shape"
        reach += step * (count - 1)
    return None


class ArrayVolume(Volume):
    """An array (z, y, x) or (c, z, y, x), possibly after axes of length 1, of any number type. It is not copied."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        if not isinstance(array, np.ndarray):
            raise VolumeError(
                f"a volume in memory is a numpy array, not {type(array).__name__}; make it with np.asarray"
            )
        if isinstance(array, np.ma.MaskedArray):
            raise VolumeError("the array is masked, and masks are not read; fill it first (`array.filled(...)`)")
        super().__init__(Path("the array"), "", array.shape, array.dtype)
        self._voxels = array.reshape(self.shape)

    @property
    def files(self) -> Collection[Path]:
        return storage_paths(self._voxels)

    def close(self) -> None:
        """Do nothing: the array belongs to the caller."""

    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        np.copyto(out, self._voxels[(slice(None), *box.slices)])

    def stored(self) -> tuple[int, int]:
        """Return the bytes of the array, and 0 for the date, which an array does not have."""
        return self._voxels.nbytes, 0


def open_volume(location: Location, reading: Reading) -> RawVolume:
    """Open a .npy file and read its header. VolumeError when it is missing, pickled, cut short, or not a volume."""
    path = location.path
    reading.missing.check_none(path)
    reading.check_single(path)
    reading.check_one_time(path)
    file = opened(path, ".npy")
    try:
        header = read_npy_header(file)
        volume = RawVolume(path, file, RawArray(header.nbytes, header.shape, header.dtype, header.by_columns))
    except VolumeError:
        file.close()
        raise
    except (OSError, ValueError) as error:
        file.close()
        raise VolumeError(f"{path} cannot be read as .npy: {excerpt(error)}; write it again with numpy.save") from None
    order = ("its voxels are in the order of Fortran: the first axis varies fastest",) if header.by_columns else ()
    volume.described = About("numpy .npy", notes=order)
    return volume
