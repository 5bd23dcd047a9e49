"""TIFF volumes: stacks in one file, OME-TIFF, ImageJ's stacks, BigTIFF; in strips or tiles, plain or compressed.

Pages are slices along z unless metadata say otherwise. Colours are channels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.messages import excerpt, option
from znnpy.option_values import MissingChunks
from znnpy.patches import Box
from znnpy.planner.memory import READER_BYTES
from znnpy.shapes import Vec3
from znnpy.volume.about import About, Inside
from znnpy.volume.axes import Arranged, arranged
from znnpy.volume.base import Reading, Volume, pick
from znnpy.volume.location import Location
from znnpy.volume.raw import opened
from znnpy.volume.regions import Region
from znnpy.volume.tiff_pages import Directories, Kind, Page
from znnpy.volume.tiff_segments import Segments, decoders_of, extra_bytes, packing_of, parts_of
from znnpy.volume.tiff_series import NOT_STORED, Series, series_of


class TiffVolume(Volume):
    """One series of pages of a TIFF file."""

    def __init__(
        self,
        path: Path,
        file: BinaryIO,
        directories: Directories,
        series: Series,
        layout: Arranged,
        *,
        name: str,
        missing: MissingChunks,
    ) -> None:
        """Check that the series can be a volume.

        name     of the series; empty where the file has one
        missing  how to treat pages, strips and tiles that the metadata name and the file does not have
        """
        pages = pages_of(directories, series)
        super().__init__(path, name, layout.stored, pages[0].kind.dtype, layout)
        self.space = series.space
        self._file, self._directories, self._series, self._missing = file, directories, series, missing
        self._kinds = {page.kind for page in pages}
        self._segments = Segments(path, directories, decoders_of(path, directories, pages))

    @property
    def extra_bytes(self) -> int:
        return max(0, max(map(extra_bytes, self._kinds)) - READER_BYTES)

    @property
    def chunk_size(self) -> Vec3:
        """Size of a compressed strip or tile; parts of plain ones are read by themselves."""
        packed = [kind for kind in self._kinds if not kind.is_plain]
        return (1, *packed[0].segment) if packed else (1, 1, 1)

    def close(self) -> None:
        self._file.close()

    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        region, target = self.stored_region(box), self.arranged.view(out)
        outer = self._series.pages.ndim
        area = Region(region.lo[-2:], region.hi[-2:])
        for index in np.ndindex(region.shape[:outer]):
            number = int(self._series.pages[tuple(np.add(region.lo[:outer], index))])
            voxels = target[index] if target.ndim > outer + 2 else target[index][None]
            whole = number != NOT_STORED
            if whole:
                whole = self._segments.read(self._directories.pages[number], area, voxels)
            else:
                voxels[...] = 0
            if not whole and self._missing == "error":
                raise VolumeError(
                    f"{self} lacks voxels of the slice {tuple(map(int, index))} that is read, at (z, y, x) = {box.lo}; "
                    f"copy it again, or leave out {option('missing_chunks', 'error')} to read them as 0"
                )

    def stored(self) -> tuple[int, int]:
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns


def open_volume(location: Location, reading: Reading) -> TiffVolume:
    """Open a TIFF file: the named series, or the only one that can be a volume.

    VolumeError when it is missing, damaged, or not a volume, and when the choice of series is not clear.
    """
    path = location.path
    reading.missing.check_fill(path)
    reading.check_single(path, dataset=False)
    file = opened(path, "TIFF")
    try:
        directories = Directories.of(file.fileno())
        found = series_of(directories)
        name, series = _chosen(path, directories, found, reading.dataset)
        layout = layout_of(path, directories, series, reading.time)
        shown = name if len(found) > 1 else ""
        volume = TiffVolume(path, file, directories, series, layout, name=shown, missing=reading.missing.chunks)
        volume.described = _about(directories, series, found)
        return volume
    except VolumeError:
        file.close()
        raise
    except (OSError, ValueError) as error:
        file.close()
        raise VolumeError(f"{path} cannot be read as TIFF: {excerpt(error)}; write it again") from None
    except BaseException:
        file.close()
        raise


def _about(directories: Directories, series: Series, found: list[Series]) -> About:
    """Return how a series is stored, and which others the file has."""
    kind = pages_of(directories, series)[0].kind
    form = "BigTIFF" if directories.is_big else "TIFF"
    inside = []
    for number, one in enumerate(found):
        own = pages_of(directories, one)[0].kind
        shape = (*one.pages.shape, *page_axes(own)[1])
        inside.append(Inside(str(number), shape, own.dtype.newbyteorder("=").name, one.space))
    smaller = sum(page.reduced for page in directories.pages)
    notes = (f"smaller copies are left out: {smaller:,} page{'s' if smaller != 1 else ''}",) if smaller else ()
    return About(
        f"{form}, {series.form}" if series.form else form,
        compression=packing_of(kind),
        parts=parts_of(kind),
        datasets=tuple(inside) if len(inside) > 1 else (),
        notes=notes,
    )


def page_axes(kind: Kind) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the names and lengths of the axes of a page as it is read."""
    if kind.samples == 1:
        return ("y", "x"), (kind.length, kind.width)
    return ("c", "y", "x"), (kind.samples, kind.length, kind.width)


def layout_of(path: Path, directories: Directories, series: Series, time: int | None) -> Arranged:
    """Return how a series becomes a volume; VolumeError where pages differ, or axes do not suit."""
    pages = pages_of(directories, series)
    for number, page in enumerate(pages):
        check_same(path, f"slice {number:,}", page.kind, pages[0].kind)
    inner, sizes = page_axes(pages[0].kind)
    outer = tuple("channel" if name == "c" and "c" in inner else name for name in series.axes)
    return arranged((*outer, *inner), (*series.pages.shape, *sizes), time, path)


def pages_of(directories: Directories, series: Series) -> list[Page]:
    """Return the pages of a series that the file has."""
    return [directories.pages[number] for number in series.pages[series.pages != NOT_STORED].tolist()]


def check_same(path: Path, what: str, kind: Kind, first: Kind) -> None:
    """Raise VolumeError if a slice of this kind cannot follow the first one of its volume."""
    if kind.picture != first.picture:
        raise VolumeError(
            f"{path}: {what} has {_described(kind)}, and the first one has {_described(first)}; a volume needs slices "
            "of one size and type"
        )


def _described(kind: Kind) -> str:
    samples = f" of {kind.samples} samples" if kind.samples > 1 else ""
    return f"{kind.length} x {kind.width} pixels{samples} of {kind.dtype.newbyteorder('=')}"


def _chosen(path: Path, directories: Directories, found: list[Series], wanted: str | None) -> tuple[str, Series]:
    """Return the number and the series that is named by number or name, or the only one that can be a volume."""
    arrays: dict[str, tuple[tuple[int, ...] | None, np.dtype[Any]]] = {}
    for number, series in enumerate(found):
        kind = pages_of(directories, series)[0].kind
        is_picture = series.pages.size == 1
        shape = (kind.length, kind.width) if is_picture else (series.pages.size, kind.length, kind.width)
        arrays[str(number)] = (shape, kind.dtype)
    named = [str(number) for number, series in enumerate(found) if series.name == wanted]
    if wanted is not None and wanted not in arrays and len(named) == 1:
        wanted = named[0]
    if len(found) == 1 and wanted is None:
        return "0", found[0]
    name = pick(arrays, wanted, path)
    return name, found[int(name)]
