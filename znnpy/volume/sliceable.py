"""Volumes and outputs that are objects of the caller: they are sliced, or assigned to by slices.

These are numpy arrays, h5py datasets, Zarr and dask arrays, and the caller's own classes with the same methods.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence, Set
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import h5py
import numpy as np
import numpy.typing as npt

from znnpy.errors import OutputError, VolumeError
from znnpy.messages import option
from znnpy.patches import Box, Columns
from znnpy.planner.memory import READER_BYTES
from znnpy.volume.array import ArrayVolume, why_unwritable
from znnpy.volume.base import MissingVoxels, Reading, Volume
from znnpy.volume.hdf5_sources import Sources
from znnpy.volume.journal import JournalHeader
from znnpy.volume.regions import pieces
from znnpy.volume.registry import open_volume
from znnpy.volume.storage_paths import storage_paths

PIECE_BYTES = 4 * 2**20  # voxels requested at once, unless one chunk is larger
AT_ONCE = 64  # chunks per piece
STEPS = 4  # copies of a piece: as stored, unpacked, in the order of the array, and as returned


class Sliceable(Protocol):
    """An object that `infer` can read a volume from."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (z, y, x) or (c, z, y, x), possibly after axes of length 1."""

    @property
    def dtype(self) -> Any:
        """Type of the values, in any form that `numpy.dtype` accepts."""

    def __getitem__(self, where: Any, /) -> Any:
        """Return the values at `where`, a tuple of slices with step 1, one for each axis; they become a numpy array."""


class Assignable(Protocol):
    """An object that `infer` can write an output to."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (maps, z, y, x); for one map also (z, y, x)."""

    @property
    def dtype(self) -> Any:
        """Type of the values, in any form that `numpy.dtype` accepts."""

    def __setitem__(self, where: Any, block: Any, /) -> None:
        """Store `block` at `where`, a tuple of slices, one for each axis. The memory of `block` is reused later."""


class SliceVolume(Volume):
    """A volume that is read by slicing an object of the caller, one thread at a time."""

    def __init__(self, thing: Sliceable) -> None:
        shape = tuple(int(size) for size in thing.shape)
        super().__init__(Path(f"the {type(thing).__name__}"), "", shape, np.dtype(thing.dtype))
        self._thing, self._stored_shape = thing, shape
        self._chunk = _chunk_of(thing, shape)
        self._lock = threading.Lock()

    @property
    def extra_bytes(self) -> int:
        """Memory for a piece while it is unpacked and returned."""
        return max(0, STEPS * max(PIECE_BYTES, prod(self._chunk) * self.dtype.itemsize) - READER_BYTES)

    @property
    def files(self) -> Collection[Path]:
        """Files of the object, as far as it names them; VolumeError if a virtual source cannot be opened."""
        if not isinstance(self._thing, h5py.Dataset):
            return storage_paths(self._thing)
        sources = Sources()
        sources.missing(self._thing.id, Path(self._thing.file.filename))
        return sources.files

    def close(self) -> None:
        """Do nothing: the object belongs to the caller."""

    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        asked = self.stored_region(box)
        target, back = out.reshape(asked.shape), [-at for at in asked.lo]
        most = PIECE_BYTES // self.dtype.itemsize
        with self._lock:
            for piece in pieces(asked, self._chunk, elements=most, chunks=AT_ONCE):
                found = np.asarray(self._thing[piece.slices])
                if found.shape != piece.shape or found.dtype.newbyteorder("=") != self.dtype:
                    raise VolumeError(
                        f"{self} was asked for {piece.shape} voxels of {self.dtype} and gave {found.shape} of "
                        f"{found.dtype}; give an object whose slices have the size and type that it states"
                    )
                target[piece.shifted(back).slices] = found

    def stored(self) -> tuple[int, int]:
        """Return the bytes of all voxels, and 0 for the date, which an object does not have."""
        return prod(self._stored_shape) * self.dtype.itemsize, 0


def open_given(
    volume: str | Path | Sliceable,
    dataset: str | None = None,
    missing_voxels: MissingVoxels | None = None,
    *,
    scale: int | None = None,
    time: int | None = None,
) -> Volume:
    """Open the volume at a path or URL as `open_volume` does, or wrap an object of the caller.

    VolumeError says why a file or an object cannot be used.
    """
    if isinstance(volume, str | Path):
        return open_volume(volume, dataset, missing_voxels, scale=scale, time=time)
    reading = Reading(dataset, scale, time, missing_voxels or MissingVoxels())
    reading.check_single("the volume")
    reading.check_one_time("the volume")
    reading.missing.check_none("the volume")
    if isinstance(volume, np.ndarray):
        return ArrayVolume(volume)
    if not all(hasattr(volume, name) for name in ("shape", "dtype", "__getitem__")):
        raise TypeError(
            f"a volume is a path, or something to slice with shape and dtype, not {type(volume).__name__}; "
            "give numpy.asarray of it"
        )
    return SliceVolume(volume)


