"""MRC volumes (MRC2014, CCP4, and what IMOD and SerialEM write): tomograms, maps, and stacks of volumes.

Volumes of a stack are points of time.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from znnpy.errors import VolumeError
from znnpy.volume.about import About
from znnpy.volume.axes import arranged
from znnpy.volume.base import Reading
from znnpy.volume.location import Location
from znnpy.volume.raw import RawArray, RawVolume, opened
from znnpy.volume.space import Space

HEADER = 1024  # bytes
MODES = {0: "i1", 1: "i2", 2: "f4", 6: "u2", 12: "f2"}
COMPLEX = (3, 4)
LITTLE, BIG = b"\x44", b"\x11"  # first byte of the machine stamp
IMOD_STAMP = 1146047817
IMOD_SIGNED = 1  # flag: bytes are signed
VOLUME_STACKS = range(401, 631)  # space groups
UNIT = "angstrom"


@dataclass(frozen=True, slots=True)
class MrcHeader:
    """The numbers of a header that place and describe the voxels, as they are stored."""

    order: str  # "<" or ">"
    columns: tuple[int, int, int]  # voxels along columns, rows and sections
    mode: int
    start: tuple[int, int, int]  # first column, row and section
    intervals: tuple[int, int, int]  # along x, y, z
    cell: tuple[float, float, float]  # along x, y, z
    axes: tuple[int, int, int]  # of columns, rows and sections: 1 is x, 2 is y, 3 is z
    group: int
    extended: int  # bytes behind this header
    origin: tuple[float, float, float]  # x, y, z
    is_unsigned: bool  # bytes of mode 0

    @classmethod
    def of(cls, content: bytes) -> MrcHeader:
        """Read the first HEADER bytes of a file; ValueError if they are no header."""
        if len(content) < HEADER:
            raise ValueError(f"it has {len(content)} bytes, and a header alone has {HEADER:,}")
        order = _byte_order(content)
        words = struct.unpack_from(f"{order}10i3f3f3i", content)
        group, extended = struct.unpack_from(f"{order}2i", content, 88)
        stamp, flags = struct.unpack_from(f"{order}2i", content, 152)
        axes = words[16:19]
        return cls(
            order=order,
            columns=words[:3],
            mode=words[3],
            start=words[4:7],
            intervals=words[7:10],
            cell=words[10:13],
            axes=(1, 2, 3) if axes == (0, 0, 0) else axes,
            group=group,
            extended=extended,
            origin=struct.unpack_from(f"{order}3f", content, 196),
            is_unsigned=stamp == IMOD_STAMP and not flags & IMOD_SIGNED,
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the voxels; ValueError for a mode that is not read."""
        if self.mode in COMPLEX:
            return np.dtype(np.complex64)
        if self.mode not in MODES:
            raise ValueError(f"its mode is {self.mode}, and only 0, 1, 2, 6 and 12 are read")
        return np.dtype("u1" if self.mode == 0 and self.is_unsigned else f"{self.order}{MODES[self.mode]}")

    def array(self) -> tuple[RawArray, tuple[str, ...]]:
        """Return the array and the names of its axes, the fastest first; ValueError for sizes that are none."""
        if sorted(self.axes) != [1, 2, 3]:
            raise ValueError(f"its axes are {self.axes}, and have to be 1, 2 and 3 in some order")
        if min(self.columns) < 1 or self.extended < 0:
            raise ValueError(f"it has {self.columns} columns, rows and sections behind {self.extended} bytes")
        shape: tuple[int, ...] = self.columns
        names = tuple("xyz"[axis - 1] for axis in self.axes)
        depth, many = self.intervals[2], self.columns[2]
        if self.group in VOLUME_STACKS and 0 < depth < many and not many % depth:
            shape, names = (*shape[:2], depth, many // depth), (*names, "t")
        return RawArray(HEADER + self.extended, shape, self.dtype, by_columns=True), names

    def notes(self) -> Iterator[str]:
        """Yield sentences about the header."""
        if self.mode == 0:
            yield f"its bytes are {'unsigned, as its IMOD header says' if self.is_unsigned else 'signed'}"
        if self.axes != (1, 2, 3):
            yield f"its columns, rows and sections lie along {', '.join('xyz'[axis - 1] for axis in self.axes)}"

    def space(self) -> Space | None:
        """Return the position of the voxels; None if the header does not state their size."""
        if min(self.intervals) < 1 or not all(isfinite(length) and length > 0 for length in self.cell):
            return None
        x, y, z = (length / count for length, count in zip(self.cell, self.intervals, strict=True))
        origin = self.origin
        if origin == (0.0, 0.0, 0.0):  # programs write either the origin or the first voxels
            first = dict(zip(self.axes, self.start, strict=True))
            origin = (first[1] * x, first[2] * y, first[3] * z)
        if not all(map(isfinite, origin)):
            return None
        return Space((z, y, x), (origin[2], origin[1], origin[0]), (UNIT, UNIT, UNIT))


def open_volume(location: Location, reading: Reading) -> RawVolume:
    """Open an MRC file and read its header. VolumeError when it is missing, cut short, or not a volume."""
    path = location.path
    reading.missing.check_none(path)
    reading.check_single(path)
    file = opened(path, "MRC")
    try:
        header = MrcHeader.of(os.pread(file.fileno(), HEADER, 0))
        array, names = header.array()
        volume = RawVolume(path, file, array, arranged(names, array.shape, reading.time, path))
        volume.space = header.space()
        volume.described = About(f"MRC, mode {header.mode}", notes=tuple(header.notes()))
        return volume
    except VolumeError:
        file.close()
        raise
    except (OSError, ValueError) as error:
        file.close()
        raise VolumeError(f"{path} cannot be read as MRC: {error}; write it again") from None


def _byte_order(content: bytes) -> str:
    """Return "<" or ">": by the machine stamp, or by the numbers of the axes where programs left it out."""
    stamp = content[212:213]
    if stamp in (LITTLE, BIG):
        return "<" if stamp == LITTLE else ">"
    for order in "<>":
        if sorted(struct.unpack_from(f"{order}3i", content, 64)) in ([1, 2, 3], [0, 0, 0]):
            return order
    raise ValueError("it has neither a machine stamp nor axes that are 1, 2 and 3")
