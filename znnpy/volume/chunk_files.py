"""Look at stored chunks before tensorstore unpacks them: which are missing, and which would unpack to too much.

tensorstore stops gzip, zlib, bz2 and zstd at the size of a chunk and compares the size of JPEG and PNG images before it
unpacks them, but Blosc unpacks to what the header of the chunk says.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.files import open_regular
from znnpy.volume.decompression import blosc_bytes, most_bytes
from znnpy.volume.object_store import ObjectFiles
from znnpy.volume.regions import Region
from znnpy.volume.stored_array import Node
from znnpy.volume.stored_files import StoredFiles

NOWHERE = 2**64 - 1  # both numbers in the index of a shard for a chunk that is not stored
SLACK_BYTES = 2**20  # allowance of a stored chunk beyond twice its size: headers of codecs
BLOSC_HEADER = 16
MODE_BYTES = 2  # N5 blocks begin with their mode; in mode 1 there are 4 more bytes before the compressed part
WRAPPED = (".gz", ".br", ".zstd", ".xz")  # suffixes of files that CloudVolume compresses as a whole

Index = tuple[int, ...]


@dataclass(slots=True)
class Look:
    """The chunks of a piece that cannot be read, by their index in the array."""

    missing: set[Index] = field(default_factory=set)
    damaged: dict[Index, str] = field(default_factory=dict)  # with the reason, as the end of a sentence
    is_doubted: bool = False  # the index of a shard, whose checksum was not compared, says that a chunk is missing

    @property
    def is_whole(self) -> bool:
        """Say whether every chunk is there, as far as it is known before unpacking."""
        return not self.missing and not self.damaged and not self.is_doubted


class ChunkFiles:
    """The files with the chunks of an array, in the folder `folder` of `files`."""

    def __init__(self, files: StoredFiles, folder: str, node: Node) -> None:
        self._files, self._node = files, node
        self._folder = f"{folder}/" if folder else ""
        self._root = f"{str(files.place).rstrip('/')}/{self._folder}"
        self._most = 2 * node.chunk_bytes + SLACK_BYTES

    def file_of(self, chunk: Index) -> str | None:
        """Return the key of the file that holds a chunk; None if it is not known."""
        if self._node.key is None:
            return None
        per_file = self._node.chunks_per_file
        return self._folder + self._node.key([at // count for at, count in zip(chunk, per_file, strict=True)])

    def name_of(self, chunk: Index) -> str:
        """Return the whole name of the file that holds a chunk, or of the folder of the array, for messages."""
        return self._files.named(self.file_of(chunk) or self._folder.rstrip("/"))

    def look(self, chunks: Region) -> Look:
        """Look at the chunks with these indices."""
        found = Look()
        if self._node.key is None:
            return found
        if isinstance(self._files, ObjectFiles):
            if self._node.is_blosc and not self._node.is_sharded:
                self._look_remotely(self._files, chunks, found)
            return found
        for file in _indices(chunks.in_steps(self._node.chunks_per_file)):
            self._look_at(file, chunks, found)
        return found

    def missing_file(self, chunks: Region) -> str | None:
        """Return the name of the first local file that is missing of those with these chunks; none is opened."""
        if self._node.key is None or not self._files.place.is_local:
            return None
        for file in _indices(chunks.in_steps(self._node.chunks_per_file)):
            name = self._root + self._node.key(file)
            if not os.path.lexists(name):
                return name
        return None

    def is_confirmed_missing(self, chunk: Index) -> bool | None:
        """Return whether a bucket confirms that the file of a chunk is not there; None if nothing can confirm it."""
        key = self.file_of(chunk)
        if key is None or not isinstance(self._files, ObjectFiles):
            return None
        held = self._files.holds(key)
        return None if held is None else not held

    def _look_remotely(self, files: ObjectFiles, chunks: Region, found: Look) -> None:
        """Look at the headers of Blosc."""
        every = list(_indices(chunks))
        heads = files.heads([self.file_of(one) or "" for one in every], self._node.behind + 4 + BLOSC_HEADER)
        for one, head in zip(every, heads, strict=True):
            if head is not None:  # a missing one is found, and confirmed, by reading it
                self._check_header(one, head, found)

    def _look_at(self, file: Index, chunks: Region, found: Look) -> None:
        """Look at one file, and note what is wrong with those of its chunks that are in `chunks`."""
        node = self._node
        assert node.key is not None
        name = self._root + node.key(file)
        first = tuple(at * count for at, count in zip(file, node.chunks_per_file, strict=True))
        inside = Region(first, tuple(map(add, first, node.chunks_per_file))).clipped(chunks)
        try:
            if not node.is_blosc and node.index is None:  # nothing inside is looked at
                status = os.stat(name)
                self._check_file(name, status, inside, found)
                return
            descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            _check_wrapped(name, node)
            found.missing.update(_indices(inside))
            return
        except OSError as error:
            raise VolumeError(f"{name} cannot be read: {error.strerror}; copy the folder again") from None
        try:
            status = os.fstat(descriptor)
            if not self._check_file(name, status, inside, found):
                return
            if node.index is not None:
                self._look_in_shard(descriptor, status.st_size, first, inside, found)
            elif not node.is_sharded:
                self._check_header(file, os.pread(descriptor, node.behind + 4 + BLOSC_HEADER, 0), found)
        except OSError as error:
            raise VolumeError(f"{name} cannot be read: {error.strerror}; copy the folder again") from None
        finally:
            os.close(descriptor)

    def _check_file(self, name: str, status: os.stat_result, inside: Region, found: Look) -> bool:
        """Return whether a file can hold its chunks; VolumeError if it is no file."""
        if not stat.S_ISREG(status.st_mode):
            try:
                open_regular(Path(name)).close()
            except OSError as error:
                raise VolumeError(f"{name} cannot be read: {error.strerror}; copy the folder again") from None
        shard = self._node.index_bytes
        per_file = int(np.prod(self._node.chunks_per_file, dtype=object))
        most = self._most + shard + 2 * self._node.chunk_bytes * (per_file - 1)
        if status.st_size <= most:
            return True
        for one in _indices(inside):
            found.damaged[one] = f"the file holds {status.st_size:,} bytes where at most {most:,} can be"
        return False

    def _look_in_shard(self, descriptor: int, size: int, first: Index, inside: Region, found: Look) -> None:
        """Look at the entries of the index of a shard, and at what they point to."""
        place = self._node.index
        assert place is not None
        content = os.pread(descriptor, place.nbytes, max(0, size - place.nbytes) if place.at_end else 0)
        if len(content) < place.nbytes:
            for one in _indices(inside):
                found.damaged[one] = f"the file holds {size:,} bytes, and the index of a shard has {place.nbytes:,}"
            return
        shape = self._node.chunks_per_file
        entries: npt.NDArray[Any] = np.frombuffer(content, place.dtype, 2 * int(np.prod(shape))).reshape(*shape, 2)
        local = inside.shifted([-at for at in first]).slices
        for one, (begin, length) in zip(_indices(inside), entries[local].reshape(-1, 2).tolist(), strict=True):
            if begin == length == NOWHERE:
                found.is_doubted = True
            elif begin + length > size:
                found.damaged[one] = f"it ends at byte {begin + length:,} of a shard that has {size:,}"
            elif length > self._most:
                found.damaged[one] = f"it is stored in {length:,} bytes where at most {self._most:,} can be"
            elif self._node.is_blosc:
                self._check_header(one, os.pread(descriptor, BLOSC_HEADER, begin), found)

    def _check_header(self, chunk: Index, head: bytes, found: Look) -> None:
        """Note a chunk whose header of Blosc says that it unpacks to more than a chunk has."""
        behind = self._node.behind
        if behind and head[:MODE_BYTES] == b"\0\1":
            behind += 4
        packed = head[behind : behind + BLOSC_HEADER]
        if len(packed) < BLOSC_HEADER:
            found.damaged[chunk] = f"it is stored in {len(head)} bytes, which is less than its header has"
        elif blosc_bytes(packed) > most_bytes(self._node.chunk_bytes):
            found.damaged[chunk] = (
                f"it unpacks to {blosc_bytes(packed):,} bytes, and a chunk of the array has {self._node.chunk_bytes:,}"
            )


def _indices(region: Region) -> Iterator[Index]:
    return product(*(range(lo, hi) for lo, hi in zip(region.lo, region.hi, strict=True)))


def _check_wrapped(name: str, node: Node) -> None:
    """Raise VolumeError if a chunk of a precomputed volume is stored under another name, compressed as a whole file."""
    if node.spec.get("driver") != "neuroglancer_precomputed":
        return
    for suffix in WRAPPED:
        if os.path.lexists(name + suffix):
            raise VolumeError(
                f"{name}{suffix} is compressed as a whole file, which CloudVolume reads alone; write the volume with "
                "compress=False, or unpack all such files"
            )


def table_bytes(shape: Sequence[int], chunk: Sequence[int]) -> int:
    """Return the bytes of the table that marks which chunks of an array of this shape were counted."""
    return -(-int(np.prod([-(-n // size) for n, size in zip(shape, chunk, strict=True)], dtype=object)) // 8)
