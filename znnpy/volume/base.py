"""The interface of all volumes: channels, size and type of the voxels, boxes to read, and an identity."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.messages import excerpt, option
from znnpy.option_values import MissingChunks
from znnpy.patches import Box
from znnpy.shapes import Vec3, text
from znnpy.volume.about import About
from znnpy.volume.axes import Arranged
from znnpy.volume.location import Location
from znnpy.volume.regions import Region
from znnpy.volume.sample import Sample, sample_of
from znnpy.volume.space import Space

MOST_VOXELS = 10**7  # along one axis


@dataclass(frozen=True, slots=True)
class MissingVoxels:
    """How to treat voxels that a file should hold but does not."""

    fill: float | None = None  # value for voxels whose file is missing or damaged; None: they are an error
    chunks: MissingChunks = "fill"  # for chunks never written: use the fill value of the format, or raise an error

    def check_fill(self, volume: object) -> None:
        """Raise VolumeError if a fill value is given: `volume` does not consist of several files."""
        if self.fill is not None:
            raise VolumeError(
                f"{volume} is neither in chunks nor an HDF5 volume made of several files, so no file can be missing: "
                f"remove {option('fill_missing')}"
            )

    def check_value(self, volume: Volume) -> None:
        """Raise VolumeError if the type of the voxels cannot hold the fill value."""
        value, dtype = self.fill, volume.dtype
        if value is None or dtype.kind == "f":
            return
        info = np.iinfo(dtype)
        if not (float(value).is_integer() and int(info.min) <= int(value) <= int(info.max)):
            raise VolumeError(
                f"{volume} holds {dtype} voxels, which cannot hold {value}; give another {option('fill_missing')}"
            )

    def check_none(self, volume: object) -> None:
        """Raise VolumeError if missing voxels are to be filled or refused: `volume` always holds all of them."""
        self.check_fill(volume)
        if self.chunks == "error":
            raise VolumeError(
                f"{volume} has no chunks that could be missing: leave out {option('missing_chunks', 'error')}"
            )


@dataclass(frozen=True, slots=True)
class Reading:
    """The part of a file or folder to read, and how to read it.

    dataset  name of the array inside; None: the only one that can be a volume
    scale    resolution of an image that is stored at several, counted from 0, the finest; None: the finest
    time     point of time of a series, counted from 0; None: there must be one alone
    missing  how to treat voxels that are not stored
    """

    dataset: str | None = None
    scale: int | None = None
    time: int | None = None
    missing: MissingVoxels = field(default_factory=MissingVoxels)

    def check_single(self, volume: object, *, dataset: bool = True) -> None:
        """Raise VolumeError where something is named that a file with one image does not have.

        dataset  whether a dataset must not be named
        """
        if dataset and self.dataset is not None:
            raise VolumeError(
                f"{volume} holds one array, so there is no dataset {excerpt(repr(self.dataset))} to name: "
                f"leave out {option('dataset')}"
            )
        if self.scale:
            raise VolumeError(f"{volume} holds one resolution: leave out {option('scale', self.scale)}")

    def check_one_time(self, volume: object) -> None:
        """Raise VolumeError where a point of time is named of a volume that has no axis of time."""
        if self.time is not None:
            raise VolumeError(f"{volume} has no points of time: leave out {option('time', self.time)}")


@dataclass(frozen=True, slots=True)
class Chunks:
    """The number of chunks of a volume that were looked up, and of those that are not stored or damaged."""

    missing: int = 0
    looked: int = 0
    unit: Literal["chunks", "voxels"] = "chunks"  # unit of all; voxels if a volume consists of several datasets
    damaged: int = 0  # read as the value that was given for missing voxels


class Volume(ABC):
    """Voxels (c, z, y, x) of an integer or floating type, on disk or in memory. A context manager."""

    def __init__(
        self,
        place: Path | Location,
        dataset: str,
        shape: tuple[int, ...] | None,
        dtype: np.dtype[Any],
        arranged: Arranged | None = None,
    ) -> None:
        """Check that the array can be a volume; VolumeError says why it cannot.

        shape     as stored: (z, y, x) or (c, z, y, x), after any number of axes of length 1, or as `arranged` has it
        dtype     as stored, any byte order
        arranged  how the stored axes become (c, z, y, x), where they have names
        """
        self.location = place if isinstance(place, Location) else Location(str(place))
        self.dataset = dataset
        why = why_not(shape if arranged is None else arranged.shape, dtype)
        if shape is None or why is not None:
            raise VolumeError(f"{self} {why}")
        if arranged is None:
            lead = len(shape) - 3
            channel = lead - 1 if lead else None
            fixed = tuple((axis, 0) for axis in range(lead - 1))
            arranged = Arranged(shape, (channel, lead, lead + 1, lead + 2), fixed)
        self.arranged = arranged
        self.described = About()  # what the reader of the format says
        self._space: Space | None = None
        self.channels: int = arranged.shape[0]
        self.size: Vec3 = arranged.shape[1:]
        self.dtype: np.dtype[Any] = dtype.newbyteorder("=")

    def __str__(self) -> str:
        return f"{self.location}: {self.dataset}" if self.dataset else str(self.location)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the volume, (c, z, y, x); c is 1 where the array has no channel axis."""
        return self.channels, *self.size

    @property
    def space(self) -> Space | None:
        """The position of the voxels in the specimen, if metadata state one that can be true."""
        return self._space

    @space.setter
    def space(self, space: Space | None) -> None:
        self._space = space if space is not None and space.is_possible else None

    @property
    def path(self) -> Path:
        """The path of a file or folder on this machine; ValueError for a URL."""
        return self.location.path

    @property
    def files(self) -> Collection[Path]:
        """Files and folders that voxels are read from, and links that lead there; no output may replace them."""
        return (self.path,) if self.location.is_local else ()

    @property
    def extra_bytes(self) -> int:
        """Memory that reading takes beyond the READER_BYTES that every plan sets aside for it."""
        return 0

    @property
    def chunk_size(self) -> Vec3:
        """Size of the parts that are stored together, (1, 1, 1) if every voxel is stored by itself."""
        return 1, 1, 1

    @property
    def chunks(self) -> Chunks:
        """Number of chunks of the expected box, and of those that are missing, as far as it is known."""
        return Chunks()

    def about(self) -> About:
        """Return how the volume is stored, as far as its format knows it."""
        return self.described

    def expect(self, box: Box) -> None:
        """Announce once, before reading, that all voxels of `box` will be read; count their chunks from now on.

        VolumeError if chunks are known to be missing, and that is to be an error or there is no value for them.
        """
        del box  # nothing is stored in chunks

    def stored_region(self, box: Box) -> Region:
        """Return all channels of a box as a region along the axes of the stored array."""
        return self.arranged.region(box)

    @abstractmethod
    def close(self) -> None:
        """Close the file. It may be called more than once."""

    @abstractmethod
    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        """Copy the voxels of `box` into `out`: (c, *box.size) of `self.dtype`, any strides.

        VolumeError when the storage cannot deliver them.
        """

    @abstractmethod
    def stored(self) -> tuple[int, int]:
        """Return size in bytes, and time of the last change in ns, of what holds the voxels."""

    def identity(self, sample: Sample | None = None) -> dict[str, Any]:
        """Return the identity of this volume, which a resumed run compares; it does not depend on the folder.

        sample  of its content, if it was read already.
        """
        read = sample or sample_of(self)
        size, changed = self.stored()
        return {
            "bytes": size,
            "mtime_ns": changed,
            "dataset": self.dataset,
            "shape": list(self.shape),
            "dtype": self.dtype.name,
            "samples_sha256": read.sha256,
        }


