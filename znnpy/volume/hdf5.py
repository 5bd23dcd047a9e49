"""HDF5 volumes: find and check a dataset, and read it box by box with little memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from math import ceil, prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError, ZnnpyError
from znnpy.extras import install
from znnpy.files import open_regular
from znnpy.geometry import vector
from znnpy.messages import excerpt, option
from znnpy.patches import Box
from znnpy.planner.memory import READER_BYTES
from znnpy.shapes import Vec3
from znnpy.volume.about import About, Inside
from znnpy.volume.base import Chunks, MissingVoxels, Reading, Volume, pick
from znnpy.volume.hdf5_compressed import CompressedChunks
from znnpy.volume.hdf5_links import (
    HDF5_ERRORS,
    INDEX_BYTES,
    MissingTargetError,
    all_datasets,
    dataset_named,
    open_shared,
    shown,
)
from znnpy.volume.hdf5_sources import Missing, Sources, Stored, fills
from znnpy.volume.hdf5_space import space_of
from znnpy.volume.location import Location
from znnpy.volume.regions import Region, pieces

MIB = 2**20
CACHE_BYTES = 8 * MIB  # unpacked chunks that HDF5 keeps; a single larger chunk is kept too
SLOTS = 1009  # size of the cache's hash table: a prime, and the largest number of chunks in the cache
PREEMPT = 0.75  # share of the cache that drops fully read chunks first; with 1.0 HDF5 keeps all of them
STEPS = 3  # copies of a chunk while it is unpacked: as stored, and before and after a filter
SPARE_BYTES = 4 * MIB  # records of chunks and files while they are read
AT_ONCE = 512  # chunks per read: HDF5 makes a record of some KiB for each
PIECE_BYTES = 4 * MIB  # bytes per read if its target is not contiguous in memory
FILE_BYTES = 2 * MIB  # memory that HDF5 takes for each further open file
OTHER_FILES = 256  # files that the process may have open besides the sources of a virtual dataset


class Hdf5Volume(Volume):
    """One dataset of an HDF5 file, (z, y, x) or (c, z, y, x), possibly after axes of length 1."""

    def __init__(
        self,
        file: h5py.h5f.FileID,
        dataset: h5py.h5d.DatasetID,
        path: Path,
        name: str,
        sources: Sources,
        missing_voxels: MissingVoxels,
    ) -> None:
        super().__init__(path, name, _shape(dataset), _dtype(dataset))
        made = dataset.get_create_plist()
        self._file, self._voxels, self._sources, self._missing_voxels = file, dataset, sources, missing_voxels
        self._own = None if made.get_layout() == h5py.h5d.VIRTUAL else Stored.of(dataset, made)
        self._packed = CompressedChunks(dataset, self._own, str(self)) if self._own else None
        self._missing: list[Region] = []
        self._chunks = Chunks()
        self._never_written: list[Missing] = []  # parts of a virtual dataset
        # Without a fill value HDF5 leaves the memory unchanged where a chunk is not stored.
        self._has_fill_value = fills(made)

    def leave_out(self, lost: Sequence[Missing]) -> None:
        """Fill missing regions instead of reading them; VolumeError if there is no value, or a region is not a box."""
        self._never_written = [one for one in lost if one.is_read]
        self._has_fill_value &= all(one.has_value for one in self._never_written)
        lost = [one for one in lost if not one.is_read]
        is_fillable = all(one.is_exact for one in lost)
        if lost and (self._missing_voxels.fill is None or not is_fillable):
            raise VolumeError(f"{self}: {_first(lost, is_fillable=is_fillable)}")
        if lost:
            self._missing_voxels.check_value(self)
        self._missing = [one.region for one in lost]

    def close(self) -> None:
        if self._file.valid:
            self._voxels.close()
            self._file.close()

    @property
    def files(self) -> Collection[Path]:
        return self._sources.files

    @property
    def chunk_size(self) -> Vec3:
        chunk = self._own.chunk if self._own else ()
        return vector(chunk[-3:] or (1, 1, 1))

    @property
    def chunks(self) -> Chunks:
        return self._chunks

    def about(self) -> About:
        made = self._voxels.get_create_plist()
        found = dict(all_datasets(self._file))
        inside = [Inside(shown(name), _shape(one) or (), str(_dtype(one))) for name, one in found.items()]
        files = len(self._sources.files) - 1
        return About(
            "HDF5" if self._own else "HDF5, a virtual dataset",
            compression=", ".join(_filters(made)),
            datasets=tuple(inside) if len(inside) > 1 else (),
            notes=(f"made of {files:,} other file{'s' if files != 1 else ''}",) if files else (),
        )

    def expect(self, box: Box) -> None:
        if self._own is None:
            self._expect_of_sources(self.stored_region(box))
            return
        try:
            self._chunks = _count(self._voxels, self._own, self.stored_region(box))
        except HDF5_ERRORS as error:
            raise self._damaged(box, error) from None
        if self._chunks.missing and not self._has_fill_value:
            raise VolumeError(
                f"{self}: {self._chunks.missing:,} of {self._chunks.looked:,} chunks were never written, and the "
                "dataset has no fill value to read instead; write it again"
            )
        if self._chunks.missing and self._missing_voxels.chunks == "error":
            raise VolumeError(
                f"{self}: {self._chunks.missing:,} of {self._chunks.looked:,} chunks were never written; write them, "
                f"or leave out {option('missing_chunks', 'error')} to read the fill value there"
            )

    def _expect_of_sources(self, box: Region) -> None:
        """Count the voxels of a virtual dataset that were never written; VolumeError if they are required."""
        found = [(one, part) for one in self._never_written if (part := one.region.clipped(box)).elements]
        missing = min(box.elements, sum(part.elements for _, part in found))
        self._chunks = Chunks(missing, box.elements, "voxels")
        said = f"{self}: {missing:,} of {box.elements:,} voxels were never written"
        if any(not one.has_value for one, _ in found):
            raise VolumeError(f"{said}, and they have no fill value to read instead; write the sources again")
        if found and self._missing_voxels.chunks == "error":
            one, part = found[0]
            raise VolumeError(
                f"{said}: {one.why} (z, y, x) = {part.lo[-3:]} to {tuple(hi - 1 for hi in part.hi[-3:])}; write them, "
                f"or leave out {option('missing_chunks', 'error')} to read the fill value there"
            )

    @property
    def extra_bytes(self) -> int:
        """Memory of HDF5 beyond READER_BYTES: its cache and index, chunks being unpacked, and source files."""
        stored = list(self._sources.stored.values())
        packed = max((one.packed_bytes for one in stored), default=0)
        files = 0 if self._own else len({key[:2] for key in self._sources.stored})
        cache = _cache_bytes(stored) * (1 if self._own else len(stored))
        return max(0, cache + STEPS * packed + INDEX_BYTES + files * FILE_BYTES + SPARE_BYTES - READER_BYTES)

    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        asked = self.stored_region(box)
        target = out.reshape(asked.shape)
        if not self._has_fill_value:
            target.fill(0)
        back = [-at for at in asked.lo]
        for hole in self._missing:
            target[hole.clipped(asked).shifted(back).slices] = self._missing_voxels.fill
        for part in asked.without(self._missing):
            for piece in self._pieces(part, whole=bool(target.flags.c_contiguous)):
                try:
                    self._read(piece, target, piece.shifted(back))
                except HDF5_ERRORS as error:
                    if isinstance(error, ZnnpyError):
                        raise
                    raise self._damaged(box, error) from None

    def _damaged(self, box: Box, error: Exception) -> VolumeError:
        return VolumeError(
            f"{self} cannot be read at (z, y, x) = {box.lo} to {box.hi}: {_cause(error)}; "
            "the file is damaged or was changed in the meantime: check it with h5dump or copy it again"
        )

    def _pieces(self, part: Region, *, whole: bool) -> Iterator[Region]:
        """Yield regions to read at once; `whole`: their target is contiguous, so no copy is needed."""
        few = PIECE_BYTES // self.dtype.itemsize
        if self._own and self._own.chunk:
            most = part.elements if whole else few
            for piece in pieces(part, self._own.chunk, elements=most, chunks=AT_ONCE):
                yield from (
                    (piece,) if whole else pieces(piece, (1,) * len(self.arranged.stored), elements=few, chunks=few)
                )
            return
        of_sources = [AT_ONCE * prod(one.chunk) for one in self._sources.stored.values() if one.chunk]
        most = min([part.elements if whole else few, *of_sources])
        yield from pieces(part, (1,) * len(self.arranged.stored), elements=most, chunks=most)

    def _read(self, piece: Region, target: npt.NDArray[Any], there: Region) -> None:
        """Read `piece` of the dataset into `there` of `target`."""
        if self._packed:
            self._packed.check(piece)
        space = self._voxels.get_space()
        space.select_hyperslab(piece.lo, piece.shape)
        if target.flags.c_contiguous:
            memory = h5py.h5s.create_simple(target.shape)
            memory.select_hyperslab(there.lo, there.shape)
            self._voxels.read(memory, space, target)
        else:
            voxels = np.empty(piece.shape, self.dtype)
            self._voxels.read(h5py.h5s.create_simple(piece.shape), space, voxels)
            target[there.slices] = voxels

    def stored(self) -> tuple[int, int]:
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns


def open_volume(location: Location, reading: Reading) -> Hdf5Volume:
    """Open a dataset of a file: the named one, or the only 3D or 4D numeric one in any group. Only headers are read.

    VolumeError: the file is missing, not HDF5, cut short or locked; there is no such dataset, or several; type or shape
    are not those of a volume; a filter plugin, a source of a virtual dataset or an external file is missing.
    """
    path = location.path
    reading.check_single(path, dataset=False)
    reading.check_one_time(path)
    file = _open(path)
    try:
        sources = Sources()
        name, found = _chosen(file, reading.dataset, path, sources)
        lost = sources.missing(found, path)
        _check_files(sources, path)
        found = _with_cache(found, sources)
        volume = Hdf5Volume(file, found, path, name, sources, reading.missing)
        volume.leave_out(lost)
        volume.space = space_of(found, str(volume))
        _check_filters(volume, found.get_create_plist())
    except HDF5_ERRORS as error:
        file.close()
        if isinstance(error, ZnnpyError):
            raise
        raise VolumeError(f"{path} cannot be read as HDF5: {excerpt(error)}; it is damaged: copy it again") from None
    except BaseException:
        file.close()
        raise
    return volume


def _open(path: Path) -> h5py.h5f.FileID:
    try:
        with open_regular(path) as opened:
            size = os.fstat(opened.fileno()).st_size
    except FileNotFoundError:
        raise VolumeError(f"there is no file {path}; check the path") from None
    except IsADirectoryError:
        raise VolumeError(f"{path} is a folder, not an HDF5 file; name the file inside it") from None
    except PermissionError as error:
        raise VolumeError(f"{path} may not be read by this user ({error.strerror}); change its permissions") from None
    except (OSError, ValueError) as error:
        raise VolumeError(f"{path} cannot be read: {getattr(error, 'strerror', error)}; give an HDF5 file") from None
    try:
        return open_shared(path)
    except HDF5_ERRORS as error:
        raise VolumeError(f"{path} {_why_closed(size, error)}") from None


def _why_closed(size: int, error: Exception) -> str:
    """Return why HDF5 does not open a file of `size` bytes, as the end of a sentence that begins with its name."""
    if "unable to lock file" in str(error):
        return (
            f"is locked: another program has it open for writing (errno {getattr(error, 'errno', '')}); close that "
            "program, or set HDF5_USE_FILE_LOCKING=FALSE if you know that it does not write"
        )
    if "truncated file" in str(error):
        stored = str(error).rpartition("stored_eof = ")[2].rstrip(")")
        return f"is cut short: {size} bytes of the {excerpt(stored, 40)} its header promises; copy it again"
    if "signature not found" in str(error):
        return f"is not an HDF5 file ({size} bytes without its signature); convert it to HDF5, .zarr or .npy"
    return f"cannot be opened as HDF5: {_cause(error)}; copy it again"


def _chosen(file: h5py.h5f.FileID, dataset: str | None, path: Path, sources: Sources) -> tuple[str, h5py.h5d.DatasetID]:
    """Return name and dataset of the volume: the one asked for, or else the only one in the file."""
    if dataset is not None:
        try:
            found = dataset_named(file, os.fsencode(dataset), path, sources.files)  # links are not listed
        except MissingTargetError as missing:
            raise VolumeError(f"{path}: {missing}; put it there, or name another {option('dataset')}") from None
        if found is not None:
            return shown(os.fsencode(dataset)).strip("/"), found
    every = dict(all_datasets(file))
    kinds: dict[str, tuple[tuple[int, ...] | None, np.dtype[Any]]] = {}
    named: dict[str, bytes] = {}
    for stored, one in every.items():
        if one.get_create_plist().get_layout() == h5py.h5d.VIRTUAL:
            Sources().missing(one, path)  # HDF5 opens sources to determine a shape
        named[shown(stored)] = stored
        kinds[shown(stored)] = (_shape(one), _dtype(one))
    name = pick(kinds, dataset, path)
    return name, every[named[name]]


def _shape(dataset: h5py.h5d.DatasetID) -> tuple[int, ...] | None:
    """Return the shape of a dataset; None for an empty dataspace, which has no elements."""
    space = dataset.get_space()
    return None if space.get_simple_extent_type() == h5py.h5s.NULL else tuple(space.shape)


def _dtype(dataset: h5py.h5d.DatasetID) -> np.dtype[Any]:
    """Return the type of the elements; the object type if numpy has no such type."""
    try:
        dtype: np.dtype[Any] = dataset.dtype
    except TypeError:
        return np.dtype(object)
    return dtype


def _check_files(sources: Sources, path: Path) -> None:
    """Raise VolumeError if the files exceed the limit of open files: HDF5 would read zeros from the others."""
    files = len({key[:2] for key in sources.stored})
    may_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if may_open != resource.RLIM_INFINITY and files + OTHER_FILES > may_open and files > 1:
        raise VolumeError(
            f"{path} is made of {files:,} files, and this process may have {may_open:,} open; "
            f"allow more with `ulimit -n {files + OTHER_FILES}`"
        )


def _with_cache(found: h5py.h5d.DatasetID, sources: Sources) -> h5py.h5d.DatasetID:
    """Reopen the dataset with a cache of suitable size."""
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_chunk_cache(SLOTS, _cache_bytes(list(sources.stored.values())), PREEMPT)
    file, name = h5py.h5i.get_file_id(found), h5py.h5i.get_name(found)
    found.close()
    return h5py.h5d.open(file, name, access)


def _cache_bytes(stored: Sequence[Stored]) -> int:
    """Return the bytes of the cache of each dataset; a fully read chunk that fits is unpacked once."""
    return max([CACHE_BYTES // max(1, len(stored)), *(one.packed_bytes for one in stored)])


def _count(voxels: h5py.h5d.DatasetID, own: Stored, box: Region) -> Chunks:
    """Count the chunks that a box touches, and those of them that are not stored."""
    if not own.chunk:
        is_external = voxels.get_create_plist().get_external_count() > 0
        return Chunks(int(not is_external and voxels.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED), 1)
    first = tuple(lo // size for lo, size in zip(box.lo, own.chunk, strict=True))
    touched = Region(first, tuple(-(-hi // size) for hi, size in zip(box.hi, own.chunk, strict=True)))
    if voxels.get_num_chunks() >= prod(ceil(n / size) for n, size in zip(voxels.shape, own.chunk, strict=True)):
        return Chunks(0, touched.elements)
    stored = 0

    def look(chunk: h5py.h5d.StoreInfo) -> None:
        nonlocal stored
        places = zip(chunk.chunk_offset, own.chunk, touched.lo, touched.hi, strict=True)
        stored += all(lo <= at // size < hi for at, size, lo, hi in places)

    voxels.chunk_iter(look)
    return Chunks(touched.elements - stored, touched.elements)


def _first(lost: Sequence[Missing], *, is_fillable: bool) -> str:
    """Describe what is missing, as a sentence without its beginning."""
    one = lost[0]
    lo, last = one.region.lo[-3:], tuple(hi - 1 for hi in one.region.hi[-3:])
    more = f"and {len(lost) - 1} other regions are missing; " if len(lost) > 1 else ""
    advice = "put it where it should be"
    if is_fillable:
        advice += f", or give {option('fill_missing')} with the value to read"
    return f"voxels (z, y, x) = {lo} to {last} are missing: {one.why}; {more}{advice}"


def _check_filters(volume: Hdf5Volume, made: h5py.h5p.PropDCID) -> None:
    """Check that the filters of the dataset are installed; importing hdf5plugin provides most of them."""
    missing = [f for f in map(made.get_filter, range(made.get_nfilters())) if not h5py.h5z.filter_avail(f[0])]
    if missing and find_spec("hdf5plugin"):
        import_module("hdf5plugin")
        missing = [f for f in missing if not h5py.h5z.filter_avail(f[0])]
    if missing:
        code, name = missing[0][0], missing[0][3].decode(errors="replace").partition(";")[0]
        raise VolumeError(
            f"{volume} is compressed with HDF5 filter {code} ({excerpt(name) or 'unnamed'}), which is not installed "
            f"here; `{install('plugins')}` brings the usual ones"
        )


def _filters(made: h5py.h5p.PropDCID) -> Iterator[str]:
    """Yield the names of the filters that chunks pass through, such as `gzip 4`."""
    of = h5py.h5z
    names = {of.FILTER_DEFLATE: "gzip", of.FILTER_SHUFFLE: "shuffle", of.FILTER_FLETCHER32: "fletcher32"}
    for code, _, values, name in map(made.get_filter, range(made.get_nfilters())):
        known = names.get(code) or name.decode(errors="replace").partition(";")[0] or f"filter {code}"
        yield f"{known} {values[0]}" if code == h5py.h5z.FILTER_DEFLATE else excerpt(known, 40)


def _cause(error: Exception) -> str:
    """Return the library's message without the `[Errno ..] Unable to synchronously open file (...)` around it."""
    return excerpt(str(error).partition("(")[2].removesuffix(")") or str(error))
