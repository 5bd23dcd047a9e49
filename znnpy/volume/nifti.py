"""NIfTI volumes: .nii in versions 1 and 2, and .nii.gz, which is unpacked first. Needs the extra `medical`."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from znnpy.errors import MissingExtraError, VolumeError
from znnpy.extras import install
from znnpy.messages import excerpt
from znnpy.volume.about import About
from znnpy.volume.axes import arranged
from znnpy.volume.base import Reading
from znnpy.volume.location import Location
from znnpy.volume.raw import RawArray, RawVolume, opened
from znnpy.volume.space import Space
from znnpy.volume.unpacked import UnpackedVolume

try:
    from nibabel.nifti1 import Nifti1Header
    from nibabel.nifti2 import Nifti2Header
except ImportError:
    raise MissingExtraError(
        f"reading and writing .nii needs the package nibabel, which is not installed; `{install('medical')}`"
    ) from None

SIZES = {348: Nifti1Header, 540: Nifti2Header}  # by the length of the header
SINGLE = {348: (344, b"n+1\0"), 540: (4, b"n+2\0\r\n\x1a\n")}  # where the mark of a single file is, and the mark
ORDERS: dict[str, Literal["little", "big"]] = {"<": "little", ">": "big"}
DTYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8"}
COMPLEX = (32, 1792, 2048)
COLOURS = {128: 3, 2304: 4}  # bytes of a voxel
UNITS = {1: "meter", 2: "millimeter", 3: "micrometer"}
VECTORS = (1005, 1006, 1007)  # intents: symmetric matrix, displacement vector, vector
AXES = ("x", "y", "z", "t", "c", "6", "7")
PACKED = b"\x1f\x8b"


def open_volume(location: Location, reading: Reading) -> RawVolume:
    """Open a NIfTI file and read its header. VolumeError when it is missing, cut short, a pair, or not a volume."""
    path = location.path
    reading.missing.check_none(path)
    reading.check_single(path)
    file = opened(path, "NIfTI")
    try:
        packed = os.pread(file.fileno(), 2, 0) == PACKED
        content = _beginning(file, packed=packed)
        length, order = _kind(path, content)
        header = SIZES[length](content[:length], endianness=order, check=False)
        array, names = _array(header, length, order)
        layout = arranged(names, array.shape, reading.time, path)
        volume = (UnpackedVolume if packed else RawVolume)(path, file, array, layout)
        volume.space = _space(header)
        form = f"NIfTI {1 if length == min(SIZES) else 2}"
        volume.described = About(form, compression="gzip" if packed else "", notes=tuple(_notes(header, array)))
        return volume
    except VolumeError:
        file.close()
        raise
    except Exception as error:  # the library raises whatever a damaged header leads to
        file.close()
        raise VolumeError(f"{path} cannot be read as NIfTI: {excerpt(error)}; write it again") from None


def _beginning(file: BinaryIO, *, packed: bool) -> bytes:
    """Return the bytes that hold a header of either version, or fewer where there are no more."""
    most = max(SIZES)
    if not packed:
        return os.pread(file.fileno(), most, 0)
    try:
        return zlib.decompressobj(31).decompress(os.pread(file.fileno(), 64 * most, 0), most)
    except zlib.error as error:
        raise ValueError(f"it cannot be unpacked ({error})") from None


def _kind(path: Path, content: bytes) -> tuple[int, str]:
    """Return the length of a header, by which its version is known, and its byte order.

    VolumeError for pairs of files, ValueError for what is no header.
    """
    said = {order: int.from_bytes(content[:4], name) for order, name in ORDERS.items()}
    found = [(size, order) for order, size in said.items() if size in SIZES and len(content) >= size]
    if not found:
        raise ValueError("it does not begin with a header of NIfTI 1 or 2")
    at, mark = SINGLE[found[0][0]]
    if content[at : at + len(mark)] != mark:
        raise VolumeError(
            f"{path} is half of a pair of files (.hdr and .img, NIfTI or ANALYZE), and only single .nii files are "
            "read; save it as .nii"
        )
    return found[0]


def _array(header: Any, length: int, order: str) -> tuple[RawArray, tuple[str, ...]]:
    """Return the array that a header describes, and the names of its axes, the fastest first.

    length  of the header in bytes
    order   of the bytes, "<" or ">"
    """
    sizes = [int(size) for size in header["dim"]]
    if not 1 <= sizes[0] <= len(AXES):
        raise ValueError(f"it has {sizes[0]} axes")
    shape, names = tuple(sizes[1 : sizes[0] + 1]), AXES[: sizes[0]]
    if min(shape) < 0:
        raise ValueError(f"its sizes are {shape}")
    if len(shape) == 4 and int(header["intent_code"]) in VECTORS:
        names = (*names[:3], "c")
    dtype: np.dtype[Any]
    code = int(header["datatype"])
    if code in COLOURS:
        if "c" in names and shape[-1] > 1:
            raise ValueError("it has channels of colours")
        names = tuple("5" if name == "c" else name for name in names)
        shape, names, dtype = (COLOURS[code], *shape), ("c", *names), np.dtype("u1")
    elif code in COMPLEX:
        dtype = np.dtype(np.complex64)
    elif code in DTYPES:
        dtype = np.dtype(order + DTYPES[code])
    else:
        raise ValueError(f"its data type has the number {code}")
    offset = float(header["vox_offset"]) or length + 4
    if not length <= offset < 2**60:
        raise ValueError(f"its voxels begin at byte {offset:g}")
    slope, intercept = float(header["scl_slope"]), float(header["scl_inter"])
    intercept = intercept if isfinite(intercept) else 0.0
    if not isfinite(slope) or slope == 0 or (slope, intercept) == (1, 0) or code in (*COLOURS, *COMPLEX):
        return RawArray(int(offset), shape, dtype, by_columns=True), names
    return RawArray(int(offset), shape, dtype, by_columns=True, slope=slope, intercept=intercept), names


def _notes(header: Any, array: RawArray) -> Iterator[str]:
    """Yield sentences about the header."""
    if array.slope is not None:
        stored = array.dtype.name
        yield f"a voxel is the stored {stored} number times {array.slope:.6g}, plus {array.intercept:.6g}"
    if int(header["sform_code"]) <= 0 and int(header["qform_code"]) <= 0:
        yield "it states no orientation, so its axes are taken to run to the right, to the front and upwards"


def _space(header: Any) -> Space | None:
    """Return the position of the voxels: by the sform, else the qform, else their size; None where none is stated."""
    if int(header["sform_code"]) > 0:
        affine = header.get_sform()
    elif int(header["qform_code"]) > 0:
        try:
            affine = header.get_qform()
        except Exception:  # the library raises several kinds of errors for numbers that are no rotation
            return None
    else:
        affine = np.diag([*map(float, header["pixdim"][1:4]), 1.0])
    return Space.turned(np.asarray(affine, np.float64)[:3], UNITS.get(int(header["xyzt_units"]) & 7))
