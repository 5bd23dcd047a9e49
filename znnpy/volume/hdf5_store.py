"""HDF5 outputs: the library creates the file once, and chunks are then written at their addresses.

HDF5 lays out every chunk when the file is created (early allocation, no compression, no fill) and closes it. From then
on the structure of the file never changes, and voxels are written to their addresses with plain system calls. So a
killed process, a full disk or a power cut never leaves a file that does not open, no cache delays what was written, and
other programs may open the file and read what is finished.

The planes of a chunk follow each other in the file, so only the planes that a box touches are written, and a plane is
read first only where the box covers it in part. A few threads write the chunks of one box, each with its own buffer.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from znnpy.errors import OutputError
from znnpy.files import is_still, open_regular, reopen
from znnpy.patches import Box
from znnpy.shapes import Vec3, add, ceil_divide, multiply, subtract
from znnpy.volume.store import DAMAGED, Store, check_stored, chunk_of, chunks_of, damaged

DATASET = "prediction"
OUTPUTS = "outputs"  # group with a dataset for each output node of a graph that has several
OUTPUTS_ATTRIBUTE = "outputs"  # which maps belong to which of them, JSON
PAGE = 4096  # bytes: chunks are aligned to pages
THREADS = 2  # number of writing threads; plans set aside memory for a chunk of each, WRITER_BYTES
THREAD_BYTES = 2**20  # part of a box for each thread: written in 0.5 ms (`writing-xeon-2cores-2026-11-22.json`)


class Hdf5Store(Store):
    """An HDF5 file with the dataset `prediction`: (c, z, y, x), or (z, y, x) where c is 1."""

    def __init__(self, path: Path, shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> None:
        self._size: Vec3 = (shape[1], shape[2], shape[3])
        self._chunk = chunk_of(self._size)
        self._buffers = [
            np.empty(self._chunk, dtype) for _ in range(THREADS)
        ]  # they take no memory until they are used
        self._path = path
        self._file = reopen(path)
        try:
            self._addresses = _addresses(path, self._file, shape, dtype)
        except BaseException:
            self._file.close()
            raise

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
        newest = "v110" if OUTPUTS_ATTRIBUTE in attributes else "v108"  # views of datasets came with v110
        # All programs read format v108, and it allows attributes above 64 KiB, which plans need.
        with h5py.File(path, "x", libver=("v108", newest), alignment_threshold=PAGE, alignment_interval=PAGE) as file:
            made = os.fstat(file.id.get_vfd_handle())
            space = h5py.h5s.create_simple(stored)
            kind = h5py.h5t.py_create(dtype, logical=True)
            h5py.h5d.create(file.id, DATASET.encode(), kind, space, dcpl=layout)
            file[DATASET].attrs.update(attributes)
            _add_outputs(file, attributes.get(OUTPUTS_ATTRIBUTE), dtype)
        with reopen(path) as written:
            _check_same(path, os.fstat(written.fileno()), made)
            os.fsync(written.fileno())

    @staticmethod
    def attributes_of(path: Path) -> dict[str, Any]:
        try:
            with open_regular(path) as there, h5py.File(path, "r") as file:
                _check_same(path, os.fstat(there.fileno()), os.fstat(file.id.get_vfd_handle()))
                return dict(_dataset(file).attrs)
        except DAMAGED:
            return {}

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
            except BaseException as error:  # the calling thread raises it, whatever it is
                errors.append(error)
                left.clear()

        own, *others = self._buffers[: -(-voxels.nbytes // THREAD_BYTES)]
        # Daemons: a write that never returns must not keep a process from ending.
        threads = [threading.Thread(target=write, args=(other,), name="znnpy-chunks", daemon=True) for other in others]
        try:
            for thread in threads:
                with suppress(RuntimeError):  # too many threads: this one writes everything
                    thread.start()
            self._write_chunks(left, box, voxels, own)
            _wait_for(threads)
        finally:
            left.clear()  # after a failure or an interrupt the other threads stop
            _wait_for(threads)
        if errors:
            raise errors.pop()

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def is_still_there(self) -> bool:
        return is_still(self._path, self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _write_chunks(
        self, left: deque[tuple[Vec3, int]], box: Box, voxels: npt.NDArray[Any], buffer: npt.NDArray[Any]
    ) -> None:
        """Take chunks until none is left, and write the part of each that `box` covers."""
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
        rest = planes.data.cast("B")
        while rest:
            count = os.preadv(self._file.fileno(), [rest], address)
            if not count:
                raise OSError(f"{self._path} ends at byte {address}: another program cut it short")
            rest, address = rest[count:], address + count

    def _write(self, planes: npt.NDArray[Any], address: int) -> None:
        rest = planes.data.cast("B")
        while rest:
            count = os.pwrite(self._file.fileno(), rest, address)
            rest, address = rest[count:], address + count


def _wait_for(threads: Iterable[threading.Thread]) -> None:
    """Wait until the threads that were started have ended."""
    for thread in threads:
        if thread.ident is not None:
            thread.join()


def _taken(left: deque[tuple[Vec3, int]]) -> Iterator[tuple[Vec3, int]]:
    """Yield what is left, one by one; other threads may take from it too."""
    while True:
        try:
            yield left.popleft()
        except IndexError:
            return


def _addresses(
    path: Path, opened: FileIO, shape: tuple[int, int, int, int], dtype: np.dtype[Any]
) -> npt.NDArray[np.int64]:
    """Return the byte in the file `opened` where each chunk begins: (c, chunks along z, y, x) int64."""
    chunk = chunk_of((shape[1], shape[2], shape[3]))
    try:
        with h5py.File(path, "r") as file:
            _check_same(path, os.fstat(opened.fileno()), os.fstat(file.id.get_vfd_handle()))
            dataset = _dataset(file)
            check_stored(path, dataset.shape, dataset.dtype, shape, dtype)
            if (
                dataset.chunks != (chunk if shape[0] == 1 else (1, *chunk))
                or dataset.id.get_create_plist().get_nfilters()
            ):
                raise ValueError(f"its chunks are {dataset.chunks}, and not plain ones of {chunk}")
            return _chunk_addresses(dataset, chunk, os.fstat(opened.fileno()).st_size)
    except OutputError:
        raise
    except DAMAGED as error:
        raise damaged(path, error) from error


def _chunk_addresses(dataset: h5py.Dataset, chunk: Vec3, file_bytes: int) -> npt.NDArray[np.int64]:
    """Return the byte where each chunk begins; ValueError if one is outside the file or overlaps another."""
    shape = (1,) * (4 - dataset.ndim) + dataset.shape
    addresses = np.full((shape[0], *ceil_divide((shape[1], shape[2], shape[3]), chunk)), -1, np.int64)

    def note(info: Any) -> None:
        at = info.chunk_offset
        index = (at[0] if len(at) == 4 else 0, *(o // c for o, c in zip(at[-3:], chunk, strict=True)))
        addresses[index] = info.byte_offset

    dataset.id.chunk_iter(note)
    chunk_bytes = prod(chunk) * dataset.dtype.itemsize
    begins = np.sort(addresses, axis=None)
    ends = np.append(begins[1:], file_bytes)
    if begins[0] < 0 or (ends - begins < chunk_bytes).any():
        raise ValueError(f"chunks of {chunk_bytes} bytes are missing, overlap, or lie beyond the end")
    return addresses


def _dataset(file: h5py.File) -> h5py.Dataset:
    """Return the prediction stored in the file itself; ValueError where there is none, or a link to another file."""
    link = file.get(DATASET, getlink=True)
    dataset = file.get(DATASET) if isinstance(link, h5py.HardLink) else None
    if not isinstance(dataset, h5py.Dataset) or dataset.is_virtual or dataset.external:
        raise ValueError(f"it holds no dataset {DATASET} of its own")
    return dataset


def _check_same(path: Path, one: os.stat_result, other: os.stat_result) -> None:
    """Raise OSError unless both are one file: the library that opens `path` may find another file there."""
    if not os.path.samestat(one, other):
        raise OSError(f"{path} was replaced by another file while it was being opened")


def _add_outputs(file: h5py.File, maps_by_name: str | None, dtype: np.dtype[Any]) -> None:
    """Add a dataset for each output of a graph with several: a view of its maps in the prediction, not a copy."""
    if maps_by_name is None:
        return
    whole = file[DATASET]
    for name, (first, end) in json.loads(maps_by_name).items():
        layout = h5py.VirtualLayout((end - first, *whole.shape[1:]), dtype)
        layout[:] = h5py.VirtualSource(whole)[first:end]
        where = f"{OUTPUTS}/{name.replace('/', '_').replace('.', '_')}"
        while where in file:
            where += "_"
        file.create_virtual_dataset(where, layout)