class BlockOutput:
    """An object to which blocks are assigned, with the interface of `Output` that a run uses, but no journal."""

    def __init__(
        self,
        thing: Assignable,
        *,
        volume: object,
        shape: tuple[int, int, int, int],
        dtype: np.dtype[Any],
        maps: Sequence[int] | None = None,
    ) -> None:
        """Check that the output fits; OutputError says why it does not.

        thing   object to write to.
        volume  volume that is read at the same time; it must not share memory with `thing`.
        shape   (maps, z, y, x) of the prediction.
        dtype   of the prediction.
        maps    of each output of a network with several, which follow one another.
        """
        if not all(hasattr(thing, name) for name in ("shape", "dtype", "__setitem__")):
            raise TypeError(
                f"an output is a path, or something with shape and dtype that takes assignment to slices, "
                f"not {type(thing).__name__}"
            )
        ends = list(accumulate(maps or (shape[0],)))
        self._maps: list[tuple[slice, ...]] = [(slice(lo, hi),) for lo, hi in pairwise((0, *ends))]
        if shape[0] == 1 and tuple(thing.shape) == shape[1:]:
            self._maps = [()]
        elif tuple(thing.shape) != shape:
            raise self._unfit(thing, shape, dtype)
        if np.dtype(thing.dtype) != dtype:
            raise self._unfit(thing, shape, dtype)
        if isinstance(thing, np.ndarray):
            if why := why_unwritable(thing):
                raise OutputError(f"the output array {why}")
            if isinstance(volume, np.ndarray) and np.may_share_memory(thing, volume):
                raise OutputError("the output array shares memory with the volume; give one of its own")
        self.dtype, self.shape = dtype, shape
        self.header: JournalHeader | None = None
        self.finished = False
        self.done: Set[int] = frozenset()
        self._thing = thing
        self._lock = threading.Lock()

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes: an array has none."""
        return {}

    @property
    def folder(self) -> None:
        """None: the output is an object."""

    @property
    def held_bytes(self) -> int:
        """Memory of the process that a numpy array takes once it is written; 0 for other objects."""
        return prod(self.shape) * self.dtype.itemsize if isinstance(self._thing, np.ndarray) else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Do nothing: the object belongs to the caller."""

    @property
    def gathered_bytes(self) -> int:
        """Return 0: blocks are assigned as they come."""
        return 0

    def limit(self, budget: int) -> None:
        """Do nothing: blocks are assigned as they come."""

    @property
    def rewritten(self) -> int:
        """Return 0: an array has no chunks that are known."""
        return 0

    def begin(self, header: JournalHeader, attributes: Mapping[str, Any], plans: Sequence[Columns] = ()) -> None:
        """Begin a run. The attributes are dropped, since an array cannot store them, and so are the columns."""
        del attributes, plans
        self.header = header

    def pause(self) -> None:
        """Prepare for a run that ended early and begins again: no record says what was finished."""
        self.header = None

    def write(self, box: Box, voxels: npt.NDArray[Any], number: int = 0) -> None:
        """Assign voxels (maps, *box.size) of an output at coordinates `box`."""
        maps = self._maps[number]
        with self._lock:
            self._thing[(*maps, *box.slices)] = voxels if maps else voxels[0]

    @staticmethod
    def _unfit(thing: Assignable, shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> OutputError:
        return OutputError(
            f"the output has shape {tuple(thing.shape)} and type {np.dtype(thing.dtype)}, and the prediction has "
            f"(maps, z, y, x) = {shape} and type {dtype}; give one that fits, or another {option('output_dtype')}"
        )

    def finish_column(self, index: int) -> None:
        """Do nothing: there is no record to keep."""

    def complete(self) -> None:
        """Mark the output as finished."""
        self.finished = True


def _chunk_of(thing: object, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the voxels of a chunk along each axis; a line of voxels for an object that names no chunks."""
    chunks = getattr(thing, "chunks", None)
    if isinstance(chunks, tuple) and len(chunks) == len(shape):
        sizes = [max(along, default=0) if isinstance(along, tuple) else along for along in chunks]
        if all(isinstance(size, int) and size > 0 for size in sizes):
            return tuple(min(size, n) for size, n in zip(sizes, shape, strict=True))
    return (*(1 for _ in shape[:-1]), shape[-1])
