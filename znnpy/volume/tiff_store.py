"""OME-TIFF outputs: BigTIFF in tiles without compression, with all directories in front of the voxels."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from znnpy.volume.lengths import length_unit
from znnpy.volume.ome_xml import TYPES, ome_xml
from znnpy.volume.raw_store import MOST_ATTRIBUTES, RawStore, Tiles, padding
from znnpy.volume.space_units import say_turned, say_unit
from znnpy.volume.store import OutputArray
from znnpy.volume.tiff_pages import (
    BITS,
    COMPRESSION,
    DESCRIPTION,
    LENGTH,
    PHOTOMETRIC,
    SAMPLE_FORMAT,
    SAMPLES,
    TILE_COUNTS,
    TILE_LENGTH,
    TILE_OFFSETS,
    TILE_WIDTH,
    WIDTH,
    Directories,
)

NAME = "prediction"  # of the image
HEADER = 16  # bytes
PAGE = 4096  # bytes: voxels begin at a multiple
TILE = 256  # largest number of rows and columns of a tile
STEP = 16  # rows and columns of tiles are multiples of it
ATTRIBUTES = 65127  # private field of the first directory: the attributes of znnpy, JSON
SHORT, LONG, ASCII, LONG8 = 3, 4, 2, 16  # types of fields

Field = tuple[int, int, int, bytes]  # tag, type, number of values, values


class TiffStore(RawStore):
    """An OME-TIFF file whose pages are the planes, those of the first map first."""

    suffix = ".tif"
    dtypes = tuple(sorted(TYPES, reverse=True))

    @classmethod
    def tiles(cls, array: OutputArray, dtype: np.dtype[Any], text: bytes) -> Tiles:
        size = (_tile(array.shape[2]), _tile(array.shape[3]))
        draft = Tiles(0, array.shape, size, dtype)
        one, another = (_directory_bytes(_fields(draft, 0, 0, *more)) for more in (_first(array, dtype, text), ()))
        nbytes = sum(map(len, _front(array, dtype, text))) + one + (array.shape[0] * array.shape[1] - 1) * another
        return Tiles(nbytes + len(padding(nbytes, PAGE)), array.shape, size, dtype)

    @classmethod
    def head(cls, array: OutputArray, dtype: np.dtype[Any], text: bytes) -> Iterator[bytes]:
        tiles = cls.tiles(array, dtype, text)
        at = 0
        for part in _front(array, dtype, text):
            yield part
            at += len(part)
        pages = array.shape[0] * array.shape[1]
        for page in range(pages):
            more = () if page else _first(array, dtype, text)
            part = _directory(_fields(tiles, *divmod(page, array.shape[1]), *more), at, is_last=page == pages - 1)
            yield part
            at += len(part)
        yield padding(at, PAGE)

    @classmethod
    def text_of(cls, file: BinaryIO) -> bytes:
        found = Directories.of(file.fileno(), most=1)
        field = found.first.get(ATTRIBUTES)
        if field is None or field.kind != ASCII or field.count > MOST_ATTRIBUTES:
            raise ValueError("it has no attributes of znnpy")
        return found.content(field).rstrip(b"\0")

    @classmethod
    def say_lost(cls, array: OutputArray) -> None:
        space = array.space
        say_turned([space], "OME-TIFF")
        if space is not None and not all(unit is None or length_unit(unit) for unit in space.units):
            say_unit(space, "OME-TIFF")


def _tile(size: int) -> int:
    """Return the rows or columns of a tile, so that the last one is nearly full."""
    count = -(-size // TILE)
    each = -(-size // count)
    return each + -each % STEP


def _front(array: OutputArray, dtype: np.dtype[Any], text: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the header of the file, the description and the attributes."""
    words = ome_xml(NAME, array.shape, dtype.name, array.space).encode()
    description, attributes = (part + b"\0" + padding(len(part) + 1, 8) for part in (words, text))
    first = HEADER + len(description) + len(attributes)
    return struct.pack("<2s3HQ", b"II", 43, 8, 0, first), description, attributes


def _first(array: OutputArray, dtype: np.dtype[Any], text: bytes) -> tuple[Field, Field]:
    """Return the fields that the first page alone has: they point to the front of the file."""
    header, description, _ = _front(array, dtype, text)
    at = len(header)
    return (
        (DESCRIPTION, ASCII, len(description.rstrip(b"\0")) + 1, struct.pack("<Q", at)),
        (ATTRIBUTES, ASCII, len(text) + 1, struct.pack("<Q", at + len(description))),
    )


def _fields(tiles: Tiles, channel: int, z: int, *more: Field) -> list[Field]:
    """Return the fields of the directory of a plane."""
    down, across = tiles.grid
    count = down * across
    begin = tiles.address(channel, z, 0, 0)
    places = np.arange(begin, begin + count * tiles.tile_bytes, tiles.tile_bytes, dtype="<u8")
    sizes = np.full(count, tiles.tile_bytes, "<u8")
    form = 3 if tiles.dtype.kind == "f" else 1
    return sorted(
        [
            (WIDTH, LONG, 1, struct.pack("<I", tiles.shape[3])),
            (LENGTH, LONG, 1, struct.pack("<I", tiles.shape[2])),
            (BITS, SHORT, 1, struct.pack("<H", 8 * tiles.dtype.itemsize)),
            (COMPRESSION, SHORT, 1, struct.pack("<H", 1)),
            (PHOTOMETRIC, SHORT, 1, struct.pack("<H", 1)),
            (SAMPLES, SHORT, 1, struct.pack("<H", 1)),
            (TILE_WIDTH, LONG, 1, struct.pack("<I", tiles.size[1])),
            (TILE_LENGTH, LONG, 1, struct.pack("<I", tiles.size[0])),
            (TILE_OFFSETS, LONG8, count, places.tobytes()),
            (TILE_COUNTS, LONG8, count, sizes.tobytes()),
            (SAMPLE_FORMAT, SHORT, 1, struct.pack("<H", form)),
            *more,
        ]
    )


def _directory_bytes(fields: list[Field]) -> int:
    """Return the bytes of a directory and of the values behind it."""
    return 16 + 20 * len(fields) + sum(len(values) for _, _, _, values in fields if len(values) > 8)


def _directory(fields: list[Field], at: int, *, is_last: bool) -> bytes:
    """Return a directory that lies at byte `at`, and behind it the values that do not fit into it."""
    content = struct.pack("<Q", len(fields))
    behind = b""
    end = at + 16 + 20 * len(fields)
    for tag, kind, count, values in fields:
        inside = values.ljust(8, b"\0")
        if len(values) > 8:
            inside = struct.pack("<Q", end + len(behind))
            behind += values
        content += struct.pack("<2HQ", tag, kind, count) + inside
    return content + struct.pack("<Q", 0 if is_last else end + len(behind)) + behind
