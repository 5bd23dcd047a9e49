"""NRRD volumes: .nrrd, and .nhdr with its voxels in a file of the same folder. Gzip is unpacked first."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import BinaryIO

from znnpy.errors import VolumeError
from znnpy.messages import excerpt
from znnpy.volume.about import About
from znnpy.volume.axes import arranged
from znnpy.volume.base import Reading
from znnpy.volume.location import Location
from znnpy.volume.nrrd_header import NrrdHeader
from znnpy.volume.raw import RawArray, RawVolume, opened
from znnpy.volume.unpacked import UnpackedVolume

PLAIN, GZIP = ("raw",), ("gzip", "gz")


def open_volume(location: Location, reading: Reading) -> RawVolume:
    """Open an NRRD file and read its header. VolumeError when it is missing, cut short, or not a volume."""
    path = location.path
    reading.missing.check_none(path)
    reading.check_single(path)
    file = opened(path, "NRRD")
    try:
        header = NrrdHeader.of(file)
        data = _data(path, header)
        if data is not None:
            file.close()
            file = opened(data, "NRRD")
        volume = _volume(path, file, data, header, reading)
        volume.space = header.space()
        notes = () if data is None else (f"its voxels are in the file {excerpt(data.name, 60)}",)
        packed = "gzip" if isinstance(volume, UnpackedVolume) else ""
        volume.described = About(f"NRRD {header.version}", compression=packed, notes=notes)
        return volume
    except VolumeError:
        file.close()
        raise
    except (OSError, ValueError) as error:
        file.close()
        raise VolumeError(f"{path} cannot be read as NRRD: {excerpt(error)}; write it again") from None


def _data(path: Path, header: NrrdHeader) -> Path | None:
    """Return the file beside the header that holds the voxels; None where they follow the header.

    VolumeError for several files, and for files of other folders.
    """
    name = header.fields.get("datafile")
    if name is None:
        return None
    name = name.removeprefix("./")
    if name.startswith("LIST") or "%" in name:
        raise VolumeError(f"{path} has its voxels in several files; write it again in one")
    if name in ("", ".", "..") or os.path.basename(name) != name or "\0" in name:
        raise VolumeError(
            f"{path} has its voxels in {excerpt(name, 100)}, and only files of its own folder are read; put them there"
        )
    return path.with_name(name)


def _volume(path: Path, file: BinaryIO, data: Path | None, header: NrrdHeader, reading: Reading) -> RawVolume:
    shape, dtype = header.shape, header.dtype
    layout = arranged(header.names(), shape, reading.time, path)
    encoding = header.fields.get("encoding", "").lower()
    if encoding not in (*PLAIN, *GZIP):
        raise VolumeError(
            f"{path} has the encoding {excerpt(encoding, 20)!r}, and only raw and gzip are read; write it again as raw"
        )
    if header.skipped("lineskip"):
        raise VolumeError(f"{path} has lines of text before its voxels (line skip); write it again without them")
    begin, skip = header.end if data is None else 0, header.skipped("byteskip")
    if encoding in GZIP:
        if skip < 0:
            raise ValueError("its byteskip is -1, which is for raw voxels alone")
        return UnpackedVolume(
            path, file, RawArray(skip, shape, dtype, by_columns=True), layout, packed_at=begin, data=data
        )
    if skip < 0:
        begin = max(begin, os.fstat(file.fileno()).st_size - prod(shape) * dtype.itemsize)
    return RawVolume(path, file, RawArray(begin + max(skip, 0), shape, dtype, by_columns=True), layout, data=data)
