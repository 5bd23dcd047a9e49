"""Find elements of HDF5 datasets that were never written: chunks not stored, and elements without a source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import h5py
import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.volume.regions import Region

MOST_CELLS = 10**8  # chunks of one source, or cells between the edges of its mappings; each takes a byte


def unwritten(dataset: h5py.h5d.DatasetID, chunk: Sequence[int]) -> Iterator[Region]:
    """Yield the regions of a dataset whose chunks are not stored; `chunk` is () for a layout without chunks.

    VolumeError: chunks are missing, and there are more than MOST_CELLS chunks.
    """
    shape = tuple(dataset.shape or ())
    if not prod(shape):
        return
    if not chunk:
        is_external = dataset.get_create_plist().get_external_count() > 0
        if not is_external and dataset.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED:
            yield Region((0,) * len(shape), shape)
        return
    counts = tuple(-(-n // size) for n, size in zip(shape, chunk, strict=True))
    stored = dataset.get_num_chunks()
    if stored == 0:
        yield Region((0,) * len(shape), shape)
    elif stored < prod(counts):
        if prod(counts) > MOST_CELLS:
            raise VolumeError(
                f"a source of a virtual dataset has {prod(counts):,} chunks, some of which are missing, and up to "
                f"{MOST_CELLS:,} are looked through; write it with larger chunks"
            )
        cells = np.zeros(counts, np.bool_)

        def note(found: h5py.h5d.StoreInfo) -> None:
            cells[tuple(at // size for at, size in zip(found.chunk_offset, chunk, strict=True))] = True

        dataset.chunk_iter(note)
        yield from _empty(cells, [[*range(0, n, size), n] for n, size in zip(shape, chunk, strict=True)])


def unmapped(shape: tuple[int, ...], boxes: Sequence[Region]) -> Iterator[Region]:
    """Yield the regions of a dataset of this shape that lie in none of the boxes."""
    if not prod(shape):
        return
    every = Region((0,) * len(shape), shape)
    boxes = [part for box in boxes if (part := box.clipped(every)).elements]
    edges = [
        sorted({0, n, *(box.lo[axis] for box in boxes), *(box.hi[axis] for box in boxes)})
        for axis, n in enumerate(shape)
    ]
    index = [{at: number for number, at in enumerate(along)} for along in edges]
    counts = tuple(len(along) - 1 for along in edges)
    if prod(counts) > MOST_CELLS:  # the boxes do not form a grid
        yield from every.without(boxes)
        return
    cells = np.zeros(counts, np.bool_)
    for box in boxes:
        ends = zip(index, box.lo, box.hi, strict=True)
        cells[tuple(slice(number[lo], number[hi]) for number, lo, hi in ends)] = True
    yield from _empty(cells, edges)


def _empty(cells: npt.NDArray[np.bool_], edges: Sequence[Sequence[int]]) -> Iterator[Region]:
    """Yield the regions of the cells that are False, one for each run along the last axis; cells begin at `edges`."""
    ends = np.diff(np.pad(~cells, [(0, 0)] * (cells.ndim - 1) + [(1, 1)]).astype(np.int8), axis=-1)
    for first, last in zip(np.argwhere(ends == 1), np.argwhere(ends == -1), strict=True):
        lo, hi = first.tolist(), [*(first[:-1] + 1).tolist(), int(last[-1])]
        yield Region(
            tuple(along[at] for along, at in zip(edges, lo, strict=True)),
            tuple(along[at] for along, at in zip(edges, hi, strict=True)),
        )
