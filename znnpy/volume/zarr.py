"""Zarr volumes and outputs (formats 2 and 3, local folders): one file a chunk. Needs the extra `zarr`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from znnpy.errors import MissingExtraError, OutputError, VolumeError
from znnpy.patches import Box
from znnpy.planner.memory import READER_BYTES
from znnpy.shapes import add, multiply, subtract
from znnpy.volume.journal import sync_folder
from znnpy.volume.store import Store, chunk_of, chunks_of
from znnpy.volume.volume import Volume, pick

try:
    import zarr
    from zarr.core.buffer import default_buffer_prototype
    from zarr.errors import NodeNotFoundError
except ImportError:
    raise MissingExtraError(
        "reading and writing .zarr needs the package zarr, which is not installed; `pip install 'znnpy[zarr]'`"
    ) from None

DAMAGED = (OSError, RuntimeError, ValueError)  # what codecs and metadata raise


class ZarrVolume(Volume):
    """One array of a Zarr folder, (z, y, x) or (c, z, y, x). Made by `open_volume`."""

    def __init__(self, array: zarr.Array[Any], path: Path, name: str) -> None:
        super().__init__(path, name, array.shape, np.dtype(array.dtype))
        self._voxels = array

    def close(self) -> None:
        """Nothing stays open between reads."""

    @property
    def extra_bytes(self) -> int:
        """Chunks are unpacked several at once, each beside its packed form."""
        chunk: int = prod(self._voxels.chunks) * self.dtype.itemsize
        at_once: int = min(int(zarr.config.get("async.concurrency")), int(self._voxels.nchunks))
        return max(0, 2 * at_once * chunk - READER_BYTES)

    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        where = (slice(None), *box.slices) if self.has_channel_axis else box.slices
        target = default_buffer_prototype().nd_buffer.from_numpy_array(out if self.has_channel_axis else out[0])
        try:
            self._voxels.get_basic_selection(where, out=target)
        except DAMAGED as error:
            raise VolumeError(
                f"{self} cannot be read at (z, y, x) = {box.lo} to {box.hi}: {error}; "
                "a chunk is damaged or was changed meanwhile: copy the folder again"
            ) from None

    def stored(self) -> tuple[int, int]:
        """Bytes of all files and the latest change of any."""
        files = [file.stat() for file in self.path.rglob("*") if file.is_file()]
        return sum(file.st_size for file in files), max(file.st_mtime_ns for file in files)


def open_volume(path: Path, dataset: str | None = None) -> ZarrVolume:
    """The array `dataset` of the folder, or the only 3D or 4D numeric one in any of its groups; or the folder itself.

    VolumeError: missing, not Zarr, damaged metadata, no such array, several arrays, no volume.
    """
    try:
        root = zarr.open(path, mode="r")
        if isinstance(root, zarr.Array):
            if dataset is not None:
                raise VolumeError(f"{path} is one Zarr array, so there is no dataset {dataset!r} to name")
            return ZarrVolume(root, path, "")
        arrays = {name: item for name, item in root.members(max_depth=None) if isinstance(item, zarr.Array)}
    except FileNotFoundError as error:
        if path.exists() and isinstance(error, NodeNotFoundError):
            raise VolumeError(
                f"{path} is not Zarr: it holds no zarr.json, .zarray or .zgroup; check the path"
            ) from None
        raise VolumeError(f"there is no folder {path}; check the path") from None
    except VolumeError:
        raise
    except DAMAGED as error:
        raise VolumeError(f"{path} cannot be opened as Zarr: {error}; copy it again") from None
    name = pick({key: (array.shape, np.dtype(array.dtype)) for key, array in arrays.items()}, dataset, path)
    return ZarrVolume(arrays[name], path, name)


class ZarrStore(Store):
    """A Zarr array of format 3, zstd compressed: (c, z, y, x), or (z, y, x) where c is 1.

    Every chunk is a file that is replaced whole, so a killed process leaves each as it was or as it should be.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> None:
        self._path = path
        array = zarr.open_array(path, mode="r+")
        stored = (1,) * (4 - array.ndim) + array.shape
        if stored != shape or array.dtype != dtype:
            raise OutputError(
                f"{path} holds {stored} {array.dtype}, and this run writes {shape} {dtype}; "
                "start again with --overwrite"
            )
        for half in path.rglob("*.partial"):  # chunks whose writer was killed
            half.unlink()
        self._voxels = array
        self._chunk = chunk_of((shape[1], shape[2], shape[3]))
        self._maps = shape[0]
        self._unsynced: set[Path] = set()

    @staticmethod
    def create(
        path: Path, shape: tuple[int, int, int, int], dtype: np.dtype[Any], attributes: Mapping[str, Any]
    ) -> None:
        chunk = chunk_of((shape[1], shape[2], shape[3]))
        zarr.create_array(
            path,
            shape=shape if shape[0] > 1 else shape[1:],
            chunks=chunk if shape[0] == 1 else (1, *chunk),
            dtype=dtype,
            dimension_names=("c", "z", "y", "x")[-3 if shape[0] == 1 else -4 :],
            attributes={
                key: value.tolist() if hasattr(value, "tolist") else value for key, value in attributes.items()
            },
        )
        _sync_file(path / "zarr.json")
        sync_folder(path)

    @staticmethod
    def attributes_of(path: Path) -> dict[str, Any]:
        try:
            return dict(zarr.open_array(path, mode="r").attrs)
        except (NodeNotFoundError, *DAMAGED):
            return {}

    def write(self, box: Box, voxels: npt.NDArray[Any]) -> None:
        if voxels.shape[1:] != box.size or voxels.dtype != self._voxels.dtype:
            raise ValueError(f"{voxels.dtype} {voxels.shape} does not fill {box} of {self._voxels.dtype}")
        for index in chunks_of(box, self._chunk):  # one by one: little memory, and no chunk is written twice
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
            if file.exists():  # a chunk of zeros is none
                _sync_file(file)
        for folder in folders:
            if folder.exists():
                sync_folder(folder)
        self._unsynced.clear()

    def close(self) -> None:
        """Nothing stays open between writes."""


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
