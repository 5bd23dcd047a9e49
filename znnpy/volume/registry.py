"""The file formats of volumes and outputs. To add a format, write its modules and add a row to FORMATS.

A format is imported when the first of its files is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from znnpy.errors import OutputError
from znnpy.messages import option

if TYPE_CHECKING:
    from znnpy.volume.base import MissingVoxels, Volume
    from znnpy.volume.store import Store


@dataclass(frozen=True, slots=True)
class Format:
    """A file format: its suffixes, and the modules that read and write it."""

    suffixes: tuple[str, ...]
    reader: str  # module with `open_volume(path, dataset, missing_voxels)`, which returns a Volume
    writer: tuple[str, str] | None = None  # module and name of a subclass of Store; None: outputs are not written


HDF5 = Format((".h5", ".hdf5", ".hdf"), "znnpy.volume.hdf5", ("znnpy.volume.hdf5_store", "Hdf5Store"))
ZARR = Format((".zarr",), "znnpy.volume.zarr", ("znnpy.volume.zarr_store", "ZarrStore"))
NPY = Format((".npy",), "znnpy.volume.array")
FORMATS = (HDF5, ZARR, NPY)

WRITTEN_SUFFIXES = tuple(suffix for one in FORMATS if one.writer for suffix in one.suffixes)


def open_volume(path: Path, dataset: str | None = None, missing_voxels: MissingVoxels | None = None) -> Volume:
    """Open the volume stored at `path` in the format of its suffix, or as HDF5 if the suffix is unknown.

    The volume is a context manager. Only its header is read.

    dataset         name of the array inside the file; None: the only 3D or 4D numeric one there.
    missing_voxels  how to treat voxels that the file should hold but does not; None: missing files are an error, and
                    missing chunks read as the fill value of the format.

    VolumeError says why a file cannot be used, MissingExtraError which package its format needs.
    """
    found = next((one for one in FORMATS if path.suffix in one.suffixes), HDF5)
    return cast("Volume", import_module(found.reader).open_volume(path, dataset, missing_voxels))


def store_for(path: Path) -> type[Store]:
    """Return the store that writes outputs of this name, chosen by suffix.

    OutputError for a suffix that is not written, MissingExtraError for .zarr without the package zarr.
    """
    for one in FORMATS:
        if one.writer and path.suffix in one.suffixes:
            module, name = one.writer
            return cast("type[Store]", getattr(import_module(module), name))
    *most, last = WRITTEN_SUFFIXES
    raise OutputError(
        f"the output {path} has suffix {path.suffix!r}, and only {', '.join(most)} and {last} are written; "
        f"give one of these in {option('out')}"
    )
