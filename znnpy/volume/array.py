"""Volumes in numpy's own forms: arrays in memory, and .npy files.

A .npy file is read, not mapped: the pages of a mapping count as memory of the process while it exists.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.files import open_regular
from znnpy.formats.npy import read_npy_header
from znnpy.messages import excerpt
from znnpy.patches import Box
from znnpy.volume.about import About
from znnpy.volume.base import Reading, Volume
from znnpy.volume.location import Location
from znnpy.volume.storage_paths import storage_paths

RUN_BYTES = 2**20  # read at once where it is contiguous
PAGE = 4096  # bytes


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


class NpyVolume(Volume):
    """A .npy file in C or Fortran order, made by `open_volume`."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        """Read the header.

        file  opened at its beginning; it is closed with the volume

        VolumeError: it is not a volume, or the file ends too early. OSError, ValueError: the header is damaged.
        """
        header = read_npy_header(file)
        shape, dtype = header.shape, header.dtype
        super().__init__(path, "", shape, dtype)
        self._stored_dtype, self._is_fortran = dtype, header.by_columns
        self._begin, self._file = header.nbytes, cast("FileIO", file)
        held, needed = os.fstat(file.fileno()).st_size, self._begin + prod(shape) * dtype.itemsize
        if held < needed:
            raise VolumeError(f"{path} is cut short: {held} bytes of the {needed} its header promises; copy it again")

    def close(self) -> None:
        self._file.close()

    def about(self) -> About:
        return About("numpy .npy", notes=("stored in Fortran order",) if self._is_fortran else ())

    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        """Read contiguous runs of the file: along the last axis, and along further axes that are read completely.

        Rows shorter than a page are read completely: the system reads their pages anyway, and a run holds many rows.
        """
        extent, lo, target = self.shape, (0, *box.lo), out
        if self._is_fortran:
            extent, lo, target = extent[::-1], lo[::-1], out.T
        columns = slice(lo[3], lo[3] + target.shape[3])
        if extent[3] * out.itemsize > PAGE:
            shape, columns = target.shape, slice(None)
        else:
            shape, lo = (*target.shape[:3], extent[3]), (*lo[:3], 0)
        along = 3
        while along and shape[along] == extent[along] and prod(shape[along - 1 :]) * out.itemsize <= RUN_BYTES:
            along -= 1
        run = np.empty(shape[along:], self._stored_dtype)
        for index in np.ndindex(shape[:along]):
            first = 0
            for axis, n in enumerate(extent):
                first = first * n + lo[axis] + (index[axis] if axis < along else 0)
            self._fill(run, self._begin + first * run.itemsize)
            target[index] = run[..., columns]

    def _fill(self, run: npt.NDArray[Any], at: int) -> None:
        """Read from byte `at` of the file until `run` is full."""
        rest = run.reshape(-1).view(np.uint8).data
        try:
            self._file.seek(at)
            while rest:
                count = self._file.readinto(rest)
                if not count:
                    raise VolumeError(
                        f"{self} ends before byte {at + run.nbytes}; it was cut short in the meantime: copy it again"
                    )
                rest = rest[count:]
        except OSError as error:
            raise VolumeError(f"{self} cannot be read at byte {at}: {error.strerror}; copy it again") from None

    def stored(self) -> tuple[int, int]:
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns


def open_volume(location: Location, reading: Reading) -> NpyVolume:
    """Open a .npy file and read its header. VolumeError when it is missing, pickled, cut short, or not a volume."""
    path = location.path
    reading.missing.check_none(path)
    reading.check_single(path)
    reading.check_one_time(path)
    try:
        file = open_regular(path)
    except FileNotFoundError:
        raise VolumeError(f"there is no file {path}; check the path") from None
    except (OSError, ValueError) as error:
        raise VolumeError(f"{path} cannot be read: {getattr(error, 'strerror', error)}; give a .npy file") from None
    try:
        return NpyVolume(path, file)
    except VolumeError:
        file.close()
        raise
    except (OSError, ValueError) as error:
        file.close()
        raise VolumeError(f"{path} cannot be read as .npy: {excerpt(error)}; write it again with numpy.save") from None
