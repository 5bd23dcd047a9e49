"""Read the files of a Zarr volume, only regular ones of a plausible size, and count the missing ones."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from operator import add
from pathlib import Path

import numpy as np
import numpy.typing as npt
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import LocalStore

from znnpy.errors import VolumeError
from znnpy.files import MOST_METADATA_BYTES, open_regular
from znnpy.messages import option
from znnpy.option_values import MissingChunks
from znnpy.volume.base import Chunks
from znnpy.volume.regions import Region
from znnpy.volume.zarr_nodes import METADATA_FILES, Node, ShardIndex

NOWHERE = 2**64 - 1  # both numbers in the index of a shard for a chunk that is not stored
SLACK_BYTES = 2**20  # allowance of a stored chunk beyond twice its size: headers of codecs


class VolumeFiles(LocalStore):  # type: ignore[misc]  # mypy does not follow the package
    """The folder of a Zarr volume, opened for reading; `watch` names the array."""

    def __init__(self, root: Path | str, *, read_only: bool = True) -> None:
        super().__init__(root, read_only=read_only)
        self._array = ""
        self._most = MOST_METADATA_BYTES  # bytes read at once
        self._node = Node({})
        self._when_missing: MissingChunks = "fill"
        self._box: Region | None = None  # expected files, along the axes of the array
        self._chunks: Region | None = None  # expected chunks
        self._seen = bytearray()  # a bit for each expected file
        self._missing = self._looked = 0
        self._refused: VolumeError | None = None

    def watch(self, array: str, node: Node, *, index_bytes: int) -> None:
        """Name the array to read.

        index_bytes  largest size of the index of a shard
        """
        self._array, self._node = array, node
        self._most = max(MOST_METADATA_BYTES, 2 * node.chunk_bytes + SLACK_BYTES, index_bytes)

    def expect(self, files: Region, chunks: Region, when_missing: MissingChunks) -> None:
        """Count each chunk of a box once from now on; "error": refuse missing ones.

        If the index of shards cannot be read here (nested shards, other codecs before them), all chunks of a shard
        count as present, and "error" is VolumeError.

        files   the files that hold the chunks
        chunks  the chunks of the box
        """
        if when_missing == "error" and self._node.is_sharded and self._node.index is None:
            raise VolumeError(
                f"{self.root}: chunks that are missing within its shards are not found here; leave out "
                f"{option('missing_chunks', 'error')}"
            )
        self._box, self._chunks, self._when_missing = files, chunks, when_missing
        self._seen = bytearray(-(-files.elements // 8))
        self._missing = self._looked = 0

    @property
    def chunks(self) -> Chunks:
        """Counts so far."""
        return Chunks(self._missing, self._looked)

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return the content of a file, or a part of it; None where there is no such file.

        VolumeError if it is not a regular file, is larger than it can be, or is missing although it is required.
        """
        if not self._is_open:
            await self._open()
        content = await asyncio.to_thread(self._read, key, byte_range)
        if key.rpartition("/")[2] not in METADATA_FILES:
            self._note(key, content, byte_range)
        if content is None:
            return None
        return (prototype or default_buffer_prototype()).buffer.from_bytes(content)

    def _read(self, key: str, byte_range: ByteRequest | None) -> bytes | None:
        path = self.root / key
        try:
            file = open_regular(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise VolumeError(f"{path} cannot be read: {error.strerror}; copy the folder again") from None
        with file:
            size = file.seek(0, 2)
            start, end = 0, size
            match byte_range:
                case RangeByteRequest():
                    start, end = byte_range.start, min(size, byte_range.end)
                case OffsetByteRequest():
                    start = byte_range.offset
                case SuffixByteRequest():
                    start = max(0, size - byte_range.suffix)
            if end - start > self._most:
                raise VolumeError(
                    f"{path} holds {end - start:,} bytes where at most {self._most:,} can be; it is damaged: copy the "
                    "folder again"
                )
            file.seek(start)
            parts = []
            while start < end and (part := file.read(end - start)):
                parts.append(part)
                start += len(part)
        return b"".join(parts)

    def look_for(self, keys: Iterable[str]) -> None:
        """Raise VolumeError if one of these files is missing; none is opened."""
        for key in keys:
            if not os.path.lexists(self.root / key):
                raise self._must_be_there(key)

    def _must_be_there(self, key: str) -> VolumeError:
        return VolumeError(
            f"{self.root / key} is missing; write it, or leave out {option('missing_chunks', 'error')} to read the "
            "fill value of the array there"
        )

    def _note(self, key: str, content: bytes | None, byte_range: ByteRequest | None) -> None:
        """Count the chunks of a requested file, or of a part of one. It is called in one thread only."""
        if content is None and not self._node.has_fill_value:
            raise VolumeError(
                f"{self.root / key} is missing, and the fill value of the array is null; write the chunk or the value"
            )
        if self._box is None or self._chunks is None:
            return
        index = tuple(int(number) for number in re.findall(r"\d+", key[len(self._array) :]))
        asked = Region(index, tuple(number + 1 for number in index))
        if len(index) != len(self._box.lo) or asked.clipped(self._box) != asked:
            return
        if content is None and self._when_missing == "error":
            raise self._must_be_there(key)
        place = self._node.index
        if content is not None and place is not None and not _has_index(content, byte_range, place):
            return  # one chunk of a shard, whose index was read before
        first = tuple(number * count for number, count in zip(index, self._node.chunks_per_file, strict=True))
        there = Region(first, tuple(map(add, first, self._node.chunks_per_file))).clipped(self._chunks)
        missing = there.elements if content is None else 0
        if content is not None and place is not None:
            absent = _absent(content, place, self._node.chunks_per_file)[there.shifted([-at for at in first]).slices]
            missing = int(absent.sum())
            if missing and self._when_missing == "error":
                inside = np.unravel_index(int(absent.argmax()), absent.shape)
                at = [(i + lo) * size for i, lo, size in zip(inside, there.lo, self._node.chunk, strict=True)]
                self._refused = VolumeError(
                    f"{self.root / key} holds no chunk that begins at {tuple(map(int, at))}; write it, or leave out "
                    f"{option('missing_chunks', 'error')} to read the fill value of the array there"
                )
                return
        flat, sizes = 0, self._box.shape
        for number, lo, size in zip(index, self._box.lo, sizes, strict=True):
            flat = flat * size + number - lo
        if self._seen[flat >> 3] & 1 << (flat & 7):
            return
        self._seen[flat >> 3] |= 1 << (flat & 7)
        self._looked += there.elements
        self._missing += missing

    @contextmanager
    def refusing_missing(self) -> Iterator[None]:
        """Raise VolumeError at the end of a read that found a shard without a required chunk.

        Only then has the package compared the index of the shard with its checksum.
        """
        self._refused = None
        yield
        if self._refused is not None:
            raise self._refused


def _absent(content: bytes, place: ShardIndex, chunks: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Return which chunks a shard does not hold: both numbers of their entry in its index are NOWHERE."""
    start = len(content) - place.nbytes if place.at_end else 0
    entries = np.frombuffer(content, place.dtype, 2 * prod(chunks), start).reshape(*chunks, 2)
    absent: npt.NDArray[np.bool_] = np.all(entries == NOWHERE, axis=-1)
    return absent


def _has_index(content: bytes, byte_range: ByteRequest | None, place: ShardIndex) -> bool:
    """Return whether this part of a shard holds the shard's index, at the end or at the start of the part."""
    whole = SuffixByteRequest(place.nbytes) if place.at_end else RangeByteRequest(0, place.nbytes)
    return byte_range in (None, whole) and len(content) >= place.nbytes


def table_bytes(shape: tuple[int, ...], file: tuple[int, ...]) -> int:
    """Return the bytes of the table that marks which chunk files of an array of this shape were counted."""
    return -(-prod(-(-n // size) for n, size in zip(shape, file, strict=True)) // 8)