def why_not(shape: tuple[int, ...] | None, dtype: np.dtype[Any]) -> str | None:
    """Return why such an array cannot be a volume, as the end of a sentence about it; None if it can."""
    if dtype.kind not in "iuf":
        type_name = {"c": "complex", "V": "compound", "O": "object", "M": "date", "m": "time"}.get(dtype.kind, "text")
        kind = "bool" if dtype.kind == "b" else f"{type_name} ({dtype})"
        advice = {
            "b": "store it as uint8",
            "c": "store one real part of it, such as its magnitude",
            "O": "store it as numbers",
            "V": "store the field to predict as a dataset of its own",
        }.get(dtype.kind, f"name another dataset with {option('dataset')}")
        return f"holds {kind} voxels, and only integers and floating-point numbers can be read; {advice}"
    if shape is None or len(shape) < 3 or set(shape[:-4]) - {1}:
        axes = "no axes" if not shape else f"{len(shape)} {'axis' if len(shape) == 1 else 'axes'} {shape}"
        return (
            f"has {axes}, and a volume has 3 (z, y, x) or 4 (c, z, y, x), after any number of length 1; "
            f"reshape it or name another with {option('dataset')}"
        )
    if prod(shape) == 0:
        return f"is empty: {shape}; name a dataset that holds voxels with {option('dataset')}"
    if max(shape) > MOST_VOXELS:
        return f"has an axis of {max(shape):,} voxels, and up to {MOST_VOXELS:,} are read; check how it was written"
    return None


def pick(arrays: Mapping[str, tuple[tuple[int, ...] | None, np.dtype[Any]]], dataset: str | None, path: object) -> str:
    """Return the name of the array to read among those that a file holds, given as name -> (shape, dtype).

    With `dataset` None it is the only one that can be a volume. VolumeError lists them if the choice is not clear.
    """
    if dataset is not None:
        wanted = dataset.strip("/")
        if wanted in arrays:
            return wanted
        raise VolumeError(f"{path} has no dataset {excerpt(repr(dataset))}; it holds {_listed(arrays, arrays)}")
    fitting = [name for name, (shape, dtype) in arrays.items() if why_not(shape, dtype) is None]
    if len(fitting) == 1:
        return fitting[0]
    if len(arrays) == 1:
        name = next(iter(arrays))
        raise VolumeError(f"{path}: {name} {why_not(*arrays[name])}")
    if not fitting:
        held = f"but {_listed(arrays, arrays)}" if arrays else "and no other dataset"
        raise VolumeError(
            f"{path} holds no 3D or 4D dataset of numbers {held}; store the volume as (z, y, x) or (c, z, y, x)"
        )
    raise VolumeError(
        f"{path} holds {len(fitting)} datasets that could be the volume: {_listed(arrays, fitting)}; "
        f"name one with {option('dataset')}"
    )


def _listed(
    arrays: Mapping[str, tuple[tuple[int, ...] | None, np.dtype[Any]]], names: Sequence[str] | Mapping[str, Any]
) -> str:
    shown = [
        f"{excerpt(name, 40)} ({excerpt(text(arrays[name][0] or ()) or 'scalar', 40)} {excerpt(arrays[name][1], 40)})"
        for name in list(names)[:10]
    ]
    more = [f"and {len(names) - 10} more"] if len(names) > 10 else []
    return ", ".join(shown + more) or "nothing"
