"""The description of an array that is stored in chunks, made of numbers that were checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np

from znnpy.messages import excerpt

INDEX_ENTRY = 16  # bytes of the index of a shard for each of its chunks: where it begins, and how long it is
SYNONYMS = {"channel": "c", "channels": "c", "time": "t"}  # names of axes

Fill = Literal["stored", "zero", "none"]


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The position of the index in a shard, if it is stored as plain numbers."""

    at_end: bool
    nbytes: int  # including its checksum
    dtype: str  # type of its numbers


@dataclass(frozen=True, slots=True)
class Node:
    """A group, or an array whose numbers were checked. Axes are in the order of the format.

    attributes  of the user
    dtype       None: a group
    chunk       elements along each axis that are unpacked together
    file        elements of one file: the chunk, or the shard that holds several
    names       of the axes; None: they have none
    spec        driver and metadata for tensorstore, made of checked numbers
    key         returns the name of a file for its index, below the folder of the array; None: it is not known
    fill        what chunks hold that are not stored: the stored fill value, zero by the format, or nothing
    index       index of each shard; None: no shards, or their index cannot be read here
    is_blosc    chunks begin with the header of Blosc, which says to how many bytes they unpack
    behind      bytes of a chunk before its compressed part
    refused     why it cannot be read, as the end of a sentence about it; None: it can
    inside      names in a group that its metadata list
    more_index_bytes  bytes of the indexes of shards beside `index`, which are read for one chunk
    """

    attributes: Mapping[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] | None = None
    chunk: tuple[int, ...] = ()
    file: tuple[int, ...] = ()
    names: tuple[str, ...] | None = None
    spec: Mapping[str, Any] = field(default_factory=dict)
    key: Callable[[Sequence[int]], str] | None = None
    fill: Fill = "stored"
    index: ShardIndex | None = None
    is_sharded: bool = False
    is_blosc: bool = False
    behind: int = 0
    refused: str | None = None
    inside: tuple[str, ...] = ()
    more_index_bytes: int = 0

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk, unpacked."""
        return prod(self.chunk) * (self.dtype.itemsize if self.dtype is not None else 0)

    @property
    def chunks(self) -> int:
        """Number of chunks that the array is cut into."""
        return prod(-(-n // size) for n, size in zip(self.shape, self.chunk, strict=True))

    @property
    def chunks_per_file(self) -> tuple[int, ...]:
        """Number of chunks of one file along each axis."""
        return tuple(whole // part for whole, part in zip(self.file, self.chunk, strict=True))

    @property
    def volume_shape(self) -> tuple[int, ...]:
        """Its shape, or (c, z, y, x) at one point of time where only the names of its axes make it a volume."""
        if self.names is None or not {"t", "x"} <= set(self.names):
            return self.shape
        places = {name: place for place, name in enumerate(self.names)}
        return tuple(self.shape[places[name]] if name in places else 1 for name in "czyx")

    @property
    def is_nested(self) -> bool:
        """Whether missing chunks within its shards cannot be told from those that are there."""
        return self.is_sharded and self.index is None and self.key is not None

    @property
    def index_bytes(self) -> int:
        """Bytes of the index of a shard; 0 where a file is one chunk."""
        own = INDEX_ENTRY * prod(self.chunks_per_file) + INDEX_ENTRY if self.is_sharded else 0
        return own + self.more_index_bytes


class InvalidError(Exception):
    """Metadata are wrong; the text is the middle of a sentence."""


def sizes(document: Mapping[str, Any], key: str, least: int, count: int | None = None) -> tuple[int, ...]:
    """Return a list of whole numbers, each at least `least`, as many as `count` states."""
    value = document.get(key)
    if not isinstance(value, list) or not all(type(n) is int and least <= n < 2**63 for n in value):
        raise InvalidError(f"{key} is {excerpt(value, 60)}, and must be whole numbers from {least} to {2**63 - 1:,}")
    if count is not None and len(value) != count:
        raise InvalidError(f"{key} is {excerpt(value, 60)} of an array of {count} axes")
    return tuple(value)


def object_in(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object inside a document; InvalidError if it is none."""
    value = document.get(key)
    if not isinstance(value, dict):
        raise InvalidError(f"{key} is {excerpt(value, 60)}")
    return value


def axis_names(found: object, count: int) -> tuple[str, ...] | None:
    """Return names of axes in the spelling of `znnpy.volume.axes`; None if they name no axis that is known."""
    if not isinstance(found, list) or len(found) != count:
        return None
    if not all(name is None or isinstance(name, str) for name in found):
        return None
    names = tuple(spelled(name) if name else f"axis {place}" for place, name in enumerate(found))
    return names if {"y", "x"} <= set(names) else None


def spelled(name: str) -> str:
    """Return the name of an axis in the spelling of `znnpy.volume.axes`."""
    small = name.lower()
    return SYNONYMS.get(small, small)


def joined(separator: str, numbers: Iterable[int]) -> str:
    """Return numbers as text with a separator between them."""
    return separator.join(map(str, numbers))
