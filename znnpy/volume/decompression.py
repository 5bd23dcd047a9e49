"""Packed chunks are unpacked no further than a chunk can be, so that a small damaged one does not take all memory."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from io import BytesIO
from typing import Any

HEADERS = 4096  # bytes that codecs may add in front of or behind the voxels
OPENERS: dict[str, Callable[[BytesIO], Any]] = {"gzip": gzip.open, "bz2": bz2.open, "lzma": lzma.open}
ZSTD_FRAME = b"\x28\xb5\x2f\xfd"


class ChunkTooLargeError(ValueError):
    """A packed chunk unpacks to more than its array says."""

    def __init__(self, size: int, *, is_all: bool) -> None:
        """A chunk of `size` bytes; `is_all`: exactly, as its header says, otherwise at least."""
        super().__init__(f"{'' if is_all else 'at least '}{size:,} bytes")


def most_bytes(chunk_bytes: int) -> int:
    """Bytes that a chunk of so many bytes of voxels may unpack to: codecs in front may make it larger."""
    return 2 * chunk_bytes + HEADERS


def unpacked(codec: str, data: bytes | memoryview, most: int) -> bytes:
    """Unpack "zlib", "gzip", "bz2" or "lzma" data to at most `most` bytes.

    ChunkTooLargeError: there is more. ValueError: the data are damaged or cut short.
    """
    try:
        if codec == "zlib":
            stream = zlib.decompressobj()
            found = stream.decompress(data, most + 1)
            if len(found) <= most and not stream.eof:
                raise EOFError("the compressed data end too early")
        else:
            with OPENERS[codec](BytesIO(data)) as file:
                found = file.read(most + 1)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{codec} data are damaged: {error}") from None
    if len(found) > most:
        raise ChunkTooLargeError(len(found), is_all=False)
    return found


def check_declared(size: int | None, most: int) -> None:
    """ChunkTooLargeError where the header of a chunk says that it unpacks to more than `most` bytes."""
    if size is not None and size > most:
        raise ChunkTooLargeError(size, is_all=True)


def blosc_bytes(data: bytes | memoryview) -> int:
    """Bytes that a chunk of Blosc says it unpacks to."""
    return int.from_bytes(data[4:8], "little")


def zstd_bytes(data: bytes | memoryview) -> int | None:
    """Bytes that the first frame of Zstandard data says it unpacks to (RFC 8878); None where it does not say."""
    if data[:4] != ZSTD_FRAME or len(data) < 5:
        return None
    about = data[4]
    is_single, field = bool(about & 32), about >> 6
    length = (int(is_single), 2, 4, 8)[field]
    if not length:
        return None
    at = 5 + (not is_single) + (0, 1, 2, 4)[about & 3]
    return int.from_bytes(data[at : at + length], "little") + (256 if field == 1 else 0)


def lzf_bytes(data: bytes | memoryview, most: int) -> int:
    """Bytes that LZF data unpack to; counting ends beyond `most`."""
    at = total = 0
    end = len(data)
    while at < end and total <= most:
        control = data[at]
        if control < 32:  # so many bytes as they are, and one
            total += control + 1
            at += control + 2
        elif control < 224:  # a repetition
            total += (control >> 5) + 2
            at += 2
        else:  # a long one, whose length is in the next byte
            total += (data[at + 1] if at + 1 < end else 0) + 9
            at += 3
    return total
