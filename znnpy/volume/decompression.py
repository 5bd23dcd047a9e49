"""Decompression within the size of a chunk, so that a small damaged chunk cannot take all memory."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from io import BytesIO
from typing import Any

HEADERS = 4096  # bytes that codecs may add before or after the voxels
OPENERS: dict[str, Callable[[BytesIO], Any]] = {"gzip": gzip.open, "bz2": bz2.open, "lzma": lzma.open}
ZSTD_FRAME = b"\x28\xb5\x2f\xfd"


class ChunkTooLargeError(ValueError):
    """A packed chunk unpacks to more than its array says."""

    def __init__(self, size: int, *, is_all: bool) -> None:
        """Describe a chunk of `size` bytes: exactly that size if `is_all`, as its header states, else at least."""
        super().__init__(f"{'' if is_all else 'at least '}{size:,} bytes")


def most_bytes(chunk_bytes: int) -> int:
    """Return the bytes that a chunk with this many bytes of voxels may unpack to: codecs may make it larger first."""
    return 2 * chunk_bytes + HEADERS


def unpacked(codec: str, data: bytes | memoryview, most: int) -> bytes:
    """Unpack "zlib", "gzip", "bz2" or "lzma" data to at most `most` bytes.

    ChunkTooLargeError: there are more. ValueError: the data are damaged or cut short.
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
    """Raise ChunkTooLargeError if the header of a chunk states that it unpacks to more than `most` bytes."""
    if size is not None and size > most:
        raise ChunkTooLargeError(size, is_all=True)


def blosc_bytes(data: bytes | memoryview) -> int:
    """Return the unpacked size that the header of a Blosc chunk states."""
    return int.from_bytes(data[4:8], "little")


def zstd_bytes(data: bytes | memoryview) -> int | None:
    """Return the unpacked size that the first frame of Zstandard data states (RFC 8878); None if it states none."""
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
    """Count the bytes that LZF data unpack to; stop beyond `most`."""
    at = total = 0
    end = len(data)
    while at < end and total <= most:
        control = data[at]
        if control < 32:  # control + 1 literal bytes
            total += control + 1
            at += control + 2
        elif control < 224:  # a short repetition
            total += (control >> 5) + 2
            at += 2
        else:  # a long repetition, with its length in the next byte
            total += (data[at + 1] if at + 1 < end else 0) + 9
            at += 3
    return total
