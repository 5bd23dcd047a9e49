"""HDF5 outputs: the library creates the file once, and chunks are then written at their addresses.

HDF5 lays out every chunk when the file is created (early allocation, no compression, no fill) and closes it. From then
on the structure of the file never changes, and voxels are written to their addresses with plain system calls. So a
killed process, a full disk or a power cut never leaves a file that does not open, no cache delays what was written, and
other programs may open the file and read what is finished.

The planes of a chunk follow each other in the file, so only the planes that a box touches are written, and a plane is
read first only where the box covers it in part. A few threads write the chunks of one box, each with its own buffer.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
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
from znnpy.messages import option
from znnpy.patches import Box
from znnpy.shapes import Vec3, add, ceil_divide, multiply, subtract
from znnpy.volume.output_names import OUTPUTS
from znnpy.volume.space_units import say_turned
from znnpy.volume.store import DAMAGED, OutputArray, Storage, Store, check_filled, check_stored, chunks_of, damaged

DATASET = "prediction"  # the only array of an output
PAGE = 4096  # bytes: chunks are aligned to pages
THREADS = 2  # number of writing threads; plans set aside memory for a chunk of each, WRITER_BYTES
THREAD_BYTES = 2**20  # part of a box for each thread: written in 0.5 ms (`writing-xeon-2cores-2026-11-22.json`)


class Hdf5Store(Store):
    """An HDF5 file with the dataset `prediction`, or one for each array: (c, z, y, x), or (z, y, x) where c is 1."""

    def __init__(
        self, path: Path, arrays: Sequence[OutputArray], dtype: np.dtype[Any], storage: Storage | None = None
    ) -> None:
        self._arrays, self._dtype = arrays, dtype
        most = max(prod(array.chunk) for array in arrays)
        self._buffers = [np.empty(most, dtype) for _ in range(THREADS)]  # they take no memory until they are used
        self._path = path
        self._file = reopen(path)
        try:
            self._addresses = _addresses(path, self._file, arrays, dtype)
        except BaseException:
            self._file.close()
            raise

    @classmethod
    def check(cls, dtype: np.dtype[Any], storage: Storage) -> None:
        for asked, word in ((storage.multiscale, "multiscale"), (storage.sharded, "sharded")):
            if asked:
                what = "coarser levels" if word == "multiscale" else "shards"
                raise OutputError(
                    f"HDF5 outputs have no {what}; leave out {option(word)}, or give a name that ends with .zarr in "
                    f"{option('out')}"
                )

    @classmethod
    def create(
        cls,
        path: Path,
        arrays: Sequence[OutputArray],
        dtype: np.dtype[Any],
        attributes: Mapping[str, Any],
        storage: Storage | None = None,
    ) -> None:
        kind = h5py.h5t.py_create(dtype, logical=True)
        # All programs read format v108, and it allows attributes above 64 KiB, which plans need.
        with h5py.File(path, "x", libver=("v108", "v108"), alignment_threshold=PAGE, alignment_interval=PAGE) as file:
            made = os.fstat(file.id.get_vfd_handle())
            for array in arrays:
                layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                layout.set_chunk(array.stored_chunk)
                layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
                layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
                name, space = array.name or DATASET, h5py.h5s.create_simple(array.stored_shape)
                file.require_group(name.rpartition("/")[0] or "/")
                h5py.h5d.create(file.id, name.encode(), kind, space, dcpl=layout)
                file[name].attrs.update(
                    array.attributes if array.space is None else {**array.attributes, **array.space.attributes()}
                )
            (file if arrays[0].name else file[DATASET]).attrs.update(attributes)
        with reopen(path) as written:
            _check_same(path, os.fstat(written.fileno()), made)
            os.fsync(written.fileno())
        say_turned((array.space for array in arrays), "HDF5")

    @classmethod
    def dataset_of(cls, path: Path, name: str) -> str | None:
        return name or DATASET

    @classmethod
    def attributes_of(cls, path: Path, name: str = "") -> dict[str, Any]:
        try:
            with open_regular(path) as there, h5py.File(path, "r") as file:
                _check_same(path, os.fstat(there.fileno()), os.fstat(file.id.get_vfd_handle()))
                if not name and OUTPUTS in file and DATASET not in file:
                    return dict(file.attrs)
                return dict(_dataset(file, name or DATASET).attrs)
        except DAMAGED:
            return {}

    def write(self, box: Box, voxels: npt.NDArray[Any], number: int = 0) -> None:
        check_filled(box, voxels, self._dtype)
        if not voxels.size:
            return
        left = deque(product(chunks_of(box, self._arrays[number].chunk), range(len(voxels))))
        errors: list[BaseException] = []

        def write(buffer: npt.NDArray[Any]) -> None:
            try:
                self._write_chunks(left, box, voxels, number, buffer)
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
            self._write_chunks(left, box, voxels, number, own)
            _wait_for(threads)
        finally:
            left.clear()  # after a failure or an interrupt the other threads stop
            _wait_for(threads)
        if errors:
            raise errors.pop()

    def read(self, box: Box, number: int = 0) -> npt.NDArray[Any]:
        array = self._arrays[number]
        with h5py.File(self._path, "r") as file:
            found: npt.NDArray[Any] = _dataset(file, array.name or DATASET)[(..., *box.slices)]
        return found.reshape(array.shape[0], *box.size)

    def limit(self, budget: int) -> None:
        """Do nothing: voxels are written as they come."""

    def flush(self, serials: Set[int] | None = None) -> None:
        """Do nothing: voxels are written as they come."""

    def write_coarser(self) -> None:
        """Do nothing: `check` refuses to have coarser levels."""

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def is_still_there(self) -> bool:
        return is_still(self._path, self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _write_chunks(
        self, left: deque[tuple[Vec3, int]], box: Box, voxels: npt.NDArray[Any], number: int, buffer: npt.NDArray[Any]
    ) -> None:
        """Take chunks until none is left, and write the part of each that `box` covers."""
        size, each = self._arrays[number].size, self._arrays[number].chunk
        buffer = buffer[: prod(each)].reshape(each)
        for index, channel in _taken(left):
            lo = multiply(index, each)
            chunk = Box(lo, add(lo, each))
            used = chunk.clipped(Box((0, 0, 0), size))
            part = box.clipped(chunk)
            here = part.shifted(subtract((0, 0, 0), lo))
            there = part.shifted(subtract((0, 0, 0), box.lo))
            planes = buffer[here.slices[0]]
            address = int(self._addresses[number][(channel, *index)]) + here.lo[0] * buffer[0].nbytes
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
    path: Path, opened: FileIO, arrays: Sequence[OutputArray], dtype: np.dtype[Any]
) -> list[npt.NDArray[np.int64]]:
    """Return the byte in the file `opened` where each chunk of each array begins: (c, chunks along z, y, x) int64."""
    found = []
    try:
        with h5py.File(path, "r") as file:
            _check_same(path, os.fstat(opened.fileno()), os.fstat(file.id.get_vfd_handle()))
            for array in arrays:
                dataset = _dataset(file, array.name or DATASET)
                check_stored(path, dataset.shape, dataset.dtype, array, dtype)
                if dataset.chunks != array.stored_chunk or dataset.id.get_create_plist().get_nfilters():
                    raise ValueError(f"its chunks are {dataset.chunks}, and not plain ones of {array.chunk}")
                found.append(_chunk_addresses(dataset, array.chunk))
            _check_apart(arrays, found, dtype, os.fstat(opened.fileno()).st_size)
    except OutputError:
        raise
    except DAMAGED as error:
        raise damaged(path, error) from error
    return found


def _chunk_addresses(dataset: h5py.Dataset, chunk: Vec3) -> npt.NDArray[np.int64]:
    """Return the byte where each chunk begins, -1 where one is missing."""
    shape = (1,) * (4 - dataset.ndim) + dataset.shape
    addresses = np.full((shape[0], *ceil_divide((shape[1], shape[2], shape[3]), chunk)), -1, np.int64)

    def note(info: Any) -> None:
        at = info.chunk_offset
        index = (at[0] if len(at) == 4 else 0, *(o // c for o, c in zip(at[-3:], chunk, strict=True)))
        addresses[index] = info.byte_offset

    dataset.id.chunk_iter(note)
    return addresses


def _check_apart(
    arrays: Sequence[OutputArray], addresses: Sequence[npt.NDArray[np.int64]], dtype: np.dtype[Any], file_bytes: int
) -> None:
    """Raise ValueError if a chunk is missing, lies outside the file, or overlaps another."""
    sizes = [prod(array.chunk) * dtype.itemsize for array in arrays]
    begins = np.concatenate([found.reshape(-1) for found in addresses])
    nbytes = np.repeat(sizes, [found.size for found in addresses])
    order = np.argsort(begins, kind="stable")
    ends = np.append(begins[order][1:], file_bytes)
    if begins.min() < 0 or (ends - begins[order] < nbytes[order]).any():
        many = " or ".join(map(str, sorted(set(sizes))))
        raise ValueError(f"chunks of {many} bytes are missing, overlap, or lie beyond the end")


def _dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """Return a dataset stored in the file itself; ValueError where there is none, or a link to another file."""
    group, _, _ = name.rpartition("/")
    links = [file.get(one, getlink=True) for one in (group, name) if one]
    dataset = file.get(name) if all(isinstance(link, h5py.HardLink) for link in links) else None
    if not isinstance(dataset, h5py.Dataset) or dataset.is_virtual or dataset.external:
        raise ValueError(f"it holds no dataset {name} of its own")
    return dataset


def _check_same(path: Path, one: os.stat_result, other: os.stat_result) -> None:
    """Raise OSError unless both are one file: the library that opens `path` may find another file there."""
    if not os.path.samestat(one, other):
        raise OSError(f"{path} was replaced by another file while it was being opened")
