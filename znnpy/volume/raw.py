"""Volumes whose voxels lie in a file as one plain array: .npy, NIfTI, MRC, NRRD, and TIFF without compression.

The file is read, not mapped: the pages of a mapping count as memory of the process while it exists.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.files import open_regular
from znnpy.patches import Box
from znnpy.volume.axes import Arranged
from znnpy.volume.base import Volume
from znnpy.volume.regions import Region

RUN_BYTES = 2**20  # read at once where it is contiguous
PAGE = 4096  # bytes


@dataclass(frozen=True, slots=True)
class RawArray:
    """An array in a file: voxels without compression, one after the other.

    begin       byte of the file at which the first voxel lies
    shape       number of voxels along each axis
    dtype       as stored, any byte order
    by_columns  whether the first axis varies fastest, and not the last
    slope       each voxel is this times the stored number, plus `intercept`; None: the stored number itself
    """

    begin: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    by_columns: bool = False
    slope: float | None = None
    intercept: float = 0.0

    @property
    def end(self) -> int:
        """The byte behind the last voxel."""
        return self.begin + prod(self.shape) * self.dtype.itemsize

    @property
    def voxel_dtype(self) -> np.dtype[Any]:
        """The type of the voxels: scaled ones are floating-point numbers."""
        if self.slope is None:
            return self.dtype
        return np.dtype(np.float64 if self.dtype.kind == "f" and self.dtype.itemsize > 4 else np.float32)

    def voxels(self, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return voxels from numbers as they are stored."""
        if self.slope is None:
            return stored
        kind = self.voxel_dtype.type
        scaled: npt.NDArray[Any] = stored.astype(self.voxel_dtype)
        with np.errstate(all="ignore"):
            scaled *= kind(self.slope)
            scaled += kind(self.intercept)
        return scaled


class RawVolume(Volume):
    """A volume that is one array of a file."""

    def __init__(
        self,
        path: Path,
        file: BinaryIO,
        array: RawArray,
        arranged: Arranged | None = None,
        *,
        data: Path | None = None,
        dataset: str = "",
    ) -> None:
        """Check that the array can be a volume and that the file holds all of it.

        path      of the volume
        file      with the voxels; it is closed with the volume
        arranged  how the axes of the array become (c, z, y, x); None: they have no names
        data      path of `file`, where it is another than that of the volume

        VolumeError: it is not a volume, or the file ends too early.
        """
        super().__init__(path, dataset, array.shape, array.voxel_dtype, arranged)
        self._array, self._file, self._data = array, cast("FileIO", file), data or path
        self._layout = _reversed(self.arranged) if array.by_columns else self.arranged
        self._check_size(os.fstat(file.fileno()).st_size)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,) if self._data == self.path else (self.path, self._data)

    def close(self) -> None:
        self._file.close()

    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        layout = self._layout
        read_runs(self._descriptor(), self._array, layout.stored, layout.region(box), layout.view(out), self._data)

    def _descriptor(self) -> int:
        """Return the open file that holds the voxels."""
        return self._file.fileno()

    def stored(self) -> tuple[int, int]:
        found = [path.stat() for path in self.files]
        return sum(status.st_size for status in found), max(status.st_mtime_ns for status in found)

    def _check_size(self, held: int) -> None:
        """Raise VolumeError if a file of so many bytes cannot hold the array."""
        if held < self._array.end:
            raise VolumeError(
                f"{self._data} is cut short: {held} bytes of the {self._array.end} its header promises; copy it again"
            )


def read_runs(
    descriptor: int, array: RawArray, extent: Sequence[int], region: Region, out: npt.NDArray[Any], path: Path
) -> None:
    """Read a region of an array into `out`, any strides, in contiguous runs of the file.

    A run goes along the last axis, and along further axes that are read completely. Rows shorter than a page are read
    completely: the system reads their pages anyway, and a run holds many rows.

    extent  the shape of the array, the axis that varies fastest last
    path    of the file, for messages

    VolumeError if the file cannot be read, or ends too early.
    """
    last, lo, shape = len(extent) - 1, list(region.lo), list(region.shape)
    columns = slice(None)
    if extent[last] * array.dtype.itemsize <= PAGE:
        columns = slice(lo[last], lo[last] + shape[last])
        lo[last], shape[last] = 0, extent[last]
    along = last
    while along and shape[along] == extent[along] and prod(shape[along - 1 :]) * array.dtype.itemsize <= RUN_BYTES:
        along -= 1
    run = np.empty(shape[along:], array.dtype)
    for index in np.ndindex(*shape[:along]):
        first = 0
        for axis, n in enumerate(extent):
            first = first * n + lo[axis] + (index[axis] if axis < along else 0)
        fill(descriptor, run, array.begin + first * run.itemsize, path)
        out[index] = array.voxels(run)[..., columns]


def fill(descriptor: int, run: npt.NDArray[Any], at: int, path: Path) -> None:
    """Read from byte `at` of a file until `run`, a contiguous array, is full; VolumeError if that fails."""
    rest, byte = run.reshape(-1).view(np.uint8).data, at
    try:
        while rest:
            count = os.preadv(descriptor, [rest], byte)
            if not count:
                raise VolumeError(
                    f"{path} ends before byte {at + run.nbytes}; it was cut short in the meantime: copy it again"
                )
            rest, byte = rest[count:], byte + count
    except OSError as error:
        raise VolumeError(f"{path} cannot be read at byte {at}: {error.strerror}; copy it again") from None


def opened(path: Path, kind: str) -> BinaryIO:
    """Open a file of a volume. VolumeError, which names the kind of file to give, if it is missing or not regular."""
    try:
        return open_regular(path)
    except FileNotFoundError:
        raise VolumeError(f"there is no file {path}; check the path") from None
    except (OSError, ValueError) as error:
        raise VolumeError(f"{path} cannot be read: {getattr(error, 'strerror', error)}; give a {kind} file") from None


def _reversed(arranged: Arranged) -> Arranged:
    """Return the same axes in the opposite order."""
    last = len(arranged.stored) - 1
    c, z, y, x = (None if axis is None else last - axis for axis in arranged.order)
    fixed = tuple(sorted((last - axis, index) for axis, index in arranged.fixed))
    return Arranged(arranged.stored[::-1], (c, z, y, x), fixed)
