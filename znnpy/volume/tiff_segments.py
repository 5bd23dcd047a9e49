"""Read parts of the pages of TIFF files: plain strips and tiles row by row, packed ones one at a time.

Packed ones are unpacked by tifffile, behind a lock, since it is not made for several threads. They need the extra
`tiff`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import MissingExtraError, ThreadError, VolumeError
from znnpy.extras import install
from znnpy.messages import excerpt
from znnpy.volume.raw import RawArray, read_runs
from znnpy.volume.regions import Region
from znnpy.volume.tiff_pages import Directories, Kind, Page

JPEG = 7
PACKED = {5: "LZW", 8: "deflate", 32946: "deflate", 32773: "PackBits", 50000: "zstd", JPEG: "JPEG"}
PREDICTORS = {2: " of differences", 3: " of differences of floating-point numbers"}
STEPS = 4  # copies of a segment while it is unpacked
MOST_TABLES = 2**16  # bytes of the tables that JPEG segments share
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of JPEG that state a size

Decoder = Callable[..., tuple[Any, tuple[int, ...], tuple[int, ...]]]
Decoders = dict[Kind, Decoder]

_lock = threading.Lock()  # of the library, for all files


def decoders_of(path: Path, directories: Directories, pages: Iterable[Page]) -> Decoders:
    """Return the functions that unpack the segments of pages, by their kind; plain pages need none.

    They are made when a volume is opened, so that what they load counts before memory is planned. VolumeError for a
    compression that is not read, MissingExtraError without the package.
    """
    found: Decoders = {}
    for page in pages:
        if page.kind not in found and not page.kind.is_plain:
            found[page.kind] = _decoder(path, directories, page)
    return found


def _decoder(path: Path, directories: Directories, page: Page) -> Decoder:
    """Let the library make the function for pages like this one."""
    kind = page.kind
    if kind.compression not in (1, *PACKED):
        raise VolumeError(
            f"{path} has the compression {kind.compression}, and only {', '.join(dict.fromkeys(PACKED.values()))} are "
            "read; write it again without compression"
        )
    try:
        import imagecodecs  # noqa: F401 - the other one uses it
        import tifffile
    except ImportError:
        raise MissingExtraError(
            f"{path} is a compressed TIFF, which needs the packages tifffile and imagecodecs; `{install('tiff')}`"
        ) from None
    try:
        with _lock, open(os.dup(directories.descriptor), "rb", buffering=0) as file:
            opened = tifffile.TiffFile(file, name=path.name, _multifile=False)
            opened.filehandle.seek(page.at)
            found: Decoder = tifffile.TiffPage(opened, index=0).decode
    except Exception as error:  # the library raises whatever damaged pages lead to
        ThreadError.check(error)
        raise VolumeError(f"{path} cannot be read as TIFF: {excerpt(error)}; write it again") from None
    return found


def parts_of(kind: Kind) -> str:
    """Name the parts of pages that are stored together, with their size."""
    rows, columns = kind.segment
    return f"{'tiles' if kind.is_tiled else 'strips'} of {rows}x{columns} pixels"


def packing_of(kind: Kind) -> str:
    """Name the compression of pages; empty: there is none."""
    name = PACKED.get(kind.compression, "")
    return f"{name}{PREDICTORS.get(kind.predictor, '')}" if name else ""


class Segments:
    """The strips or tiles of the pages of one file."""

    def __init__(self, path: Path, directories: Directories, decoders: Mapping[Kind, Decoder]) -> None:
        self._path, self._directories, self._decoders = path, directories, decoders

    def read(self, page: Page, region: Region, out: npt.NDArray[Any]) -> bool:
        """Read rows and columns of a page into `out` (samples, rows, columns); whether all its segments are stored.

        Voxels of segments that are not stored become 0. VolumeError if the page is damaged.
        """
        kind = page.kind
        grid, whole = kind.grid, True
        touched = region.in_steps(kind.segment)
        for plane in range(kind.samples if kind.planar else 1):
            samples = slice(plane, plane + 1) if kind.planar else slice(None)
            first = (plane * grid[0] + touched.lo[0]) * grid[1]
            offsets, counts = self._places(page, first, touched.shape[0] * grid[1])
            for row in range(touched.lo[0], touched.hi[0]):
                for column in range(touched.lo[1], touched.hi[1]):
                    number = (plane * grid[0] + row) * grid[1] + column
                    corner = (row * kind.segment[0], column * kind.segment[1])
                    rows = kind.segment[0] if kind.is_tiled else min(kind.segment[0], kind.length - corner[0])
                    inside = Region(corner, (corner[0] + rows, corner[1] + kind.segment[1])).clipped(region)
                    target = out[samples][(slice(None), *inside.shifted([-at for at in region.lo]).slices)]
                    part = inside.shifted([-at for at in corner])
                    at, nbytes = int(offsets[number - first]), int(counts[number - first])
                    if not at or not nbytes:
                        target[...] = 0
                        whole = False
                        continue
                    at += page.shift
                    if kind.is_plain:
                        self._read_plain(page, at, nbytes, rows, part, target)
                    else:
                        self._read_packed(page, at, nbytes, number, part, target)
        return whole

    def _places(self, page: Page, first: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the bytes at which some segments begin, and how many bytes each has."""
        try:
            return (
                self._directories.integers(page.offsets, first, count),
                self._directories.integers(page.counts, first, count),
            )
        except (ValueError, OSError) as error:
            raise self._damaged(page, error) from None

    def _read_plain(self, page: Page, at: int, nbytes: int, rows: int, part: Region, target: npt.NDArray[Any]) -> None:
        """Read a part of a segment of so many rows that is stored as it is."""
        kind = page.kind
        extent: tuple[int, ...] = (rows, kind.segment[1], kind.interleaved)
        array = RawArray(at, extent, kind.dtype)
        if not 0 < at <= self._directories.size - (array.end - at) or nbytes < array.end - at:
            raise self._damaged(page, f"a strip or tile at byte {at:,} has {nbytes:,} bytes of {array.end - at:,}")
        there = np.moveaxis(target, 0, -1)
        if kind.interleaved > 1:
            part = Region((*part.lo, 0), (*part.hi, kind.interleaved))
        else:  # short rows are read completely, so columns have to be the last axis
            extent, there = extent[:2], there[..., 0]
        read_runs(self._directories.descriptor, array, extent, part, there, self._path)

    def _read_packed(
        self, page: Page, at: int, nbytes: int, number: int, part: Region, target: npt.NDArray[Any]
    ) -> None:
        """Unpack a segment, and copy a part of it."""
        kind = page.kind
        if not 0 < at <= self._directories.size - nbytes or nbytes > 2 * kind.segment_bytes + MOST_TABLES:
            raise self._damaged(page, f"a strip or tile at byte {at:,} has {nbytes:,} bytes")
        try:
            content = os.pread(self._directories.descriptor, nbytes, at)
            more: dict[str, Any] = {}
            if kind.compression == JPEG:
                check_jpeg(content, kind)
                more = {"jpegtables": self._tables(page)}
            with _lock:
                found, _, shape = self._decoders[kind](content, number, **more)
            voxels = np.asarray(found).reshape(shape)[0]
            if voxels.dtype.newbyteorder("=") != kind.dtype.newbyteorder("=") or len(voxels) < part.hi[0]:
                raise ValueError(f"a strip or tile unpacks to {voxels.dtype} {voxels.shape}")
            np.copyto(target, np.moveaxis(voxels[part.slices], -1, 0))
        except Exception as error:  # the library raises whatever damaged data lead to
            ThreadError.check(error)
            raise self._damaged(page, error) from None

    def _tables(self, page: Page) -> bytes | None:
        if page.tables is None:
            return None
        if page.tables.count > MOST_TABLES:
            raise ValueError(f"its JPEG tables have {page.tables.count:,} bytes")
        return self._directories.content(page.tables)

    def _damaged(self, page: Page, why: object) -> VolumeError:
        return VolumeError(
            f"{self._path} is damaged in the page whose directory is at byte {page.at:,}: {excerpt(why)}; copy it again"
        )


def extra_bytes(kind: Kind) -> int:
    """Return the memory that it takes to unpack a segment of such a page; 0 for plain ones."""
    return 0 if kind.is_plain else STEPS * kind.segment_bytes + MOST_TABLES


def check_jpeg(content: bytes, kind: Kind) -> None:
    """Raise ValueError if JPEG data state a larger picture than a segment, for which they would take memory."""
    at = 2
    while at + 9 <= len(content) and content[at] == 0xFF:
        marker = content[at + 1]
        if marker in FRAMES:
            rows, columns = (int.from_bytes(content[place : place + 2], "big") for place in (at + 5, at + 7))
            if rows > kind.segment[0] + 16 or columns > kind.segment[1] + 16:
                raise ValueError(f"a strip or tile has a JPEG of {rows:,} x {columns:,} pixels")
            return
        at += 1 if marker == 0xFF else 2 + int.from_bytes(content[at + 2 : at + 4], "big")
    raise ValueError("a strip or tile has JPEG data without a size")
