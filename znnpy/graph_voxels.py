"""Recompute voxels of an output of a graph that is computed whole, in float64 from a volume.

Voxels near each other depend on nearly the same part of the volume, and this part may be large: voxels are drawn in
groups, and those of a group are recomputed together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from znnpy.admissible import admissible
from znnpy.geometry import NOTHING, Geometry, Interval
from znnpy.graph_crop import outputs_in
from znnpy.graph_operations import Region
from znnpy.kernels.definition import Real
from znnpy.patches import Box
from znnpy.shapes import Vec3, add, ceil_divide
from znnpy.trained import TrainedNetwork
from znnpy.volume.base import Volume
from znnpy.volume.source import Source

GROUP = 64  # voxels that are drawn from one cell, if each cell takes long
LEAST_CELLS = 3  # in two corners, where few voxels are read, and elsewhere
SPREAD = 2**21  # voxels of the volume that are read for cells in other places, where that allows more of them
BLOCK = 2**14  # voxels at a time, so that memory does not grow with their number
FEW = 4  # cells for which all of the volume is computed instead
MOST_VALUES = 2**25  # of a tensor, in float64, if all of the volume is computed
CELL = 8  # least voxels of a cell along each axis

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GraphVoxels:
    """An output of a graph by definition; positions count from the first voxel of the predicted region."""

    trained: TrainedNetwork
    volume: Volume
    number: int  # of the output
    first: Vec3  # voxel of the output with which the predicted region begins

    @property
    def _tensor(self) -> int:
        return self.trained.network.outputs[self.number]

    @cached_property
    def _source(self) -> Source:
        """The whole volume, padded to what the network admits."""
        return Source(self.volume, roi=None, border="valid", network=self.trained.network, allow_nan=False)

    @cached_property
    def _geometry(self) -> Geometry:
        return admissible(self.trained.network, self.volume.size)

    @cached_property
    def _cell(self) -> Vec3:
        """Voxels of the output that are recomputed together: whole periods, of CELL voxels at least."""
        z, y, x = (-(-CELL // each) * each for each in self._geometry.voxels(self._tensor))
        return z, y, x

    @property
    def _crop(self) -> int:
        """Voxels of the volume that a cell depends on, at most."""
        return prod(add(self._source.field_of_view, self._cell))

    @cached_property
    def _everything(self) -> Real | None:
        """All of the output, if computing it takes no more than recomputing a few cells; else None."""
        geometry, network = self._geometry, self.trained.network
        most = max(maps * prod(geometry.size(tensor)) for tensor, maps in enumerate(network.maps))
        if prod(geometry.volume) > FEW * self._crop or most > MOST_VALUES:
            return None
        return self._computed(_region((0, 0, 0), geometry.size(self._tensor)))

    def drawn(self, size: Vec3, samples: int, seed: int) -> Iterator[Places]:
        """Yield `samples` different voxels at most, up to BLOCK at a time as (n, 3).

        The output is divided into cells and these into equal ranges. From each range one cell is drawn, the first and
        the last cell always, and voxels from the cell. Where everything is computed, a cell is one voxel.
        """
        cell, wanted_cells = self._cell, max(LEAST_CELLS, -(-samples // GROUP), SPREAD // self._crop)
        if self._everything is not None:
            cell, wanted_cells = (1, 1, 1), samples
        rng, cells = np.random.default_rng(seed), ceil_divide(size, cell)
        count = min(prod(cells), wanted_cells, samples)
        at_once = max(1, BLOCK * count // samples)
        for begin in range(0, count, at_once):
            indices = range(begin, min(begin + at_once, count))
            ends = [(index * prod(cells) // count, (index + 1) * prod(cells) // count) for index in indices]
            places = [
                index * (prod(cells) - 1) // (count - 1)
                if count > 1 and index in (0, count - 1)
                else int(rng.integers(lo, hi))
                for index, (lo, hi) in zip(indices, ends, strict=True)
            ]
            lows = np.stack(np.unravel_index(places, cells), axis=1) * cell
            found = []
            for index, lo in zip(indices, lows, strict=True):
                there = np.minimum(np.array(size) - lo, cell)
                wanted = (index + 1) * samples // count - index * samples // count
                some = rng.choice(int(there.prod()), min(wanted, int(there.prod())), replace=False)
                found.append(lo + np.stack(np.unravel_index(np.sort(some), tuple(there)), axis=1))
            yield np.concatenate(found)

    def at(self, places: Places) -> Real:
        """Return the maps of the output at some voxels: (n, maps)."""
        if self._everything is not None:
            found: Real = self._everything[tuple((places + np.array(self.first)).T)]
            return found
        cells, groups = np.unique(places // self._cell, axis=0, return_inverse=True)
        exact = np.empty((len(places), self.trained.network.maps[self._tensor]))
        for index in range(len(cells)):
            mine = np.flatnonzero(groups.reshape(-1) == index)
            exact[mine] = self._together(places[mine] + np.array(self.first))
        return exact

    def _together(self, at: Places) -> Real:
        """Return the maps at voxels that lie near each other."""
        lo, hi = at.min(axis=0), at.max(axis=0) + 1
        found: Real = self._computed(_region(lo, hi))[tuple((at - lo).T)]
        return found

    def _computed(self, region: Region) -> Real:
        """Return a region of the output, (z, y, x, maps)."""
        count = len(self.trained.network.outputs)
        wanted = [region if number == self.number else (NOTHING,) * 3 for number in range(count)]
        return outputs_in(self._geometry, self.trained.weights, wanted, self._read)[self.number]

    def _read(self, box: Box) -> Real:
        """Return a part of the padded volume, (z, y, x, c), normalised."""
        stored = np.empty((self.volume.channels, *box.size), self.volume.dtype)
        self._source.read(box.lo, stored)
        image: Real = np.moveaxis(stored.astype(np.float64), 0, -1)
        normalise = self.trained.network.normalise
        return image if normalise is None else (image - normalise.mean) / normalise.std


def _region(lo: Iterable[int], hi: Iterable[int]) -> Region:
    z, y, x = (Interval(int(begin), int(end)) for begin, end in zip(lo, hi, strict=True))
    return z, y, x
