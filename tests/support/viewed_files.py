"""Small HDF5 files to look at: a volume, something over it, and labels, with voxel sizes where they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

RESOLUTION = (40.0, 8.0, 8.0)


def written(
    path: Path,
    array: npt.NDArray[Any],
    scale: Sequence[float] | None = None,
    at: Sequence[float] = (0.0, 0.0, 0.0),
    unit: str = "nanometer",
    **attributes: Any,
) -> Path:
    """Write a file with one array. `scale` is the size of a voxel, and `at` the position of the first one."""
    with h5py.File(path, "w") as file:
        stored = file.create_dataset("data", data=array)
        if scale is not None:
            stored.attrs.update({"resolution": scale, "translation": at, "units": ",".join([unit] * 3)})
        stored.attrs.update(attributes)
    return path


def grey(size: tuple[int, ...] = (20, 24, 28)) -> npt.NDArray[np.uint8]:
    """Return random grey values."""
    return np.random.default_rng(1).integers(60, 190, size, np.uint8)


def block(size: tuple[int, int, int], lo: tuple[int, int, int], hi: tuple[int, int, int]) -> npt.NDArray[np.float32]:
    """Return zeros, and ones from `lo` to `hi`."""
    found = np.zeros(size, np.float32)
    found[tuple(slice(*ends) for ends in zip(lo, hi, strict=True))] = 1
    return found
