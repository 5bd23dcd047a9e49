"""Read outputs of every format by libraries that znnpy does not write them with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt


def read_elsewhere(path: Path) -> npt.NDArray[Any]:
    """Read an output, (c, z, y, x) or (z, y, x); files that are not complete are known by the name before `.partial`.

    Libraries are loaded when they are needed.
    """
    name = path.name.removesuffix(".partial")
    if path.is_dir():
        import zarr

        return np.asarray(zarr.open_array(path, mode="r")[:])
    if name.endswith(".nii"):
        import nibabel

        with path.open("rb") as file:
            found = np.asarray(nibabel.Nifti1Image.from_bytes(file.read()).dataobj).T
        return found[:, 0] if found.ndim == 5 else found
    if name.endswith((".mrc", ".rec")):
        import mrcfile

        with mrcfile.open(path) as opened:
            return np.array(opened.data)
    if name.endswith((".tif", ".tiff")):
        import tifffile

        return np.asarray(tifffile.imread(path))
    with h5py.File(path) as file:
        return np.asarray(file["prediction"])
