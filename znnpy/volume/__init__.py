"""Volumes larger than memory: read by boxes, predicted by patches, written by chunks. Opening one loads its format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from znnpy.volume.base import Absent, Volume


def open_volume(path: Path, dataset: str | None = None, absent: Absent | None = None) -> Volume:
    """The volume stored at `path`, by suffix: `.npy`, `.zarr`, else HDF5. A context manager; reads only the header.

    dataset  name of the array inside the file; None: the only 3D or 4D numeric one there.
    absent   what to do about voxels that the file should hold and does not; None: missing files are an error, and
             missing chunks the fill value of the format.

    VolumeError says why a file cannot be used, MissingExtraError which package its format needs.
    """
    if path.suffix == ".npy":
        from znnpy.volume import array

        if absent:
            absent.check_none(path)
        return array.open_volume(path, dataset)
    if path.suffix == ".zarr":
        from znnpy.volume import zarr

        if absent:
            absent.check_fill(path)
        return zarr.open_volume(path, dataset, absent)
    from znnpy.volume import hdf5

    return hdf5.open_volume(path, dataset, absent)
