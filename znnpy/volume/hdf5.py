"""HDF5 volumes: found, checked and read box by box, with little memory of their own."""

from __future__ import annotations

import errno
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.planner.memory import READER_BYTES
from znnpy.volume.volume import Volume, pick

CACHE_BYTES = 8 * 2**20  # decompressed chunks HDF5 keeps
SLOTS = 1009  # of the cache's hash table: prime, and more than the chunks that fit


class Hdf5Volume(Volume):
    """One dataset of an HDF5 file, (z, y, x) or (c, z, y, x). Made by `open_volume`."""

    def __init__(self, file: h5py.File, dataset: h5py.Dataset, path: Path, name: str) -> None:
        super().__init__(path, name, dataset.shape, dataset.dtype)
        self._file = file
        self._voxels = dataset

    def close(self) -> None:
        self._file.close()

    @property
    def extra_bytes(self) -> int:
        """A filtered chunk larger than the cache is unpacked whole, beside its packed form, for every read."""
        if self._voxels.chunks is None or self._voxels.id.get_create_plist().get_nfilters() == 0:
            return 0  # read in place, however large
        chunk: int = prod(self._voxels.chunks) * self.dtype.itemsize
        return max(0, CACHE_BYTES + 2 * chunk - READER_BYTES)

    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        where = (slice(None), *box.slices) if self.has_channel_axis else box.slices
        try:
            self._voxels.read_direct(out if self.has_channel_axis else out[0], where)
        except OSError as error:
            raise VolumeError(
                f"{self} cannot be read at (z, y, x) = {box.lo} to {box.hi}: {_cause(error)}; "
                "the file is damaged or was changed meanwhile: check it with h5dump or copy it again"
            ) from None

    def stored(self) -> tuple[int, int]:
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns


def open_volume(path: Path, dataset: str | None = None) -> Hdf5Volume:
    """The dataset `dataset` of the file, or the only 3D or 4D numeric one in any of its groups; reads only headers.

    VolumeError: missing, not HDF5, cut short, locked, no such dataset, several datasets, a type or shape that is no
    volume, a missing filter plugin.
    """
    file = _open(path)
    try:
        if dataset is not None and isinstance(file.get(dataset), h5py.Dataset):  # links too, which no list holds
            name = dataset.strip("/")
        else:
            name = pick(_datasets(file), dataset, path)
        volume = Hdf5Volume(file, file[name], path, name)
        _check_filters(volume, file[name])
        _check_sources(volume, file[name])
    except BaseException:
        file.close()
        raise
    return volume


def _open(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r", rdcc_nbytes=CACHE_BYTES, rdcc_nslots=SLOTS)
    except FileNotFoundError:
        raise VolumeError(f"there is no file {path}; check the path") from None
    except IsADirectoryError:
        raise VolumeError(f"{path} is a folder, not an HDF5 file; name the file inside it") from None
    except OSError as error:
        raise VolumeError(f"{path} {_why_closed(path, error)}") from None


def _why_closed(path: Path, error: OSError) -> str:
    if "unable to lock file" in str(error):
        return (
            f"is locked: another program has it open for writing (errno {error.errno}); close that program, or set "
            "HDF5_USE_FILE_LOCKING=FALSE if you know that it does not write"
        )
    if error.errno == errno.EACCES:
        return "may not be read by this user (Permission denied); change its permissions"
    size = path.stat().st_size
    if "truncated file" in str(error):
        stored = str(error).rpartition("stored_eof = ")[2].rstrip(")")
        return f"is cut short: {size} bytes of the {stored} its header promises; copy it again"
    if "signature not found" in str(error):
        return f"is not an HDF5 file ({size} bytes without its signature); convert it to HDF5, .zarr or .npy"
    return f"cannot be opened as HDF5: {_cause(error)}; copy it again"


def _datasets(file: h5py.File) -> dict[str, tuple[tuple[int, ...] | None, np.dtype[Any]]]:
    """Name, shape and dtype of every dataset in the file, groups searched."""
    found: dict[str, tuple[tuple[int, ...] | None, np.dtype[Any]]] = {}

    def look(name: str, item: h5py.Group | h5py.Dataset) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = (item.shape, item.dtype)

    file.visititems(look)
    return found


def _check_filters(volume: Hdf5Volume, dataset: h5py.Dataset) -> None:
    """Compressed data need their filter; hdf5plugin brings most, once it is imported."""
    made = dataset.id.get_create_plist()
    missing = [f for f in map(made.get_filter, range(made.get_nfilters())) if not h5py.h5z.filter_avail(f[0])]
    if missing and find_spec("hdf5plugin"):
        import_module("hdf5plugin")
        missing = [f for f in missing if not h5py.h5z.filter_avail(f[0])]
    if missing:
        code, name = missing[0][0], missing[0][3].decode(errors="replace").partition(";")[0]
        raise VolumeError(
            f"{volume} is compressed with HDF5 filter {code} ({name or 'unnamed'}), which is not installed here; "
            "`pip install hdf5plugin` brings the usual ones"
        )


def _check_sources(volume: Hdf5Volume, dataset: h5py.Dataset) -> None:
    """A virtual dataset whose files are missing reads as zeros without a word; here it is refused."""
    if not dataset.is_virtual:
        return
    names = {source.file_name for source in dataset.virtual_sources()} - {"."}
    folders = (Path(), volume.path.parent)
    plain = [name for name in names if "%" not in name]  # others stand for as many files as there are
    missing = sorted(name for name in plain if not any((folder / name).exists() for folder in folders))
    if missing:
        raise VolumeError(
            f"{volume} is made of {len(names)} other files, of which {len(missing)} are missing, the first "
            f"{missing[0]}; put them beside {volume.path.name}"
        )


def _cause(error: OSError) -> str:
    """The library's words without its `[Errno ..] Unable to synchronously open file (...)` around them."""
    return str(error).partition("(")[2].removesuffix(")") or str(error)
