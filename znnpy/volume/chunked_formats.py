"""Descriptions of formats that have a file for each chunk: their arrays, metadata files and keys of chunks.

A format is a description: which metadata files lie where, and what tensorstore is told of an array. It opens nothing,
so the same description serves folders and buckets.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

import numpy as np

from znnpy.errors import OutputError
from znnpy.messages import option
from znnpy.patches import Box
from znnpy.shapes import Vec3, ceil_divide
from znnpy.volume.regions import Region
from znnpy.volume.space import Space
from znnpy.volume.store import OutputArray, chunk_of

Document = Callable[[str], dict[str, Any]]  # reads the JSON object in a file below the output's root
Files = dict[str, bytes]  # names below the root and contents, in the order in which they are written


@dataclass(frozen=True, slots=True)
class Layout:
    """The voxels of a chunk, and of a file that holds several chunks if there are such (a shard)."""

    chunk: Vec3
    shard: Vec3 | None = None

    @property
    def file(self) -> Vec3:
        """Voxels of one file."""
        return self.shard or self.chunk


@dataclass(frozen=True, slots=True)
class StoredArray:
    """The voxels (maps, z, y, x) of one array at one resolution, as they are stored.

    name        of the output's array, as in `OutputArray`
    level       0: as predicted; each further one has voxels twice as large
    maps        in each chunk: one, or all
    attributes  of the array; `offset` and the like only at level 0
    """

    name: str
    level: int
    shape: tuple[int, int, int, int]
    dtype: np.dtype[Any]
    layout: Layout
    space: Space | None = None
    attributes: Mapping[str, Any] | None = None
    whole_maps: bool = False

    @property
    def size(self) -> Vec3:
        return self.shape[1], self.shape[2], self.shape[3]

    @property
    def file(self) -> tuple[int, int, int, int]:
        """Values (maps, z, y, x) of one file."""
        return (self.shape[0] if self.whole_maps else 1, *self.layout.file)

    @property
    def file_bytes(self) -> int:
        """Bytes of a file before it is compressed."""
        return prod(self.file) * self.dtype.itemsize

    def region_of(self, index: Sequence[int]) -> Region:
        """Return the values of the file with this index (maps, z, y, x)."""
        lo = tuple(at * size for at, size in zip(index, self.file, strict=True))
        hi = tuple(min(at + size, most) for at, size, most in zip(lo, self.file, self.shape, strict=True))
        return Region(lo, hi)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape without the maps where there is one."""
        return self.shape if self.shape[0] > 1 else self.size

    def stored(self, sizes: Vec3) -> tuple[int, ...]:
        """Return the size of a chunk as it is stored: with an axis for the maps where there are several."""
        return sizes if self.shape[0] == 1 else (self.file[0], *sizes)


def halved(size: Vec3) -> Vec3:
    """Return the size of the next coarser level."""
    return ceil_divide(size, (2, 2, 2))


def levels_of(size: Vec3, asked: int) -> int:
    """Return how many coarser levels an array gets: those asked for, down to one of a single voxel."""
    return min(asked, (max(size) - 1).bit_length())


def coarser(space: Space, level: int) -> Space:
    """Return the space of a level, whose voxels lie at the centre of those that they are means of."""
    factor = float(2**level)
    shift = (factor - 1) / 2
    return replace(space.behind((shift, shift, shift), (factor, factor, factor)), axes=space.axes)


