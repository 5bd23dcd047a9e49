"""NIfTI outputs: a single .nii, NIfTI 1, or 2 where an axis has more than 32,767 voxels. Needs the extra `medical`.

Several maps are a vector at each voxel, along the fifth axis, as the format defines it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from znnpy.volume.nifti import SINGLE, SIZES, UNITS
from znnpy.volume.raw_store import MOST_ATTRIBUTES, RawStore, Tiles, padding
from znnpy.volume.space import Space
from znnpy.volume.space_units import in_unit, say_unit
from znnpy.volume.store import OutputArray

MOST_SHORT = 2**15 - 1  # voxels along an axis of NIfTI 1
COMMENT = 6  # kind of a header extension: text
VECTOR = 1007  # intent
ALIGNED = 2  # code of a position: aligned to something else
ALIGNMENT = 16  # bytes


class NiftiStore(RawStore):
    """A NIfTI file: x varies fastest, then y, z and the maps. The attributes are a comment behind the header."""

    suffix = ".nii"
    dtypes = ("float32", "uint8")

    @classmethod
    def tiles(cls, array: OutputArray, dtype: np.dtype[Any], text: bytes) -> Tiles:
        return Tiles(_begin(array, text), array.shape, (array.shape[2], array.shape[3]), dtype)

    @classmethod
    def head(cls, array: OutputArray, dtype: np.dtype[Any], text: bytes) -> Iterator[bytes]:
        length, (maps, z, y, x) = _length(array), array.shape
        header = SIZES[length](endianness="<")
        header.set_data_dtype(dtype)
        header.set_data_shape((x, y, z, 1, maps) if maps > 1 else (x, y, z))
        header["intent_code"] = VECTOR if maps > 1 else 0
        header["magic"] = SINGLE[length][1]
        header["vox_offset"] = _begin(array, text)
        header["scl_slope"], header["scl_inter"] = 1, 0
        if array.space is not None:
            space, unit = _in_known_unit(array.space)
            affine = _affine(space)
            header["pixdim"][1:4] = space.scale[::-1]
            header.set_sform(affine, ALIGNED)
            header["xyzt_units"] = unit
        body = text + padding(len(text) + 8, ALIGNMENT)
        yield header.binaryblock + b"\1\0\0\0" + struct.pack("<2i", len(body) + 8, COMMENT) + body
        yield bytes(_begin(array, text) - length - 4 - 8 - len(body))

    @classmethod
    def text_of(cls, file: BinaryIO) -> bytes:
        length = int.from_bytes(os.pread(file.fileno(), 4, 0), "little")
        if length not in SIZES:
            raise ValueError("it is no NIfTI file of znnpy")
        head = os.pread(file.fileno(), 12, length)
        size, kind = struct.unpack("<2i", head[4:]) if len(head) == 12 else (0, 0)
        if head[:1] != b"\1" or kind != COMMENT or not 8 <= size <= MOST_ATTRIBUTES:
            raise ValueError("it has no attributes of znnpy")
        return os.pread(file.fileno(), size - 8, length + 12).rstrip(b"\0")

    @classmethod
    def say_lost(cls, array: OutputArray) -> None:
        space = array.space
        if space is not None and any(space.units) and not _in_known_unit(space)[1]:
            say_unit(space, "NIfTI")


def _length(array: OutputArray) -> int:
    """Return the bytes of the header, by which its version is known."""
    return min(SIZES) if max(array.shape) <= MOST_SHORT else max(SIZES)


def _begin(array: OutputArray, text: bytes) -> int:
    """Return the byte at which the voxels begin."""
    nbytes = _length(array) + 4 + 8 + len(text) + len(padding(len(text) + 8, ALIGNMENT))
    return nbytes + len(padding(nbytes, ALIGNMENT))


def _in_known_unit(space: Space) -> tuple[Space, int]:
    """Return a space in a unit that the format has, and the number of that unit; 0 where it is not a length."""
    units = {name: number for number, name in UNITS.items()}
    unit = space.units[0] if space.units[0] in units and len(set(space.units)) == 1 else "micrometer"
    found = in_unit(space, unit)
    return (space, 0) if found is None else (found, units[unit])


def _affine(space: Space) -> npt.NDArray[np.float64]:
    """Return the matrix that takes voxel (x, y, z, 1) to its position."""
    affine = np.diag([*space.scale[::-1], 1.0])
    affine[:3, 3] = space.translation[::-1]
    if space.affine is not None:
        affine[:3] = space.affine
    return affine
