"""Zarr outputs (format 3, local folders) with a file per chunk. Needs the extra `zarr`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from znnpy.errors import MissingExtraError, OutputError, ThreadError
from znnpy.extras import install
from znnpy.files import MOST_METADATA_BYTES, is_still, open_regular, remove, sync_file, sync_folder
from znnpy.patches import Box
from znnpy.shapes import add, multiply, subtract
from znnpy.volume.output_names import OUTPUTS
from znnpy.volume.space import ome_of
from znnpy.volume.store import (
    DAMAGED,
    OutputArray,
    Store,
    check_filled,
    check_stored,
    chunks_of,
    damaged,
    taken_over,
)

try:
    import zarr
    from zarr.errors import NodeNotFoundError
except ImportError:
    raise MissingExtraError(
        f"reading and writing .zarr needs the package zarr, which is not installed; `{install('zarr')}`"
    ) from None


class ZarrStore(Store):
    """A Zarr array of format 3, or a group of such, compressed with zstd: (c, z, y, x), or (z, y, x) where c is 1.

    Every chunk is a file that is replaced in one step, so a killed process leaves it either old or new.
    """

    def __init__(self, path: Path, arrays: Sequence[OutputArray], dtype: np.dtype[Any]) -> None:
        self._path = path
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._arrays, self._dtype = arrays, dtype
        self._unsynced: dict[Path, Path] = {}  # chunks, and the folder of the array of each
        self._begun: set[Path] = set()  # arrays whose folders are on disk with what is in them
        try:
            self._voxels = [_opened(path, array, dtype) for array in arrays]
            if not self.is_still_there():  # the library opened by path
                raise taken_over(path)
            self._remove_incomplete_chunks()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def create(path: Path, arrays: Sequence[OutputArray], dtype: np.dtype[Any], attributes: Mapping[str, Any]) -> None:
        path.mkdir()  # FileExistsError for anything there, links too
        several = bool(arrays[0].name)
        if several:
            zarr.create_group(path, attributes=_listed(attributes))
            zarr.create_group(path / OUTPUTS)
        for array in arrays:
            zarr.create_array(
                path / array.name,
                shape=array.stored_shape,
                chunks=array.stored_chunk,
                dtype=dtype,
                dimension_names=("c", "z", "y", "x")[-len(array.stored_shape) :],
                attributes={
                    **_listed({} if several else attributes),
                    **_listed(array.attributes),
                    **_placed(array),
                },
            )
        for folder in dict.fromkeys((*(path / array.name for array in arrays), *([path / OUTPUTS, path] * several))):
            sync_file(folder / "zarr.json")
            sync_folder(folder)

    @staticmethod
    def attributes_of(path: Path, name: str = "") -> dict[str, Any]:
        try:
            attributes = _metadata(path / name).get("attributes")
        except DAMAGED:
            return {}
        return attributes if isinstance(attributes, dict) else {}

    def write(self, box: Box, voxels: npt.NDArray[Any], number: int = 0) -> None:
        check_filled(box, voxels, self._dtype)
        if not self.is_still_there():  # the library writes by path
            raise taken_over(self._path)
        array, stored = self._arrays[number], self._voxels[number]
        for index in chunks_of(box, array.chunk):  # one at a time: this takes little memory and writes no chunk twice
            lo = multiply(index, array.chunk)
            part = box.clipped(Box(lo, add(lo, array.chunk)))
            there = part.shifted(subtract((0, 0, 0), box.lo))
            for channel, maps in enumerate(voxels):
                leading = () if array.shape[0] == 1 else (channel,)
                stored[(*leading, *part.slices)] = maps[there.slices]
                key = cast("Any", stored.metadata).encode_chunk_key((*leading, *index))
                self._unsynced[self._path / array.name / key] = self._path / array.name

    def sync(self) -> None:
        begun = set(self._unsynced.values()) - self._begun
        folders = {
            folder
            for file, array in self._unsynced.items()
            for folder in file.parents
            if array in folder.parents  # those below the folder of the array
        }
        for file in self._unsynced:
            if file.exists():  # chunks of zeros are not stored
                sync_file(file)
        for folder in folders | begun:
            if folder.exists():
                sync_folder(folder)
        self._begun |= begun
        self._unsynced.clear()

    def is_still_there(self) -> bool:
        return self._folder >= 0 and is_still(self._path, self._folder)

    def close(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = -1

    def _remove_incomplete_chunks(self) -> None:
        """Remove incomplete chunks of a killed writer. ResumeError for links, which writing would follow."""
        left = [self._path]
        while left:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        raise damaged(self._path, f"{entry.name} is a symbolic link")
                    if entry.is_dir():
                        left.append(Path(entry.path))
                    elif entry.name.endswith(".partial"):
                        remove(Path(entry.path))


def _placed(array: OutputArray) -> dict[str, Any]:
    """Return the attributes that say where the voxels of an array lie."""
    if array.space is None:
        return {}
    return {**_listed(array.space.attributes()), **ome_of(array.space, array.shape[0])}


def _listed(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes with lists in place of arrays, as JSON has them."""
    return {key: value.tolist() if hasattr(value, "tolist") else value for key, value in attributes.items()}


def _opened(path: Path, array: OutputArray, dtype: np.dtype[Any]) -> zarr.Array[Any]:
    """Open an array of an output; OutputError if it has another shape or type, ResumeError if it is damaged."""
    try:
        _metadata(path / array.name)  # limits its size
        found = zarr.open_array(path / array.name, mode="r+")
        check_stored(path, found.shape, np.dtype(found.dtype), array, dtype)
        if found.chunks != array.stored_chunk or found.shards:
            raise ValueError(f"its chunks are {found.chunks}, and not {array.chunk}")
    except OutputError:
        raise
    except (NodeNotFoundError, *DAMAGED) as error:
        ThreadError.check(error)
        raise damaged(path, error) from error
    return found


def _metadata(path: Path) -> dict[str, Any]:
    """Read `zarr.json`. OSError or ValueError if it is missing, too long, or not metadata."""
    with open_regular(path / "zarr.json") as file:
        content = file.read(MOST_METADATA_BYTES + 1)
    if len(content) > MOST_METADATA_BYTES:
        raise ValueError(f"zarr.json is longer than {MOST_METADATA_BYTES} bytes")
    metadata = from_json(content)
    if not isinstance(metadata, dict):
        raise ValueError("zarr.json is not metadata")
    return metadata
