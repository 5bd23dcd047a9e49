"""Recompute voxels of a network that is computed in windows, by definition: in float64 from all windows around each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import VerifyError
from znnpy.kernels.definition import Real
from znnpy.kernels.whole import whole
from znnpy.network import Network
from znnpy.patches import Box
from znnpy.shapes import Vec3, add
from znnpy.trained import TrainedNetwork
from znnpy.volume.base import Volume
from znnpy.volume.source import Source
from znnpy.windows.grid import WindowGrid
from znnpy.windows.settings import Windows
from znnpy.windows.weights import window_weights

LEAST_CELLS = 3  # in two corners, which few windows cover, and elsewhere
SPREAD = 2**21  # voxels of windows that are computed for cells in other places, where that allows more of them
BLOCK = 2**14  # voxels at a time, so that memory does not grow with their number
KEPT = 8  # most windows whose results are kept, for the next cell, ..
KEPT_BYTES = 2**30  # .. and about their bytes

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class WindowVoxels:
    """The output of a network in windows; positions count from the first voxel of the predicted region.

    A cell is a box of voxels that the same windows cover.
    """

    trained: TrainedNetwork
    volume: Volume
    first: Vec3  # voxel of the volume with which the predicted region begins

    @property
    def _windows(self) -> Windows:
        windows = self.trained.network.windows
        assert windows is not None, "networks that are computed in windows have it"
        return windows

    @cached_property
    def _grid(self) -> WindowGrid:
        return WindowGrid(self.volume.size, self._windows)

    @cached_property
    def _source(self) -> Source:
        return Source(self.volume, roi=None, border="valid", network=self.trained.network, allow_nan=False)

    def _edges(self, size: Vec3) -> list[npt.NDArray[np.int64]]:
        """Return where cells begin along each axis of a region of this size, and its end.

        VerifyError if the windows that cover it are more than a run computes.
        """
        region = Box(self.first, add(self.first, size)).shifted(self._grid.before)
        if why := self._grid.why_too_many(region):
            raise VerifyError(f"no run computes the windows that are stated: {why}; predict the volume again")
        found = []
        for starts, window, first, n in zip(
            self._grid.touching(region), self._windows.size, region.lo, size, strict=True
        ):
            faces = np.array([*starts, *(start + window for start in starts)]) - first
            found.append(np.unique([0, n, *faces[(faces > 0) & (faces < n)]]))
        return found

    def drawn(self, size: Vec3, samples: int, seed: int) -> Iterator[Places]:
        """Yield `samples` different voxels at most, up to BLOCK at a time as (n, 3), from a few cells.

        The first and the last cell are among them, and others as far as that does not take too long. VerifyError if
        the windows that cover such a region are more than a run computes.
        """
        rng, edges = np.random.default_rng(seed), self._edges(size)
        cells = [len(along) - 1 for along in edges]
        each = prod(self._windows.size) * len(self._windows.mirrors) * 8
        count = min(prod(cells), max(LEAST_CELLS, SPREAD // each), samples)
        inner = (
            rng.choice(prod(cells), count, replace=False)
            if prod(cells) < 2**20
            else rng.integers(0, prod(cells), count)
        )
        places = np.unique([0, prod(cells) - 1, *inner[: max(0, count - 2)]])[: max(1, samples)]
        for index, place in enumerate(places):
            lo, hi = zip(
                *((along[at], along[at + 1]) for along, at in zip(edges, np.unravel_index(place, cells), strict=True)),
                strict=True,
            )
            there = np.array(hi) - np.array(lo)
            wanted = (index + 1) * samples // len(places) - index * samples // len(places)
            some = np.sort(rng.choice(int(there.prod()), min(wanted, int(there.prod())), replace=False))
            for begin in range(0, len(some), BLOCK):
                yield np.array(lo) + np.stack(np.unravel_index(some[begin : begin + BLOCK], tuple(there)), axis=1)

    def at(self, places: Places) -> Real:
        """Return the blended maps at some voxels: (n, maps)."""
        grid, size = self._grid, self._windows.size
        at = places + np.array(self.first) + np.array(grid.before)
        weights = window_weights(self._windows).astype(np.float64)
        network = self.trained.network
        sums, totals = np.zeros((len(at), network.blended_maps)), np.zeros((len(at), 1))
        (z, y, x), (z_end, y_end, x_end) = at.min(axis=0).tolist(), (at.max(axis=0) + 1).tolist()
        for corner in product(*grid.touching(Box((z, y, x), (z_end, y_end, x_end)))):
            inside = np.all((at >= corner) & (at < np.add(corner, size)), axis=1)
            if inside.any():
                there = tuple((at[inside] - corner).T)
                sums[inside] += self._computed(corner)[there] * weights[there][:, None]
                totals[inside] += weights[there][:, None]
        return sums / totals

    @cached_property
    def _computed(self) -> Any:
        """The function that gives the result of the window with a corner, (z, y, x, maps); it keeps the latest."""
        each = 8 * prod(self._windows.size) * self.trained.network.blended_maps
        return lru_cache(maxsize=max(1, min(KEPT, KEPT_BYTES // each)))(self._of_window)

    def _of_window(self, corner: tuple[int, ...]) -> Real:
        image, mirrors, network = self._read(corner), self._windows.mirrors, self.trained.network
        each, members = len(network.weighted), []
        for first in range(0, len(self.trained.weights), each):
            found: Real = np.zeros(1)
            for axes in mirrors:
                (result,) = whole(network, self.trained.weights[first : first + each], np.flip(image, axes))
                found = found + np.flip(result, axes)
            members.append(found / len(mirrors))
        return np.concatenate(members, axis=3) if network.result.apart else np.asarray(np.mean(members, axis=0))

    def _read(self, corner: tuple[int, ...]) -> Real:
        """Return what a window covers, (z, y, x, c), normalised, with zeros beyond the volume."""
        lo = tuple(start - before for start, before in zip(corner, self._grid.before, strict=True))
        box = Box((lo[0], lo[1], lo[2]), add((lo[0], lo[1], lo[2]), self._windows.size))
        inside = box.clipped(Box((0, 0, 0), self.volume.size))
        stored = np.empty((self.volume.channels, *inside.size), self.volume.dtype)
        self._source.read(inside.lo, stored)
        image: Real = np.moveaxis(stored.astype(np.float64), 0, -1)
        normalise = self.trained.network.normalise
        image = image if normalise is None else (image - normalise.mean) / normalise.std
        beyond = zip(inside.lo, box.lo, box.hi, inside.hi, strict=True)
        return np.pad(image, [*((a - b, c - d) for a, b, c, d in beyond), (0, 0)])


def result_of(maps: Real, network: Network, written: npt.NDArray[Any] | None, tolerance: float) -> Real:
    """Return what is written of blended maps (n, maps).

    written  what was written of them; a label is right, too, whose map is as large as the largest to the tolerance, and
             so is a map on either side of its threshold if it is as near
    """
    result = network.result
    maps = _probabilities(maps, network)
    match result.kind:
        case "labels":
            labels = maps.argmax(axis=1)[:, None]
            if written is None:
                return np.asarray(labels, np.float64)
            known = np.minimum(written.astype(np.intp), maps.shape[1] - 1)
            near = tolerance * np.maximum(1, np.abs(maps).max(axis=1, keepdims=True))
            as_large = np.take_along_axis(maps, known, axis=1) >= maps.max(axis=1, keepdims=True) - near
            return np.asarray(np.where(as_large, known, labels), np.float64)
        case "above":
            distance = maps - np.array(result.above)
            if written is None:
                return np.asarray(distance > 0, np.float64)
            near = np.abs(distance) <= tolerance * np.maximum(1, np.abs(maps))
            return np.asarray(np.where(near, written, distance > 0), np.float64)
        case "maps" | "softmax" | "sigmoid":
            return maps


def _probabilities(maps: Real, network: Network) -> Real:
    """Return the function of blended maps that the result is made of, averaged over members that are blended apart."""
    function = network.result.function
    if function == "none":
        return maps
    each = maps.reshape(len(maps), network.members if network.result.apart else 1, -1)
    if function == "sigmoid":
        return np.asarray((1 / (1 + np.exp(-each))).mean(axis=1))
    powers = np.exp(each - each.max(axis=2, keepdims=True))
    return np.asarray((powers / powers.sum(axis=2, keepdims=True)).mean(axis=1))
