"""Zarr volumes (formats 2 and 3, local folders) with a file per chunk or shard. Needs the extra `zarr`."""

from __future__ import annotations

import threading
from collections.abc import Collection
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from znnpy.errors import MissingExtraError, ThreadError, VolumeError, ZnnpyError
from znnpy.extras import install
from znnpy.geometry import vector
from znnpy.messages import excerpt, option
from znnpy.patches import Box
from znnpy.planner.memory import READER_BYTES
from znnpy.shapes import Vec3
from znnpy.volume.about import About, Inside
from znnpy.volume.base import Chunks, MissingVoxels, Reading, Volume, pick, why_not
from znnpy.volume.decompression import ChunkTooLargeError
from znnpy.volume.location import Location
from znnpy.volume.regions import Region, pieces
from znnpy.volume.space import Scales
from znnpy.volume.zarr_nodes import INDEX_ENTRY, Node, read_nodes

try:
    import zarr
    from zarr.core.buffer import default_buffer_prototype

    from znnpy.volume.zarr_codecs import bounded_array
    from znnpy.volume.zarr_files import VolumeFiles, table_bytes
except ImportError:
    raise MissingExtraError(
        f"reading and writing .zarr needs the package zarr, which is not installed; `{install('zarr')}`"
    ) from None

# Errors that damaged chunks and metadata raise.
DAMAGED = (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError)
PIECE_BYTES = 4 * 2**20  # voxels read at once, unless one chunk is larger
AT_ONCE = 64  # chunks per piece: each takes some KiB while it is read
STEPS = 3  # copies of a chunk while it is unpacked: as stored, unpacked, and in the order of the array
INDEX_STEPS = 4  # copies of the index of a shard while it is read
LOOKED_FOR = 100_000  # chunk files: up to this number they are all looked up before a run, if none may be missing
THREADS = 10  # threads that unpack at the same time
THREAD_BYTES = 2 * 2**20  # memory kept by each thread: its stack, and memory that it freed