class ChunkedFormat(ABC):
    """A format. Its arrays have the axes (maps, z, y, x), whatever their order in the format."""

    name: ClassVar[str]
    prefix: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = ("uint8", "float16", "float32")
    has_shards: ClassVar[bool] = False
    whole_maps: ClassVar[bool] = False  # whether a chunk holds all maps
    marks: ClassVar[tuple[str, ...]]  # files below the root without which there is no output
    keeps_zeros: ClassVar[bool] = False  # whether chunks of zeros are stored: readers miss them otherwise

    def check(self, dtype: np.dtype[Any], *, sharded: bool) -> None:
        """Raise OutputError for a dtype, or shards, that the format does not have."""
        if dtype.name not in self.dtypes:
            raise OutputError(
                f"{self.name} has no {dtype.name}; choose {option('output_dtype', 'float32')}, or another format in "
                f"{option('out')}"
            )
        if sharded and not self.has_shards:
            raise OutputError(
                f"{self.name} outputs have a file for each chunk, and only Zarr 3 has shards; leave out "
                f"{option('sharded')}, or give a name that ends with .zarr in {option('out')}"
            )

    def arrays(
        self,
        arrays: Sequence[OutputArray],
        dtype: np.dtype[Any],
        layouts: Sequence[Layout] | None = None,
        multiscale: int = 0,
    ) -> list[list[StoredArray]]:
        """Return what is stored of each array: the levels, the finest first."""
        layouts = layouts or [Layout(chunk_of(array.size)) for array in arrays]
        return [
            list(self._levels(array, dtype, layout, multiscale)) for array, layout in zip(arrays, layouts, strict=True)
        ]

    def _levels(
        self, array: OutputArray, dtype: np.dtype[Any], layout: Layout, multiscale: int
    ) -> Iterator[StoredArray]:
        size = array.size
        for level in range(1 + levels_of(size, multiscale)):
            yield StoredArray(
                array.name,
                level,
                (array.shape[0], *size),
                dtype,
                layout if level == 0 else _cut(layout, size),
                None if array.space is None else coarser(array.space, level),
                array.attributes if level == 0 else None,
                self.whole_maps,
            )
            size = halved(size)

    @abstractmethod
    def folder(self, array: StoredArray) -> str:
        """Return the folder of an array below the root."""

    @abstractmethod
    def documents(self, stored: Sequence[Sequence[StoredArray]], attributes: Mapping[str, Any]) -> Files:
        """Return the metadata files; what lies below the root is an output once the last one is there.

        stored      the levels of each array, the finest first
        attributes  those that all arrays share
        """

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Return the names of metadata files in the order in which they are written, `marks` last."""
        return sorted(names, key=lambda name: (name in self.marks, name))

    @abstractmethod
    def attributes(self, read: Document, name: str = "") -> dict[str, Any]:
        """Return the attributes of an output, or those of one of its arrays. `read` raises for what is not there."""

    @abstractmethod
    def held(self, read: Document, array: StoredArray) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return shape, (maps, z, y, x) or (z, y, x), and dtype of an array according to its metadata.

        array  of any shape, dtype and layout
        """

    @abstractmethod
    def layout(self, read: Document, array: StoredArray) -> Layout:
        """Return the layout of an array according to its metadata; ValueError or the like for others than ours.

        array  of any layout; everything else must be as it is
        """

    @abstractmethod
    def spec(self, array: StoredArray) -> dict[str, Any]:
        """Return what tensorstore is told of an array, without the place: metadata are given, and not read."""

    @abstractmethod
    def turned(self, opened: Any) -> Any:
        """Return what tensorstore opened with the axes (maps, z, y, x), from 0."""

    @abstractmethod
    def key(self, array: StoredArray, index: Sequence[int]) -> str:
        """Return the name below the root of the file with this index (maps, z, y, x)."""

    def dataset(self, array: str) -> str:
        """Return the name by which the voxels of an array are read."""
        return self.folder(StoredArray(array, 0, (1, 1, 1, 1), np.dtype("u1"), Layout((1, 1, 1))))


def _cut(layout: Layout, size: Vec3) -> Layout:
    """Return the layout of a coarser level: no chunk is larger than it, and no file holds more than it."""
    chunk = tuple(min(one, most) for one, most in zip(layout.chunk, size, strict=True))
    if layout.shard is None:
        return Layout((chunk[0], chunk[1], chunk[2]))
    z, y, x = (
        min(held, -(-most // one)) * each
        for held, each, most, one in zip(
            (a // b for a, b in zip(layout.shard, layout.chunk, strict=True)), chunk, size, chunk, strict=True
        )
    )
    return Layout((chunk[0], chunk[1], chunk[2]), (z, y, x))


def box_region(box: Box, maps: int) -> Region:
    """Return all maps of a box as a region (maps, z, y, x)."""
    return Region((0, *box.lo), (maps, *box.hi))


def listed(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes with lists in place of arrays, as JSON has them."""
    return {key: value.tolist() if hasattr(value, "tolist") else value for key, value in attributes.items()}


def stored_levels(
    form: ChunkedFormat, read: Document, arrays: Sequence[OutputArray], dtype: np.dtype[Any], multiscale: int
) -> list[list[StoredArray]]:
    """Return the levels of each array, with the layouts that metadata files say.

    ValueError, or what `read` and damaged metadata raise, if they are not what this version writes.
    """
    layouts = [form.layout(read, levels[0]) for levels in form.arrays(arrays, dtype)]
    stored = form.arrays(arrays, dtype, layouts, multiscale)
    for levels in stored:
        for one in levels[1:]:
            if form.layout(read, one) != one.layout:
                raise ValueError(f"the chunks of level {one.level} are not those of the finest one")
    return stored


def as_json(document: Mapping[str, Any]) -> bytes:
    """Return a metadata file."""
    return json.dumps(document, indent=1).encode() + b"\n"


def below(folder: str, name: str) -> str:
    """Return the path of something in a folder below the root."""
    return f"{folder}/{name}" if folder else name


def whole(numbers: Any, count: int) -> tuple[int, ...]:
    """Return that many positive whole numbers of a metadata file; ValueError for anything else."""
    if (
        not isinstance(numbers, list)
        or len(numbers) != count
        or not all(type(one) is int and one > 0 for one in numbers)
    ):
        raise ValueError(f"there are no {count} positive numbers in {numbers!r:.60}")
    return tuple(numbers)


def check_same(found: Mapping[str, Any], due: Mapping[str, Any]) -> None:
    """Raise ValueError unless metadata are those that this version writes."""
    for name in sorted(found.keys() | due.keys()):
        if found.get(name) != due.get(name):
            raise ValueError(f"its {name} is {found.get(name)!r:.80}, and not {due.get(name)!r:.80}")
