"""Find out which pages of a TIFF file are slices of which image: by OME-XML, the words of ImageJ, or their order."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import isfinite, prod

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from znnpy.messages import excerpt
from znnpy.volume.lengths import length_unit
from znnpy.volume.ome_xml import MOST_BYTES, OmeImage, read_ome
from znnpy.volume.space import Space
from znnpy.volume.tiff_pages import MOST_PAGES, X_RESOLUTION, Y_RESOLUTION, Directories, Page

NOT_STORED = -1  # index of a page that the file does not have
OTHER_AXES = ("q", "i")  # letters of tifffile for an axis of no meaning


@dataclass(frozen=True, slots=True)
class Series:
    """One image of a file.

    axes   names of the axes along which its pages lie
    pages  index of the page of each slice, along these axes
    form   what its metadata are, such as "OME-TIFF"; empty: there are none, or they are plain
    """

    name: str
    axes: tuple[str, ...]
    pages: npt.NDArray[np.int64]
    space: Space | None = None
    form: str = ""


def series_of(directories: Directories) -> list[Series]:
    """Return the images of a file. ValueError if its description is damaged.

    Pages may be added for slices that follow a page without directories of their own.
    """
    text = directories.description(MOST_BYTES)
    if text.rstrip().endswith("OME>") or "<OME " in text[:1000]:
        return _of_ome(directories, text)
    own = [page for page in directories.pages if not page.reduced]
    if text.startswith("ImageJ="):
        found = _of_imagej(directories, text, own)
    elif text.startswith("{"):
        found = _of_shape(directories, text, own)
    else:
        found = None
    return [found] if found is not None else _in_order(directories)


def _in_order(directories: Directories) -> list[Series]:
    """Return a series for the pages of each size and type; smaller copies are left out, unless all are such."""
    kinds: dict[object, list[int]] = {}
    all_reduced = all(page.reduced for page in directories.pages)
    for number, page in enumerate(directories.pages):
        if all_reduced or not page.reduced:
            kinds.setdefault(page.kind.picture, []).append(number)
    return [Series(str(number), ("z",), np.array(pages, np.int64)) for number, pages in enumerate(kinds.values())]


def _of_ome(directories: Directories, text: str) -> list[Series]:
    images, own = read_ome(text)
    found = [_of_image(directories, image, own) for image in images]
    known = [one for one in found if (one.pages != NOT_STORED).any()]
    if not known:
        raise ValueError("its OME-XML names no pages of this file; give the file that holds them")
    return known


def _of_image(directories: Directories, image: OmeImage, own: str | None) -> Series:
    sizes = dict(image.sizes)
    if not 0 < image.samples <= sizes["c"] or sizes["c"] % image.samples:
        raise ValueError(f"its OME-XML has {sizes['c']} channels, of which {image.samples} lie in each page")
    sizes["c"] //= image.samples
    axes = tuple(reversed(image.order))
    shape = tuple(sizes[axis] for axis in axes)
    if prod(shape) > MOST_PAGES:
        raise ValueError(f"its OME-XML has {prod(shape):,} planes, and up to {MOST_PAGES:,} are read")
    files = {run.file for run in image.runs}
    if len(files) > 1 or (own is not None and files - {None, own}):
        raise ValueError("its planes lie in several files; write them to one, or name a folder of slices")
    flat = np.full(prod(shape), NOT_STORED, np.int64)
    for run in image.runs:
        at = [run.first[axis] for axis in axes]
        if any(index >= size for index, size in zip(at, shape, strict=True)):
            raise ValueError(f"its OME-XML has a plane {tuple(at)} of {shape}")
        first, page = int(np.ravel_multi_index(at, shape)), run.page or 0
        count = run.count if run.count is not None else 1 if run.page is not None else flat.size
        count = max(0, min(count, flat.size - first, len(directories.pages) - page))
        flat[first : first + count] = np.arange(page, page + count)
    for number in flat[flat != NOT_STORED]:
        kind = directories.pages[number].kind
        if (kind.length, kind.width, kind.samples) != (image.sizes["y"], image.sizes["x"], image.samples):
            raise ValueError(
                f"page {number:,} has {kind.length} x {kind.width} pixels of {kind.samples} samples, and its OME-XML "
                f"says {image.sizes['y']} x {image.sizes['x']} of {image.samples}"
            )
    return Series(image.name, axes, flat.reshape(shape), image.space, "OME-TIFF")


def _of_imagej(directories: Directories, text: str, own: list[Page]) -> Series | None:
    words = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    shape = tuple(_count(words.get(name, "1")) for name in ("frames", "slices", "channels"))
    images = _count(words.get("images", "1"))
    if prod(shape) != images:
        shape = (1, images, 1)
    pages = _following(directories, own, images)
    if pages is None:
        return None
    return Series("0", ("t", "z", "c"), pages.reshape(shape), _imagej_space(directories, words), "ImageJ")


def _imagej_space(directories: Directories, words: dict[str, str]) -> Space | None:
    """Return the size of voxels that ImageJ states: pixels for each unit across a page, and the distance of pages."""
    across, down = directories.ratio(X_RESOLUTION), directories.ratio(Y_RESOLUTION)
    unit = words.get("unit", "").replace("\\u00B5", "µ").replace("\\u00C5", "Å")
    if across is None or down is None or unit in ("", "pixel", "pixels"):
        return None
    try:
        spacing = float(words.get("spacing", "1"))
    except ValueError:
        return None
    if not isfinite(spacing) or spacing == 0:
        return None
    return Space((abs(spacing), 1 / down, 1 / across), units=(length_unit(unit),) * 3)


def _of_shape(directories: Directories, text: str, own: list[Page]) -> Series | None:
    """Return the series of the shape that tifffile wrote as JSON; None where it does not fit the pages."""
    try:
        said = from_json(text)
    except ValueError:
        return None
    shape = said.get("shape") if isinstance(said, dict) else None
    if not isinstance(shape, list) or not 2 <= len(shape) <= 12 or not all(type(n) is int and n > 0 for n in shape):
        return None
    kind = (own or directories.pages)[0].kind
    page = {1: (kind.length, kind.width)}.get(kind.samples, (kind.length, kind.width, kind.samples))
    if kind.planar:
        page = (kind.samples, kind.length, kind.width)
    if tuple(shape[-len(page) :]) != page:
        return None
    outer = tuple(shape[: -len(page)])
    pages = _following(directories, own, prod(outer))
    if pages is None:
        return None
    axes = said.get("axes")
    if isinstance(axes, str) and len(axes) == len(shape):
        names = tuple(axes.lower()[: len(outer)])
        if "z" not in names and sum(name in OTHER_AXES for name in names) == 1:
            names = tuple("z" if name in OTHER_AXES else name for name in names)
        if len(set(names)) == len(names):
            return Series("0", names, pages.reshape(outer))
    unnamed = tuple(f"axis {number}" for number in range(len(outer) - 2))
    return Series("0", (*unnamed, "c", "z")[len(unnamed) + 2 - len(outer) :], pages.reshape(outer))


def _following(directories: Directories, own: list[Page], count: int) -> npt.NDArray[np.int64] | None:
    """Return the indices of so many pages; pages without a directory follow the only one that has one.

    None if there are more pages, fewer, or of several kinds. ValueError if there are far too many.
    """
    if count > MOST_PAGES:
        raise ValueError(f"it has {count:,} pages, and up to {MOST_PAGES:,} are read")
    first = own[0] if own else directories.pages[0]
    if len(own) == 1 and count > 1 and first.kind.is_plain and first.offsets.count == 1:
        size = first.kind.page_bytes
        more = [replace(first, shift=number * size) for number in range(1, count)]
        directories.pages.extend(more)
        own = [*own, *more]
    if len(own) != count or any(page.kind.picture != first.kind.picture for page in own):
        return None
    places = {id(page): number for number, page in enumerate(directories.pages)}
    return np.array([places[id(page)] for page in own], np.int64)


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,9}", text.strip()):
        raise ValueError(f"its description has the number {excerpt(text, 20)!r}")
    return int(text)
