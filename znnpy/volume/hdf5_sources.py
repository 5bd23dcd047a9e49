"""Find the other files that hold voxels of HDF5 datasets, and report those that are missing.

HDF5 silently reads a fill value where the source of a virtual dataset or the end of an external file is missing, and
crashes if a virtual dataset is its own source. So all sources are inspected before a read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import h5py

from znnpy.errors import VolumeError
from znnpy.messages import excerpt
from znnpy.volume.hdf5_links import (
    HDF5_ERRORS,
    OTHER_DEGREE,
    MissingTargetError,
    dataset_named,
    open_file,
    regular_source,
)
from znnpy.volume.hdf5_mapping import Mapping
from znnpy.volume.hdf5_unwritten import unmapped, unwritten
from znnpy.volume.regions import Region, run_of

MOST_NESTED = 16  # virtual datasets in a chain of sources
MOST_MAPPINGS = 10**6  # mappings of one virtual dataset to its sources

Key = tuple[int, int, bytes]  # device and inode of a file, name of a dataset in it


@dataclass(frozen=True, slots=True)
class Missing:
    """Elements of a dataset that are not in the files they should be in."""

    region: Region  # along the axes of the dataset
    why: str  # "the source file plane2.h5 is missing", for example
    is_exact: bool  # every element of the region is missing, and it lies within the dataset
    is_read: bool = False  # HDF5 silently reads a fill value there, since it was never written
    has_value: bool = True  # there is a fill value; without one HDF5 leaves the memory unchanged


@dataclass(frozen=True, slots=True)
class Stored:
    """The storage layout of a dataset in its file."""

    chunk: tuple[int, ...]  # elements along each axis; () for a layout without chunks
    itemsize: int
    is_packed: bool  # chunks pass through filters, so each is read completely

    @classmethod
    def of(cls, dataset: h5py.h5d.DatasetID, made: h5py.h5p.PropDCID) -> Stored:
        """Return the storage layout of `dataset`, which was made with these properties."""
        chunk = tuple(made.get_chunk()) if made.get_layout() == h5py.h5d.CHUNKED else ()
        return cls(chunk, dataset.get_type().get_size(), made.get_nfilters() > 0)

    @property
    def packed_bytes(self) -> int:
        """Unpacked bytes of a chunk, if chunks are read whole; 0 if only the needed part is read."""
        return prod(self.chunk) * self.itemsize if self.is_packed else 0


@dataclass(frozen=True, slots=True)
class _Source:
    """One source of a virtual dataset, after inspection."""

    shape: tuple[int, ...]
    missing: Sequence[Missing]


class Sources:
    """All sources of a dataset, inspected without reading a voxel."""

    def __init__(self) -> None:
        self.stored: dict[Key, Stored] = {}  # every dataset that is not virtual
        self.files: set[Path] = set()  # files that are read, or lead to one that is
        self._known: dict[Key, list[Missing]] = {}
        self._looked: dict[tuple[Path, str, str], _Source | str] = {}
        self._trail: list[Key] = []  # chain of virtual datasets, each a source of the one before

    def missing(self, dataset: h5py.h5d.DatasetID, path: Path) -> list[Missing]:
        """Find what is missing of the dataset; `path` is the file that holds it.

        VolumeError: a virtual dataset is its own source, directly or through others; a source is not a regular file.
        """
        made = dataset.get_create_plist()
        self.files |= {path, Path(os.fsdecode(h5py.h5f.get_name(dataset)))}
        key = _key(dataset, path)
        if made.get_layout() != h5py.h5d.VIRTUAL:
            self.stored[key] = Stored.of(dataset, made)
            return list(_cut_short(dataset, made, path, self.files))
        if key in self._trail:
            raise VolumeError(
                f"{path}: a virtual dataset is its own source, which no program can read; "
                "write it again with other sources"
            )
        if len(self._trail) == MOST_NESTED:
            raise VolumeError(
                f"{path}: more than {MOST_NESTED} virtual datasets are sources of each other; copy the voxels into one"
            )
        if key not in self._known:
            self._trail.append(key)
            self._known[key] = self._of_virtual(dataset, made, path)
            self._trail.pop()
        return self._known[key]

    def _of_virtual(self, dataset: h5py.h5d.DatasetID, made: h5py.h5p.PropDCID, path: Path) -> list[Missing]:
        count = made.get_virtual_count()
        if count > MOST_MAPPINGS:
            raise VolumeError(
                f"{path}: a virtual dataset has {count:,} sources, and up to {MOST_MAPPINGS:,} are read; "
                "copy the voxels into one dataset"
            )
        looked: list[tuple[Mapping, int, _Source | str]] = []
        for number in range(count):
            mapping = Mapping.of(made, number)
            source, block = self._inspect(path, *mapping.names(0)), 0
            looked.append((mapping, block, source))
            while mapping.is_series and not isinstance(source, str):  # HDF5 too stops at the first missing one
                block += 1
                source = self._inspect(path, *mapping.names(block))
                looked.append((mapping, block, source))
        shape = tuple(dataset.shape)  # HDF5 opens sources to determine it, so they are inspected first
        lost = [one for mapping, block, source in looked for one in _lost(mapping, block, source, shape)]
        boxes = [
            mapping.box(block, tuple(map(max, shape, mapping.extent)), rest=isinstance(source, str))
            for mapping, block, source in looked
        ]
        why, has_value = "no source is mapped to", fills(made)
        return lost + [Missing(rest, why, True, True, has_value) for rest in unmapped(shape, boxes)]

    def _inspect(self, path: Path, file_name: str, name: str) -> _Source | str:
        """Return a source of a dataset in the file `path`, or why it is missing."""
        asked = (path, file_name, name)
        if asked not in self._looked:
            found = path if file_name == "." else regular_source(file_name, path, "HDF5_VDS_PREFIX")
            if found is None:
                self._looked[asked] = f"the source file {excerpt(file_name)} is missing"
            else:
                self._looked[asked] = self._opened(found, name)
        return self._looked[asked]

    def _opened(self, path: Path, name: str) -> _Source | str:
        try:
            with closing(open_file(path)) as file:
                dataset = dataset_named(file, os.fsencode(name), path, self.files)
                if dataset is None:
                    return f"the source file {excerpt(path.name)} holds no dataset {excerpt(name)}"
                lost = [*self.missing(dataset, path), *_never_written(dataset)]
                return _Source(missing=lost, shape=tuple(dataset.shape or ()))
        except MissingTargetError as missing:
            return str(missing)
        except HDF5_ERRORS as error:
            if isinstance(error, VolumeError):
                raise
            if OTHER_DEGREE in str(error):  # HDF5 would read the fill value
                raise VolumeError(
                    f"{path} is a source of a virtual dataset and open in this process: close it"
                ) from None
            raise VolumeError(
                f"{path} is a source of a virtual dataset and cannot be read as HDF5: {excerpt(error)}; copy it again"
            ) from None


def _lost(mapping: Mapping, block: int, source: _Source | str, shape: tuple[int, ...]) -> Iterator[Missing]:
    """Yield what is missing of one mapping, in a virtual dataset of this shape."""
    if isinstance(source, str):
        extent = tuple(map(max, shape, mapping.extent))  # HDF5 makes it smaller where sources are missing
        box = mapping.box(block, extent, rest=True)
        within = all(end <= size for end, size in zip(box.hi, shape, strict=True))
        if box.elements:
            yield Missing(box, source, is_exact=mapping.place.is_box and within)
        return
    box = mapping.box(block, shape, rest=False)
    if not mapping.fits(source.shape, box):
        why = f"the source dataset {excerpt(mapping.dataset)} has shape {source.shape}, and more of it is mapped"
        yield Missing(box, why, is_exact=False)
        return
    for lost in source.missing:
        part = mapping.of_source(lost.region, source.shape, box)
        if part is None:
            yield replace(lost, region=box, is_exact=False)
        elif part.elements:
            yield replace(lost, region=part)


def fills(made: h5py.h5p.PropDCID) -> bool:
    """Return whether HDF5 reads a fill value where nothing was written; else it leaves the memory unchanged."""
    return bool(made.get_fill_time() != h5py.h5d.FILL_TIME_NEVER and made.fill_value_defined() != 0)


def _never_written(dataset: h5py.h5d.DatasetID) -> Iterator[Missing]:
    """Yield the parts never written of a source that is not a virtual dataset."""
    made = dataset.get_create_plist()
    if made.get_layout() in (h5py.h5d.CHUNKED, h5py.h5d.CONTIGUOUS):
        why, has_value = "chunks of the sources are missing at", fills(made)
        for region in unwritten(dataset, Stored.of(dataset, made).chunk):
            yield Missing(region, why, True, True, has_value)


def _cut_short(dataset: h5py.h5d.DatasetID, made: h5py.h5p.PropDCID, path: Path, files: set[Path]) -> Iterator[Missing]:
    """Yield what is missing of a dataset stored in external files; add the files that exist to `files`."""
    if not made.get_external_count():
        return
    shape, itemsize = tuple(dataset.shape), dataset.get_type().get_size()
    need, at = prod(shape) * itemsize, 0
    for number in range(made.get_external_count()):
        name, offset, size = made.get_external(number)
        file = regular_source(os.fsdecode(name), path, "HDF5_EXTFILE_PREFIX", in_folder=False)
        files |= {file} if file else set()
        end = min(need, at + size)
        there = min(end, at + max(0, file.stat().st_size - offset)) if file else at
        why = f"the external file {excerpt(os.fsdecode(name))} is " + (
            f"{file.stat().st_size} bytes long, and {offset + end - at} are needed" if file else "missing"
        )
        for region in run_of(shape, there // itemsize, -(-end // itemsize)):
            yield Missing(region, why, is_exact=True)
        at = end
    for region in run_of(shape, at // itemsize, prod(shape)):
        yield Missing(region, "its external files are shorter than the dataset", is_exact=True)


def _key(dataset: h5py.h5d.DatasetID, path: Path) -> Key:
    status = path.stat()
    return status.st_dev, status.st_ino, bytes(h5py.h5i.get_name(dataset))
