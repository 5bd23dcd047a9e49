"""Gather the pieces of an output in memory until files of chunks are whole, so that each is written once.

The steps of a run give thin slabs. A file (a chunk, or a shard of chunks) stays here until all its values came, and is
then passed on. Which values came is kept as regions and not counted: a piece may come twice, when a column is computed
again after a device was lost. A file that has to go before it is whole, because memory is used up or the run ends, is
filled with what is stored and written, and counts as rewritten if more of it comes.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from znnpy.volume.chunked_formats import StoredArray
from znnpy.volume.regions import Region

Voxels = npt.NDArray[Any]
Place = tuple[int, tuple[int, ...]]  # number of an array, and the index of a file (maps, z, y, x)


class Files(Protocol):
    """The place where files go to, and come from."""

    def start(self, place: Place, region: Region, voxels: Voxels, buffer: Voxels) -> None:
        """Begin to write a file. `buffer`, which `voxels` is a view of, belongs to it until `finished` returns it."""

    def finished(self, *, wait: bool) -> list[Voxels]:
        """Return the buffers of files that are written; with `wait` at least one, if any is being written."""

    def read(self, number: int, region: Region) -> Voxels:
        """Return what is stored of an array."""


@dataclass(slots=True)
class _Open:
    """A file that lacks values."""

    serial: int
    region: Region
    buffer: Voxels
    voxels: Voxels  # a view of the buffer
    lacks: list[Region] = field(default_factory=list)


class Assembler:
    """Gathers the values of arrays within a number of bytes; a single file may take more.

    Once a file could not be written or read, its values are lost: the same error ends every later call, so that no
    column is taken for stored whose values were in it.

    rewritten  files that were written before they were whole, or again
    """

    def __init__(self, arrays: Sequence[StoredArray], files: Files, budget: int) -> None:
        self._arrays, self._files, self.budget = arrays, files, budget
        self._open: OrderedDict[Place, _Open] = OrderedDict()  # the one that was touched last at the end
        self._free: defaultdict[int, list[Voxels]] = defaultdict(list)  # buffers by their number of values
        self._held = 0  # bytes of all buffers
        self._serial = 0
        self._written: set[Place] = set()
        self._failed: Exception | None = None
        self.rewritten = 0

    @property
    def unfinished(self) -> Set[int]:
        """The numbers of the files that lack values; each gets a new one whenever it is begun."""
        return frozenset(one.serial for one in self._open.values())

    @property
    def held(self) -> int:
        """Bytes of all buffers."""
        return self._held

    def add(self, number: int, region: Region, voxels: Voxels) -> None:
        """Add values (maps, z, y, x) that fill a region of an array. They are copied."""
        with self._unless_failed():
            array = self._arrays[number]
            for index in _indices(region.in_steps(array.file)):
                place = number, index
                one = self._open.get(place) or self._begin(place)
                part = region.clipped(one.region)
                here = part.shifted([-at for at in one.region.lo])
                one.voxels[here.slices] = voxels[part.shifted([-at for at in region.lo]).slices]
                one.lacks = [rest for lack in one.lacks for rest in lack.without([part])]
                if one.lacks:
                    self._open.move_to_end(place)
                else:
                    del self._open[place]
                    self._pass_on(place, one)

    def flush(self, serials: Set[int] | None = None) -> None:
        """Write files that are not whole, with what is stored where they lack values; None: all of them."""
        with self._unless_failed():
            for place in [place for place, one in self._open.items() if serials is None or one.serial in serials]:
                self._evict(place)

    def settle(self) -> None:
        """Return once all files that were passed on are written."""
        with self._unless_failed():
            self._wait()

    def drop(self) -> None:
        """Forget the files that are not whole, and the buffers."""
        self._open.clear()
        self._free.clear()

    @contextmanager
    def _unless_failed(self) -> Iterator[None]:
        if self._failed is not None:
            raise self._failed
        try:
            yield
        except Exception as error:
            self._failed = error
            raise

    def _wait(self) -> None:
        while self._take_back(wait=True):
            pass

    def _begin(self, place: Place) -> _Open:
        array = self._arrays[place[0]]
        region = array.region_of(place[1])
        buffer = self._buffer(prod(array.file), array.dtype)
        self._serial += 1
        one = _Open(self._serial, region, buffer, buffer[: region.elements].reshape(region.shape), [region])
        self._open[place] = one
        return one

    def _evict(self, place: Place) -> None:
        one = self._open.pop(place)
        if one.lacks == [one.region]:
            self._free[one.buffer.size].append(one.buffer)
            return
        if place in self._written:
            self._wait()  # a read need not see a write that has not ended
        for lack in one.lacks:
            stored = self._files.read(place[0], lack)
            one.voxels[lack.shifted([-at for at in one.region.lo]).slices] = stored
        self._pass_on(place, one)

    def _pass_on(self, place: Place, one: _Open) -> None:
        if place in self._written:
            self.rewritten += 1
            self._wait()  # nor need two writes end in order
        self._written.add(place)
        self._take_back(wait=False)  # a slab may complete many files, and not all are packed at a time
        self._files.start(place, one.region, one.voxels, one.buffer)

    def _buffer(self, values: int, dtype: np.dtype[Any]) -> Voxels:
        """Return a buffer; to stay within the budget, wait for files that are being written, or evict the oldest."""
        nbytes = values * dtype.itemsize
        self._take_back(wait=False)
        while not self._free[values] and self._held + nbytes > self.budget:
            for others in list(self._free.values()):
                while others and self._held + nbytes > self.budget:
                    self._held -= others.pop().nbytes
            if self._held + nbytes <= self.budget or self._take_back(wait=True):
                continue
            if not self._open:
                break  # a single file that is larger than the budget
            self._evict(next(iter(self._open)))
        if self._free[values]:
            return self._free[values].pop()
        self._held += nbytes
        return np.empty(values, dtype)

    def _take_back(self, *, wait: bool) -> bool:
        back = self._files.finished(wait=wait)
        for buffer in back:
            self._free[buffer.size].append(buffer)
        return bool(back)


def _indices(steps: Region) -> Iterator[tuple[int, ...]]:
    yield from product(*(range(lo, hi) for lo, hi in zip(steps.lo, steps.hi, strict=True)))
