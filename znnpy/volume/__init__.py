"""Volumes larger than memory: read by boxes, predicted by patches, written by chunks. Opening one loads its format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from znnpy.volume.volume import Volume


def open_volume(path: Path, dataset: str | None = None) -> Volume:
    """The volume stored at `path`, by suffix: `.npy`, `.zarr`, else HDF5. A context manager; reads only the header.

    dataset  name of the array inside the file; None: the only 3D or 4D numeric one there.

    VolumeError says why a file cannot be used, MissingExtraError which package its format needs.
    """
    if path.suffix == ".npy":
        from znnpy.volume import array

        return array.open_volume(path, dataset)
    if path.suffix == ".zarr":
        from znnpy.volume import zarr

        return zarr.open_volume(path, dataset)
    from znnpy.volume import hdf5

    return hdf5.open_volume(path, dataset)
