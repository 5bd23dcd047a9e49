"""The file formats of volumes and outputs. To add a format, write its modules and add a row to FORMATS.

A format is imported when the first of its files is opened. Its reader is a module with

    open_volume(location: Location, reading: Reading) -> Volume

and its writer a subclass of Store.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, cast

from znnpy.errors import OutputError, VolumeError
from znnpy.messages import option
from znnpy.volume.location import Location, volume_location

if TYPE_CHECKING:
    from znnpy.volume.base import MissingVoxels, Volume
    from znnpy.volume.store import Store


@dataclass(frozen=True, slots=True)
class Format:
    """A file format.

    name      as it is written in messages and documents
    suffixes  of its files or folders, in small letters
    reader    module with `open_volume`
    writer    module and name of a subclass of Store; None: outputs are not written
    marks     files by which a folder is recognised
    prefixes  words that may be written before a place, of `location.PREFIXES`
    remote    whether it is read from buckets and web servers, and written to buckets if it is written
    folder    whether it is a folder, or may be one
    """

    name: str
    suffixes: tuple[str, ...]
    reader: str
    writer: tuple[str, str] | None = None
    marks: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    remote: bool = False
    folder: bool = False


HDF5 = Format("HDF5", (".h5", ".hdf5", ".hdf"), "znnpy.volume.hdf5", ("znnpy.volume.hdf5_store", "Hdf5Store"))
ZARR = Format(
    "Zarr",
    (".zarr",),
    "znnpy.volume.zarr_volume",
    ("znnpy.volume.chunked_store", "ZarrStore"),
    marks=("zarr.json", ".zarray", ".zgroup"),
    prefixes=("zarr", "zarr2", "zarr3"),
    remote=True,
    folder=True,
)
N5 = Format(
    "N5",
    (".n5",),
    "znnpy.volume.n5_volume",
    ("znnpy.volume.chunked_store", "N5Store"),
    marks=("attributes.json",),
    prefixes=("n5",),
    remote=True,
    folder=True,
)
PRECOMPUTED = Format(
    "Neuroglancer precomputed",
    (".precomputed",),
    "znnpy.volume.precomputed_volume",
    ("znnpy.volume.chunked_store", "PrecomputedStore"),
    marks=("info",),
    prefixes=("precomputed",),
    remote=True,
    folder=True,
)
NPY = Format("numpy", (".npy",), "znnpy.volume.array")
FORMATS = (HDF5, ZARR, N5, PRECOMPUTED, NPY)

WRITTEN_SUFFIXES = tuple(suffix for one in FORMATS if one.writer for suffix in one.suffixes)
FOLDER_SUFFIXES = tuple(suffix for one in FORMATS if one.writer and one.folder for suffix in one.suffixes)


def suffix_of(name: str) -> str:
    """Return the longest suffix of a name that a format has, in small letters; empty if none has it."""
    small = name.lower()
    found = [suffix for one in FORMATS for suffix in one.suffixes if small.endswith(suffix)]
    return max(found, key=len, default="")


def format_of(location: Location) -> Format:
    """Return the format of a volume: that of its prefix, of the files in its folder, or of its suffix; else HDF5.

    In a bucket or on a web server files are looked for only where neither prefix nor suffix says the format.

    VolumeError: the files in a bucket or on a web server cannot be read.
    """
    if location.prefix is not None:
        return next(one for one in FORMATS if location.prefix in one.prefixes)
    if location.is_local and os.path.isdir(location.place):
        held = [one for one in FORMATS if any(os.path.lexists(location.path / mark) for mark in one.marks)]
        if held:
            return held[0]
    suffix = suffix_of(location.name)
    named = next((one for one in FORMATS if suffix in one.suffixes), None)
    return named or (HDF5 if location.is_local else _format_there(location))


def _format_there(location: Location) -> Format:
    """Return the format whose marks lie below a URL."""
    from znnpy.volume.object_store import context, files_of

    files = files_of(location, context())
    for one in FORMATS:
        if any(files.read(mark, 1) is not None for mark in one.marks):
            return one
    marks = [mark for one in FORMATS for mark in one.marks]
    raise VolumeError(f"{location} is no volume: none of {', '.join(marks)} lies there; check the name")


def open_volume(
    place: str | Path | Location,
    dataset: str | None = None,
    missing_voxels: MissingVoxels | None = None,
    *,
    scale: int | None = None,
    time: int | None = None,
) -> Volume:
    """Open the volume at a path or URL in the format of its content or suffix, or as HDF5 if these say nothing.

    The volume is a context manager. Only its header is read.

    dataset         name of the array inside the file; None: the only 3D or 4D numeric one there.
    missing_voxels  how to treat voxels that the file should hold but does not; None: missing files are an error, and
                    missing chunks read as the fill value of the format.
    scale           resolution of an image that is stored at several, from 0, the finest.
    time            point of time of a series, from 0.

    VolumeError says why a file cannot be used, MissingExtraError which package its format needs.
    """
    from znnpy.volume.base import MissingVoxels, Reading

    location = volume_location(place, dataset)
    found = format_of(location)
    if not location.is_local and not found.remote:
        remote = [one.name for one in FORMATS if one.remote]
        raise VolumeError(
            f"{location} is {found.name}, and only {', '.join(remote) or 'files on this machine'} can be read from "
            "buckets and web servers; copy it to this machine"
        )
    reading = Reading(location.dataset, scale, time, missing_voxels or MissingVoxels())
    return cast("Volume", import_module(found.reader).open_volume(replace(location, dataset=None), reading))


def store_for(place: Path | Location) -> type[Store]:
    """Return the store that writes outputs of this name, chosen by its prefix, its suffix, or what the folder holds.

    OutputError for a name that is not written, MissingExtraError if a package is missing that the format needs.
    """
    location = place if isinstance(place, Location) else Location(str(place))
    found = _written_as(location)
    if found is None or found.writer is None:
        *most, last = WRITTEN_SUFFIXES
        raise OutputError(
            f"the output {location} has suffix {PurePath(location.name).suffix!r}, and only {', '.join(most)} and "
            f"{last} are written; give one of these in {option('out')}"
        )
    module, name = found.writer
    return cast("type[Store]", getattr(import_module(module), name))


def is_written(place: Path) -> bool:
    """Return whether an output may have this name."""
    found = _written_as(Location(str(place)))
    return found is not None and found.writer is not None


def _written_as(location: Location) -> Format | None:
    if location.prefix is None and (suffix := suffix_of(location.name)):
        return next(one for one in FORMATS if suffix in one.suffixes)
    found = format_of(location)
    return found if location.prefix is not None or found.folder else None
