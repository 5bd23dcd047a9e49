"""MRC outputs (MRC2014): one map, float32 or float16. The attributes are in the extended header."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from znnpy.errors import OutputError
from znnpy.messages import option
from znnpy.volume.mrc import HEADER, LITTLE, UNIT, MrcHeader
from znnpy.volume.raw_store import MOST_ATTRIBUTES, SEVERAL, RawStore, Tiles, padding
from znnpy.volume.space_units import in_unit, say_turned, say_unit
from znnpy.volume.store import OutputArray

MODES = {"float32": 2, "float16": 12}
VERSION = 20141
KIND = b"ZNNP"  # of the extended header
LABEL = b"Written by znnpy"
ALIGNMENT = 16  # bytes
UNKNOWN = (0.0, -1.0, -2.0)  # smallest, largest and mean value: not determined, since the first is above the second


class MrcStore(RawStore):
    """An MRC file: x varies fastest, then y and z."""

    suffix = ".mrc"
    dtypes = tuple(MODES)

    @classmethod
    def check_arrays(cls, arrays: Sequence[OutputArray]) -> None:
        super().check_arrays(arrays)
        if arrays[0].shape[0] > 1:
            raise OutputError(
                f"the output has {arrays[0].shape[0]} maps, and an MRC output holds one; give {', '.join(SEVERAL)} or "
                f".tif in {option('out')}"
            )

    @classmethod
    def tiles(cls, array: OutputArray, dtype: np.dtype[Any], text: bytes) -> Tiles:
        begin = HEADER + len(text) + len(padding(len(text), ALIGNMENT))
        return Tiles(begin, array.shape, (array.shape[2], array.shape[3]), dtype)

    @classmethod
    def head(cls, array: OutputArray, dtype: np.dtype[Any], text: bytes) -> Iterator[bytes]:
        _, z, y, x = array.shape
        space = None if array.space is None else in_unit(array.space, UNIT)
        cell, origin = (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)
        if space is not None:
            cell = (x * space.scale[2], y * space.scale[1], z * space.scale[0])
            origin = (space.translation[2], space.translation[1], space.translation[0])
        extended = text + padding(len(text), ALIGNMENT)
        content = bytearray(HEADER)
        struct.pack_into("<10i", content, 0, x, y, z, MODES[dtype.name], 0, 0, 0, x, y, z)
        struct.pack_into("<6f3i3f", content, 40, *cell, 90, 90, 90, 1, 2, 3, *UNKNOWN)
        struct.pack_into("<2i", content, 88, 1, len(extended))
        struct.pack_into("<4si", content, 104, KIND, VERSION)
        struct.pack_into("<3f4s4sfi", content, 196, *origin, b"MAP ", LITTLE * 2, -1.0, 1)
        content[224 : 224 + 80] = LABEL.ljust(80)
        yield bytes(content)
        yield extended

    @classmethod
    def text_of(cls, file: BinaryIO) -> bytes:
        content = os.pread(file.fileno(), HEADER, 0)
        size = MrcHeader.of(content).extended
        if content[104:108] != KIND or not 0 < size <= MOST_ATTRIBUTES:
            raise ValueError("it has no attributes of znnpy")
        return os.pread(file.fileno(), size, HEADER).rstrip(b"\0")

    @classmethod
    def say_lost(cls, array: OutputArray) -> None:
        space = array.space
        say_turned([space], "MRC")
        if space is not None and any(space.units) and in_unit(space, UNIT) is None:
            say_unit(space, "MRC")
