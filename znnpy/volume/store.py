"""Where an output's voxels go. The HDF5 file is made once by the library, then written chunk by chunk beside it.

HDF5 lays out every chunk when the file is created (early allocation, no compression, no fill) and closes it; from then
on the file's structure never changes, and voxels go to their addresses with plain writes. So there is no moment at
which a killed process, a full disk or a power cut leaves a file that does not open, no cache whose bytes are neither
here nor there, and other programs may open the file and look at what is finished.

The planes of a chunk lie one behind the other, so only those that a box touches are written; they are read before only
where the box covers them in part. A few threads write the chunks of one box, each with a buffer of its own.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from znnpy.errors import OutputError
from znnpy.patches import Box
from znnpy.shapes import Vec3, add, ceil_divide, multiply, subtract

HDF5_SUFFIXES = (".h5", ".hdf5", ".hdf")
DATASET = "prediction"
CHUNK = 64  # most voxels along each axis: 1 MiB of float32
PAGE = 4096  # bytes: chunks stand on pages
THREADS = 2  # that write; a chunk of memory each is part of what plans set aside, WRITER_BYTES
THREAD_BYTES = 2**20  # of a box for each of them: it is written in 0.5 ms (`writing-xeon-2cores-2026-11-22.json`)


class Store(ABC):
    """A file or folder of the output's full size: voxels (c, z, y, x) written box by box."""

    @abstractmethod
    def __init__(self, path: Path, shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> None:
        """Open what `create` made. OutputError when it is another shape or type."""

    @staticmethod
    @abstractmethod
    def create(
        path: Path, shape: tuple[int, int, int, int], dtype: np.dtype[Any], attributes: Mapping[str, Any]
    ) -> None:
        """Make it, with attributes (texts, numbers, arrays) on the prediction; on disk on return."""

    @staticmethod
    @abstractmethod
    def attributes_of(path: Path) -> dict[str, Any]:
        """Attributes of the prediction at `path`; none when it is no such file."""

    @abstractmethod
    def write(self, box: Box, voxels: npt.NDArray[Any]) -> None:
        """Write voxels (c, *box.size) of the store's dtype, any strides; OSError when the system refuses."""

    @abstractmethod
    def sync(self) -> None:
        """Return once everything written is on disk."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file; more than once is fine."""


def store_for(path: Path) -> type[Store]:
    """How outputs of this name are stored, by suffix. OutputError for others, MissingExtraError without zarr."""
    if path.suffix == ".zarr":
        from znnpy.volume.zarr import ZarrStore

        return ZarrStore
    if path.suffix not in HDF5_SUFFIXES:
        raise OutputError(
            f"the output {path} has suffix {path.suffix!r}, and only {', '.join(HDF5_SUFFIXES)} and .zarr are written; "
            "give one of these in --out"
        )
    return Hdf5Store


def chunk_of(size: Vec3) -> Vec3:
    """Chunk size of an output of this size: at most CHUNK along each axis, and little left over in the last chunk."""
    chunks = ceil_divide(size, (CHUNK, CHUNK, CHUNK))
    return ceil_divide(size, chunks)


def stored_bytes(shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> int:
    """Bytes of all chunks of an output (c, z, y, x), those at its end as large as any."""
    size = (shape[1], shape[2], shape[3])
    chunk = chunk_of(size)
    return shape[0] * prod(multiply(ceil_divide(size, chunk), chunk)) * dtype.itemsize


class Hdf5Store(Store):
    """Dataset `prediction`: (c, z, y, x), or (z, y, x) where c is 1."""

    def __init__(self, path: Path, shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> None:
        self._size: Vec3 = (shape[1], shape[2], shape[3])
        self._chunk = chunk_of(self._size)
        self._addresses = _addresses(path, shape, dtype)
        self._buffers = [np.empty(self._chunk, dtype) for _ in range(THREADS)]  # untouched, they take no memory
        self._file = path.open("r+b", buffering=0)

    @staticmethod
    def create(
        path: Path, shape: tuple[int, int, int, int], dtype: np.dtype[Any], attributes: Mapping[str, Any]
    ) -> None:
        stored = shape if shape[0] > 1 else shape[1:]
        chunk = chunk_of((shape[1], shape[2], shape[3]))
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_chunk(chunk if shape[0] == 1 else (1, *chunk))
        layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        # v108: understood everywhere, and attributes may pass 64 KiB (plans do).
        with h5py.File(path, "w", libver=("v108", "v108"), alignment_threshold=PAGE, alignment_interval=PAGE) as file:
            space = h5py.h5s.create_simple(stored)
            kind = h5py.h5t.py_create(dtype, logical=True)
            h5py.h5d.create(file.id, DATASET.encode(), kind, space, dcpl=layout)
            file[DATASET].attrs.update(attributes)
        with path.open("r+b") as written:
            os.fsync(written.fileno())

    @staticmethod
    def attributes_of(path: Path) -> dict[str, Any]:
        if not h5py.is_hdf5(path):
            return {}
        with h5py.File(path, "r") as file:
            return dict(file[DATASET].attrs) if isinstance(file.get(DATASET), h5py.Dataset) else {}

    def write(self, box: Box, voxels: npt.NDArray[Any]) -> None:
        dtype = self._buffers[0].dtype
        if voxels.shape[1:] != box.size or voxels.dtype != dtype:
            raise ValueError(f"{voxels.dtype} {voxels.shape} does not fill {box} of {dtype}")
        if not voxels.size:
            return
        left = deque(product(chunks_of(box, self._chunk), range(len(voxels))))
        errors: list[BaseException] = []

        def write(buffer: npt.NDArray[Any]) -> None:
            try:
                self._write_chunks(left, box, voxels, buffer)
            except BaseException as error:  # whatever it is, the calling thread raises it
                errors.append(error)
                left.clear()

        own, *others = self._buffers[: -(-voxels.nbytes // THREAD_BYTES)]
        # Daemons: a write that never returns must not keep a process from ending.
        threads = [threading.Thread(target=write, args=(other,), name="znnpy-chunks", daemon=True) for other in others]
        try:
            for thread in threads:
                with suppress(RuntimeError):  # there are too many: this one writes it all
                    thread.start()
            self._write_chunks(left, box, voxels, own)
            _wait_for(threads)
        finally:
            left.clear()  # after a failure, or an interrupt: nobody writes on
            _wait_for(threads)
        if errors:
            raise errors.pop()

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _write_chunks(
        self, left: deque[tuple[Vec3, int]], box: Box, voxels: npt.NDArray[Any], buffer: npt.NDArray[Any]
    ) -> None:
        """Take chunks until none is left, and write what `box` covers of each."""
        for index, channel in _taken(left):
            lo = multiply(index, self._chunk)
            chunk = Box(lo, add(lo, self._chunk))
            used = chunk.clipped(Box((0, 0, 0), self._size))
            part = box.clipped(chunk)
            here = part.shifted(subtract((0, 0, 0), lo))
            there = part.shifted(subtract((0, 0, 0), box.lo))
            planes = buffer[here.slices[0]]
            address = int(self._addresses[(channel, *index)]) + here.lo[0] * buffer[0].nbytes
            if part.size[1:] != used.size[1:]:
                self._read(planes, address)
            buffer[here.slices] = voxels[channel][there.slices]
            self._write(planes, address)

    def _read(self, planes: npt.NDArray[Any], address: int) -> None:
        room = planes.data.cast("B")
        while room:
            count = os.preadv(self._file.fileno(), [room], address)
            if not count:
                raise OSError(f"{self._file.name} ends at byte {address}: something else cut it short")
            room, address = room[count:], address + count

    def _write(self, planes: npt.NDArray[Any], address: int) -> None:
        rest = planes.data.cast("B")
        while rest:
            count = os.pwrite(self._file.fileno(), rest, address)
            rest, address = rest[count:], address + count


def _wait_for(threads: Iterable[threading.Thread]) -> None:
    """Until those that began have ended."""
    for thread in threads:
        if thread.ident is not None:
            thread.join()


def _taken(left: deque[tuple[Vec3, int]]) -> Iterator[tuple[Vec3, int]]:
    """What is left, one by one; other threads may take from it too."""
    while True:
        try:
            yield left.popleft()
        except IndexError:
            return


def _addresses(path: Path, shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> npt.NDArray[np.int64]:
    """Byte in the file where each chunk begins: (c, chunks along z, y, x) int64."""
    size = (shape[1], shape[2], shape[3])
    chunk = chunk_of(size)
    addresses = np.full((shape[0], *ceil_divide(size, chunk)), -1, np.int64)
    with h5py.File(path, "r") as file:
        dataset = file[DATASET]
        stored = (1,) * (4 - dataset.ndim) + dataset.shape
        if stored != shape or dataset.dtype != dtype or dataset.chunks[-3:] != chunk:
            raise OutputError(
                f"{path} holds {stored} {dataset.dtype}, and this run writes {shape} {dtype}; "
                "start again with --overwrite"
            )

        def note(info: Any) -> None:
            at = info.chunk_offset
            index = (at[0] if len(at) == 4 else 0, *(o // c for o, c in zip(at[-3:], chunk, strict=True)))
            addresses[index] = info.byte_offset

        dataset.id.chunk_iter(note)
    if (addresses < 0).any():
        raise OutputError(f"{path} lacks {(addresses < 0).sum()} of {addresses.size} chunks; start with --overwrite")
    return addresses


def chunks_of(box: Box, chunk: Vec3) -> Iterator[Vec3]:
    """Indices of the chunks that a box touches."""
    z, y, x = (range(lo // c, -(-hi // c)) for lo, c, hi in zip(box.lo, chunk, box.hi, strict=True))
    yield from product(z, y, x)
