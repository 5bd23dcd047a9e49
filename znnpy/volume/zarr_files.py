"""Files of a Zarr volume: only regular ones no larger than they can be are read, and those that are missing counted."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable
from math import prod
from pathlib import Path

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import LocalStore

from znnpy.errors import VolumeError
from znnpy.files import MOST_METADATA_BYTES, open_regular
from znnpy.volume.regions import Region
from znnpy.volume.volume import Chunks, MissingChunks
from znnpy.volume.zarr_nodes import METADATA_FILES
from znnpy.wording import option

SLACK_BYTES = 2**20  # of a chunk as it is stored, beyond twice its size: headers of codecs


class VolumeFiles(LocalStore):  # type: ignore[misc]  # the package is not seen by mypy
    """The folder of a Zarr volume, to read from; `watch` says which array."""

    def __init__(self, root: Path | str, *, read_only: bool = True) -> None:
        super().__init__(root, read_only=read_only)
        self._array = ""
        self._most = MOST_METADATA_BYTES  # bytes read at once
        self._has_fill_value = True
        self._when_missing: MissingChunks = "fill"
        self._box: Region | None = None  # of files, along the axes of the array
        self._seen = bytearray()  # a bit for each of them
        self._missing = self._looked = 0

    def watch(self, array: str, chunk_bytes: int, *, index_bytes: int, has_fill_value: bool) -> None:
        """Say which array is read.

        chunk_bytes     of a chunk, unpacked
        index_bytes     of the index of a shard
        has_fill_value  there is a value for chunks that are not stored
        """
        self._array, self._has_fill_value = array, has_fill_value
        self._most = max(MOST_METADATA_BYTES, 2 * chunk_bytes + SLACK_BYTES, index_bytes)

    def expect(self, files: Region, when_missing: MissingChunks) -> None:
        """Count the chunk files in this box of them from now on, each once; "error": refuse those that are missing.

        A shard counts as one file. Chunks that are missing within a shard that is there are the fill value, are not
        counted, and "error" does not refuse them.
        """
        self._box, self._when_missing = files, when_missing
        self._seen = bytearray(-(-files.elements // 8))
        self._missing = self._looked = 0

    @property
    def chunks(self) -> Chunks:
        """Return the counts so far."""
        return Chunks(self._missing, self._looked)

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """A file's content, or a part of it; None where there is no such file.

        VolumeError where it is not a regular file, is larger than it can be, or is missing and must not be.
        """
        if not self._is_open:
            await self._open()
        content = await asyncio.to_thread(self._read, key, byte_range)
        if key.rpartition("/")[2] not in METADATA_FILES:
            self._note(key, is_missing=content is None)
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
        """VolumeError where one of these files is missing; none is opened."""
        for key in keys:
            if not os.path.lexists(self.root / key):
                raise self._must_be_there(key)

    def _must_be_there(self, key: str) -> VolumeError:
        return VolumeError(
            f"{self.root / key} is missing; write it, or leave out {option('missing_chunks', 'error')} to read the "
            "fill value of the array there"
        )

    def _note(self, key: str, *, is_missing: bool) -> None:
        """Count a chunk file that was asked for; called in one thread only."""
        if is_missing and not self._has_fill_value:
            raise VolumeError(
                f"{self.root / key} is missing, and the fill value of the array is null; write the chunk or the value"
            )
        if self._box is None:
            return
        index = tuple(int(number) for number in re.findall(r"\d+", key[len(self._array) :]))
        asked = Region(index, tuple(number + 1 for number in index))
        if len(index) != len(self._box.lo) or asked.clipped(self._box) != asked:
            return
        if is_missing and self._when_missing == "error":
            raise self._must_be_there(key)
        flat, sizes = 0, self._box.shape
        for number, lo, size in zip(index, self._box.lo, sizes, strict=True):
            flat = flat * size + number - lo
        if self._seen[flat >> 3] & 1 << (flat & 7):
            return
        self._seen[flat >> 3] |= 1 << (flat & 7)
        self._looked += 1
        self._missing += is_missing


def table_bytes(shape: tuple[int, ...], file: tuple[int, ...]) -> int:
    """Bytes that counting the chunk files of an array of this shape takes."""
    return -(-prod(-(-n // size) for n, size in zip(shape, file, strict=True)) // 8)
