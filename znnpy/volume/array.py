"""Volumes that numpy already knows: arrays in memory, and .npy files through a memory map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.volume.volume import Volume


class ArrayVolume(Volume):
    """An array (z, y, x) or (c, z, y, x) of any integer or floating type, not copied."""

    def __init__(self, array: npt.NDArray[Any], path: Path = Path("the array")) -> None:
        super().__init__(path, "", array.shape, array.dtype)
        self._voxels = array if self.has_channel_axis else array[np.newaxis]

    def close(self) -> None:
        """Nothing to let go of: the array is the caller's."""

    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        np.copyto(out, self._voxels[(slice(None), *box.slices)])

    def stored(self) -> tuple[int, int]:
        """Bytes of the array; an array in memory has no date, so 0."""
        if not self.path.is_file():
            return self._voxels.nbytes, 0
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns


def open_volume(path: Path, dataset: str | None = None) -> ArrayVolume:
    """A .npy file, mapped and not loaded. VolumeError when it is missing, pickled, or no volume."""
    if dataset is not None:
        raise VolumeError(f"{path} is a .npy file and holds one array, so there is no dataset {dataset!r} to name")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise VolumeError(f"there is no file {path}; check the path") from None
    except (OSError, ValueError) as error:
        raise VolumeError(f"{path} cannot be read as .npy: {error}; write it again with numpy.save") from None
    return ArrayVolume(array, path)
