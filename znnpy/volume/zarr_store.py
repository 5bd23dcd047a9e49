"""Zarr outputs (format 3, local folders) with a file per chunk. Needs the extra `zarr`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from znnpy.errors import MissingExtraError, OutputError, ThreadError
from znnpy.extras import install
from znnpy.files import MOST_METADATA_BYTES, is_still, open_regular, remove, sync_file, sync_folder
from znnpy.patches import Box
from znnpy.shapes import Vec3, add, multiply, subtract
from znnpy.volume.space import ome_of
from znnpy.volume.store import DAMAGED, Store, check_stored, chunk_of, chunks_of, damaged, taken_over

try:
    import zarr
    from zarr.errors import NodeNotFoundError
except ImportError:
    raise MissingExtraError(
        f"reading and writing .zarr needs the package zarr, which is not installed; `{install('zarr')}`"
    ) from None


class ZarrStore(Store):
    """A Zarr array of format 3, compressed with zstd: (c, z, y, x), or (z, y, x) where c is 1.

    Every chunk is a file that is replaced in one step, so a killed process leaves it either old or new.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> None:
        self._path = path
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._chunk = chunk_of((shape[1], shape[2], shape[3]))
        self._maps = shape[0]
        self._unsynced: set[Path] = set()
        try:
            self._voxels = _opened(path, self._chunk, shape, dtype)
            if not self.is_still_there():  # the library opened by path
                raise taken_over(path)
            self._remove_incomplete_chunks()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def create(
        path: Path, shape: tuple[int, int, int, int], dtype: np.dtype[Any], attributes: Mapping[str, Any]
    ) -> None:
        chunk = chunk_of((shape[1], shape[2], shape[3]))
        path.mkdir()  # FileExistsError for anything there, links too
        zarr.create_array(
            path,
            shape=shape if shape[0] > 1 else shape[1:],
            chunks=chunk if shape[0] == 1 else (1, *chunk),
            dtype=dtype,
            dimension_names=("c", "z", "y", "x")[-3 if shape[0] == 1 else -4 :],
            attributes={
                **{key: value.tolist() if hasattr(value, "tolist") else value for key, value in attributes.items()},
                **ome_of(attributes, shape[0]),
            },
        )
        sync_file(path / "zarr.json")
        sync_folder(path)

    @staticmethod
    def attributes_of(path: Path) -> dict[str, Any]:
        try:
            attributes = _metadata(path).get("attributes")
        except DAMAGED:
            return {}
        return attributes if isinstance(attributes, dict) else {}

    def write(self, box: Box, voxels: npt.NDArray[Any]) -> None:
        if voxels.shape[1:] != box.size or voxels.dtype != self._voxels.dtype:
            raise ValueError(f"{voxels.dtype} {voxels.shape} does not fill {box} of {self._voxels.dtype}")
        if not self.is_still_there():  # the library writes by path
            raise taken_over(self._path)
        for index in chunks_of(box, self._chunk):  # one at a time: this takes little memory and writes no chunk twice
            lo = multiply(index, self._chunk)
            part = box.clipped(Box(lo, add(lo, self._chunk)))
            there = part.shifted(subtract((0, 0, 0), box.lo))
            for channel, maps in enumerate(voxels):
                leading = () if self._maps == 1 else (channel,)
                self._voxels[(*leading, *part.slices)] = maps[there.slices]
                key = cast("Any", self._voxels.metadata).encode_chunk_key((*leading, *index))
                self._unsynced.add(self._path / key)

    def sync(self) -> None:
        folders = {folder for file in self._unsynced for folder in list(file.parents)[: 3 + (self._maps > 1)]}
        for file in self._unsynced:
            if file.exists():  # chunks of zeros are not stored
                sync_file(file)
        for folder in folders:
            if folder.exists():
                sync_folder(folder)
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


def _opened(path: Path, chunk: Vec3, shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> zarr.Array[Any]:
    """Open the array at `path`; OutputError if it has another shape or type, ResumeError if it is damaged."""
    try:
        _metadata(path)  # limits its size
        array = zarr.open_array(path, mode="r+")
        check_stored(path, array.shape, np.dtype(array.dtype), shape, dtype)
        if array.chunks != (chunk if shape[0] == 1 else (1, *chunk)) or array.shards:
            raise ValueError(f"its chunks are {array.chunks}, and not {chunk}")
    except OutputError:
        raise
    except (NodeNotFoundError, *DAMAGED) as error:
        ThreadError.check(error)
        raise damaged(path, error) from error
    return array


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
