"""Folders of TIFF slices: one file for each z, in natural order, so that slice2 comes before slice10."""

from __future__ import annotations

import os
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.messages import excerpt
from znnpy.patches import Box
from znnpy.planner.memory import READER_BYTES
from znnpy.shapes import Vec3
from znnpy.volume.about import About
from znnpy.volume.axes import Arranged, arranged
from znnpy.volume.base import Reading, Volume
from znnpy.volume.location import Location
from znnpy.volume.raw import opened
from znnpy.volume.regions import Region
from znnpy.volume.registry import TIFF_SUFFIXES, suffix_of
from znnpy.volume.tiff import check_same, page_axes
from znnpy.volume.tiff_pages import Directories, Page
from znnpy.volume.tiff_segments import Decoders, Segments, decoders_of, extra_bytes, packing_of, parts_of

MOST_SLICES = 10**6


class SlicesVolume(Volume):
    """A folder of TIFF files of one page each. A file is open only while it is read."""

    def __init__(self, path: Path, names: list[str], pages: list[Page], layout: Arranged, decoders: Decoders) -> None:
        super().__init__(path, "", layout.stored, pages[0].kind.dtype, layout)
        self._names, self._pages, self._decoders = names, pages, decoders
        self._kinds = {page.kind for page in pages}
        kind = pages[0].kind
        form = f"a folder of {len(names):,} TIFF slice{'s' if len(names) != 1 else ''}"
        notes = (f"the slices are {excerpt(names[0], 60)} to {excerpt(names[-1], 60)}",)
        self.described = About(form, compression=packing_of(kind), parts=parts_of(kind), notes=notes)

    @property
    def extra_bytes(self) -> int:
        return max(0, max(map(extra_bytes, self._kinds)) - READER_BYTES)

    @property
    def chunk_size(self) -> Vec3:
        packed = [kind for kind in self._kinds if not kind.is_plain]
        return (1, *packed[0].segment) if packed else (1, 1, 1)

    def close(self) -> None:
        """Do nothing: no file stays open between reads."""

    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        region, target = self.stored_region(box), self.arranged.view(out)
        area = Region(region.lo[-2:], region.hi[-2:])
        for index, number in enumerate(range(region.lo[0], region.hi[0])):
            voxels = target[index] if target.ndim > 3 else target[index][None]
            page, path = self._pages[number], self.path / self._names[number]
            with opened(path, "TIFF") as file:
                directories = Directories(file.fileno(), page.kind.order, False, os.fstat(file.fileno()).st_size)
                if not Segments(path, directories, self._decoders).read(page, area, voxels):
                    raise VolumeError(f"{path} lacks some of its voxels; copy it again")

    def stored(self) -> tuple[int, int]:
        found = [(self.path / name).stat() for name in self._names]
        return sum(status.st_size for status in found), max(status.st_mtime_ns for status in found)


def open_volume(location: Location, reading: Reading) -> SlicesVolume:
    """Open a folder of slices and read the header of each.

    VolumeError: a file is missing in their numbering, damaged, or of another size or type than the first one.
    """
    folder = location.path
    reading.missing.check_none(folder)
    reading.check_single(folder)
    names = slice_names(folder)
    pages: list[Page] = []
    decoders: Decoders = {}
    for name in names:
        path = folder / name
        with opened(path, "TIFF") as file:
            try:
                directories = Directories.of(file.fileno())
                own = [page for page in directories.pages if not page.reduced]
                if len(own) != 1:
                    raise VolumeError(
                        f"{path} has {len(own)} pages, and a slice has one; name a stack by itself, without its folder"
                    )
                if own[0].kind not in decoders:
                    decoders |= decoders_of(path, directories, own)
                check_same(folder, excerpt(name), own[0].kind, (pages or own)[0].kind)
            except VolumeError:
                raise
            except (OSError, ValueError) as error:
                raise VolumeError(f"{path} cannot be read as TIFF: {excerpt(error)}; write it again") from None
        pages += own
    inner, sizes = page_axes(pages[0].kind)
    layout = arranged(("z", *inner), (len(pages), *sizes), reading.time, folder)
    return SlicesVolume(folder, names, pages, layout, decoders)


def slice_names(folder: Path) -> list[str]:
    """Return the names of the slices in a folder, in natural order.

    VolumeError: they have several suffixes, or one is missing where all others are numbered.
    """
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if suffix_of(entry.name) in TIFF_SUFFIXES and entry.is_file()]
    if len(names) > MOST_SLICES:
        raise VolumeError(f"{folder} has {len(names):,} slices, and up to {MOST_SLICES:,} are read; name a part of it")
    suffixes = Counter(suffix_of(name) for name in names)
    if len(suffixes) != 1:
        listed = ", ".join(f"{count:,} of {suffix}" for suffix, count in suffixes.most_common()) or "none"
        raise VolumeError(
            f"{folder} has to hold TIFF slices of one suffix, and has {listed}; put the slices into a folder of their "
            "own"
        )
    names.sort(key=natural_key)
    check_numbers(folder, names)
    return names


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return what names are sorted by: numbers in them by their value, and not by their digits."""
    parts = re.split(r"(\d+)", name)
    return (*((1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts), (0, 0, name))


def check_numbers(folder: Path, names: list[str]) -> None:
    """Raise VolumeError for a gap: the names differ in one number alone, and its steps are not all the same."""
    split = [re.split(r"(\d+)", name) for name in names]
    if len(names) < 3 or len({len(parts) for parts in split}) != 1:
        return
    columns = list(zip(*split, strict=True))  # texts and numbers in turns
    changing = [place for place, column in enumerate(columns) if len(set(column)) > 1]
    if len(changing) != 1 or not changing[0] % 2:
        return
    numbers = [int(parts[changing[0]]) for parts in split]
    step = min(b - a for a, b in pairwise(numbers))
    for name, (before, after) in zip(names, pairwise(numbers), strict=False):
        if after - before != step and step:
            raise VolumeError(
                f"{folder} lacks slice {before + step:,}, which should follow {excerpt(name)}; copy the folder again, "
                "or number them anew"
            )
