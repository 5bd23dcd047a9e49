"""Outputs read back by the libraries of their formats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import mrcfile
import nibabel
import numpy as np
import numpy.typing as npt
import tensorstore
import tifffile
import zarr

NAMES = ("out.h5", "out.zarr", "zarr2://out.zarr", "out.n5", "out.precomputed")


def stored(path: Path, name: str = "", level: int = 0) -> npt.NDArray[Any]:
    """Return the voxels of an array of an output: (maps, z, y, x), or (z, y, x) where it has one map."""
    if (kind := path.name.removesuffix(".partial")).endswith((".tif", ".tiff")):
        return np.asarray(tifffile.imread(path))
    if kind.endswith(".nii"):
        found = np.asarray(nibabel.Nifti1Image.from_bytes(path.read_bytes()).dataobj).T
        return found[:, 0] if found.ndim == 5 else found
    if kind.endswith((".mrc", ".rec")):
        with mrcfile.open(path) as opened:
            return np.array(opened.data)
    if not path.is_dir():
        with h5py.File(path) as file:
            return np.asarray(file[name or "prediction"])
    folder = path / name
    if (folder / "zarr.json").exists() or (folder / ".zgroup").exists():
        group: Any = zarr.open_group(folder, mode="r")
        return np.asarray(group[str(level)][:])
    if (folder / "attributes.json").exists():
        spec: Any = {"driver": "n5", "kvstore": f"file://{folder}/s{level}/"}
        return np.asarray(tensorstore.open(spec, read=True).result().read().result()).T
    spec = {"driver": "neuroglancer_precomputed", "kvstore": f"file://{folder}/", "scale_index": level}
    voxels = np.asarray(tensorstore.open(spec, read=True).result().read().result()).T
    return voxels[0] if len(voxels) == 1 else voxels


def attributes(path: Path, name: str = "") -> Mapping[str, Any]:
    """Return the attributes of a Zarr or HDF5 output, or of one of its arrays."""
    if path.is_dir():
        return dict(zarr.open_group(path / name, mode="r").attrs)
    with h5py.File(path) as file:
        return dict(file[name or "prediction"].attrs)