class ZarrVolume(Volume):
    """One array of a Zarr folder, (z, y, x) or (c, z, y, x), possibly after axes of length 1."""

    def __init__(self, path: Path, name: str, node: Node, missing_voxels: MissingVoxels) -> None:
        super().__init__(path, name, node.shape, node.dtype or np.dtype(object))
        self._node, self._missing_voxels = node, missing_voxels
        self._files = VolumeFiles(path)
        index_bytes = INDEX_ENTRY * prod(node.file) // prod(node.chunk) + INDEX_ENTRY
        self._index_bytes = index_bytes if node.file != node.chunk else 0
        self._files.watch(name, node, index_bytes=self._index_bytes)
        self._voxels: zarr.Array[Any] = zarr.open_array(self._files, path=name, mode="r")
        if tuple(self._voxels.shape) != node.shape or np.dtype(self._voxels.dtype) != node.dtype:
            raise ValueError(
                f"the array is {self._voxels.dtype} of shape {self._voxels.shape}, not as its metadata state"
            )
        self._voxels = bounded_array(self._voxels, node.chunk_bytes)
        self.scales: tuple[Inside, ...] = ()  # of the image that the array belongs to
        self.arrays: tuple[Inside, ...] = ()  # in the folder
        self.ome = ""  # version of OME-Zarr
        self._lock = threading.Lock()  # one thread reads at a time, so that memory is counted once

    def close(self) -> None:
        """Do nothing: no file stays open between reads."""

    @property
    def files(self) -> Collection[Path]:
        return (self.path, self.path / self.dataset)

    @property
    def chunk_size(self) -> Vec3:
        return vector(self._node.chunk[-3:])

    @property
    def chunks(self) -> Chunks:
        return self._files.chunks

    def about(self) -> About:
        meta, node = self._voxels.metadata, self._node
        ome = f", OME-Zarr {self.ome}" if self.ome else ""
        packed = [_codec(one) for one in self._voxels.compressors]
        return About(
            f"Zarr {meta.zarr_format}{ome}",
            compression=", ".join(packed),
            shard=node.file if node.is_sharded else (),
            scales=self.scales,
            datasets=self.arrays if len(self.arrays) > 1 else (),
        )

    def expect(self, box: Box) -> None:
        needed = self.stored_region(box)
        files = needed.in_steps(self._node.file)
        self._files.expect(files, needed.in_steps(self._node.chunk), self._missing_voxels.chunks)
        if self._missing_voxels.chunks == "error" and files.elements <= LOOKED_FOR:
            key_of = cast("Any", self._voxels.metadata).encode_chunk_key
            spans = (range(first, end) for first, end in zip(files.lo, files.hi, strict=True))
            self._files.look_for(f"{self.dataset}/{key_of(index)}".lstrip("/") for index in product(*spans))

    @property
    def extra_bytes(self) -> int:
        """Memory for chunks that are unpacked at the same time, a shard's index, and the count of missing chunks."""
        chunk = self._node.chunk_bytes
        at_once = min(AT_ONCE, THREADS, max(1, PIECE_BYTES // chunk), self._node.chunks)
        table = table_bytes(self._node.shape, self._node.file)
        return max(0, at_once * (STEPS * chunk + THREAD_BYTES) + INDEX_STEPS * self._index_bytes + table - READER_BYTES)

    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        asked = self.stored_region(box)
        target, back = out.reshape(asked.shape), [-at for at in asked.lo]
        most = PIECE_BYTES // self.dtype.itemsize
        try:
            with self._lock, self._files.refusing_missing():
                for piece in pieces(asked, self._node.chunk, elements=most, chunks=AT_ONCE):
                    self._read(piece, target[piece.shifted(back).slices])
        except ChunkTooLargeError:
            raise self._too_large(piece) from None
        except DAMAGED as error:
            if isinstance(error, ZnnpyError):
                raise
            ThreadError.check(error)
            raise VolumeError(
                f"{self} cannot be read at (z, y, x) = {box.lo} to {box.hi}: {excerpt(error)}; "
                "a chunk is damaged or was changed in the meantime: copy the folder again"
            ) from None

    def _read(self, piece: Region, there: npt.NDArray[Any]) -> None:
        buffer = default_buffer_prototype().nd_buffer.from_numpy_array(there)
        self._voxels.get_basic_selection(piece.slices, out=buffer)

    def _too_large(self, piece: Region) -> VolumeError:
        """Make the error that names the first chunk of a piece that unpacks to too much; it reads one at a time."""
        for one in pieces(piece, self._node.chunk, elements=1, chunks=1):
            try:
                with self._lock:
                    self._read(one, np.empty(one.shape, self.dtype))
            except ChunkTooLargeError as error:
                index = tuple(at // size for at, size in zip(one.lo, self._node.chunk, strict=True))
                return VolumeError(
                    f"{self}: chunk {index} unpacks to {error}, and a chunk of the array has "
                    f"{self._node.chunk_bytes:,}; it is damaged: copy the folder again"
                )
        return VolumeError(f"{self}: a chunk was changed while it was read; read it again")

    def stored(self) -> tuple[int, int]:
        """Return the bytes of all files of the array, and the latest change of any; other arrays may change."""
        files = [file.stat() for file in (self.path / self.dataset).rglob("*") if file.is_file()]
        return sum(file.st_size for file in files), max(file.st_mtime_ns for file in files)


def _scale_of(path: Path, scales: Scales | None, reading: Reading) -> str | None:
    """Return the array of a resolution of the image in a folder; VolumeError if there is none such."""
    if reading.scale is None or reading.dataset is not None:
        if reading.scale and reading.dataset is not None:
            raise VolumeError(
                f"a dataset and a resolution of {path} are named: give {option('dataset')} or {option('scale')}"
            )
        return scales.paths[0] if scales else None
    if scales is None or not reading.scale < len(scales.paths):
        held = f"{len(scales.paths)} resolutions, from 0" if scales else "one resolution"
        raise VolumeError(f"{path} has {held}, and no {option('scale', reading.scale)}; leave it out, or give another")
    return scales.paths[reading.scale]


def _codec(codec: Any) -> str:
    """Name a codec, with its level where it has one."""
    settings = codec.to_dict() if hasattr(codec, "to_dict") else codec.get_config()
    settings = {**settings, **settings.get("configuration", {})}
    name = settings.get("name") or settings.get("id") or type(codec).__name__
    words = [name, settings.get("cname"), settings.get("level", settings.get("clevel"))]
    return excerpt(" ".join(str(getattr(word, "value", word)) for word in words if word is not None), 40)


def open_volume(location: Location, reading: Reading) -> ZarrVolume:
    """Open an array of a folder: the named one, the only 3D or 4D numeric one in any group, or the folder itself.

    The default for an OME-Zarr image with several resolutions is the finest.

    VolumeError: the folder is missing or not Zarr, its metadata are damaged, there is no such array, or several, or it
    is not a volume.
    """
    path, dataset = location.path, reading.dataset
    reading.missing.check_fill(path)
    reading.check_one_time(path)
    if not path.is_dir():
        raise VolumeError(
            f"{path} is not a folder; check the path" if path.exists() else f"there is no folder {path}; check the path"
        )
    nodes = read_nodes(path)
    if not nodes:
        raise VolumeError(f"{path} is not Zarr: it holds no zarr.json, .zarray or .zgroup; check the path")
    arrays = {name: (node.shape, node.dtype) for name, node in nodes.items() if node.dtype is not None}
    scales = Scales.of(nodes[""].attributes)
    if "" in arrays and dataset is not None:
        raise VolumeError(f"{path} is one Zarr array, so there is no dataset {excerpt(repr(dataset))} to name")
    wanted = _scale_of(path, scales, reading)
    if "" in arrays:
        name = ""
    elif dataset is None and wanted in arrays and (reading.scale is not None or why_not(*arrays[wanted]) is None):
        name = wanted
    else:
        name = pick(arrays, dataset, path)
    try:
        volume = ZarrVolume(path, name, nodes[name], reading.missing)
    except DAMAGED as error:
        if isinstance(error, ZnnpyError):
            raise
        ThreadError.check(error)
        raise VolumeError(f"{path} cannot be opened as Zarr: {excerpt(error)}; copy it again") from None
    group, _, last = name.rpartition("/")
    last = last or "."  # an array whose own metadata describe it, as in outputs of znnpy
    scales = Scales.of(nodes[group].attributes) if group in nodes else None
    if scales and last in scales.paths:
        volume.space = scales.spaces[scales.paths.index(last)]
        below = [(f"{group}/{one}".lstrip("/"), space) for one, space in zip(scales.paths, scales.spaces, strict=True)]
        found = [(one, nodes[one], space) for one, space in below if one in nodes]
        volume.scales = tuple(Inside(one, node.shape, str(node.dtype), space) for one, node, space in found)
        volume.ome = "0.5" if "ome" in nodes[group].attributes else "0.4"
    volume.arrays = tuple(Inside(one, *(shape, str(dtype))) for one, (shape, dtype) in arrays.items())
    return volume
