"""A tensor of a graph, of which some planes stay from step to step of a column.

It lies in the arena with a copy of the planes that stay beside it, or wholly beside the arena, where its planes are
moved to the front when there is no room behind them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from znnpy.geometry import Interval
from znnpy.kernels.dtypes import kept_dtype
from znnpy.planner.graph_tilings import GraphTiling
from znnpy.run.graph_backend import GraphBackend

Array = Any  # numpy's, or on a GPU those of its Device, in the dtype of the precision


class KeptTensor:
    """The planes of one tensor that are in memory, (planes, y, x, maps)."""

    def __init__(self, tiling: GraphTiling, tensor: int, maps: int) -> None:
        self.storage = tiling.storage(tensor)
        self.maps = maps
        self.nbytes = tiling.beside(tensor) * tiling.plane_bytes(tensor)
        self.dtype = kept_dtype(tiling.graph.precision)
        self.beside: Array = np.empty(0, self.dtype)  # what stays from step to step
        self.block: Array = np.empty(0, self.dtype)  # where the planes of a step lie
        self.held = Interval(0, 0)
        self.planes: Array = np.empty((0, 0, 0, maps), self.dtype)  # those of `held`
        self._size = (0, 0)  # y, x
        self._first = 0  # plane at the front of a resident block

    def begin(self, size: tuple[int, int], first: int, lacking: int, backend: GraphBackend) -> None:
        """Prepare for a column in which the tensor has `size` voxels across, and begins with plane `first`.

        lacking  planes that the first step needs and does not compute, since the column begins in its midst: zeros
        """
        self._size, self._first = size, first
        self.held = Interval(first, first)
        kept = self.beside if self.storage == "carried" else self.block
        if zeros := lacking * size[0] * size[1] * self.maps:
            backend.clear(kept[:zeros])

    def advance(self, held: Interval, new: Interval, backend: GraphBackend) -> None:
        """Make room for the planes of a step; those that were kept are in front of the new ones."""
        plane = self._size[0] * self._size[1] * self.maps
        kept = max(0, new.lo - held.lo)
        if self.storage == "resident":
            if (held.hi - self._first) * plane > self.block.size:
                start = held.lo - self._first
                if kept and start:
                    backend.move(self.block[: kept * plane], self.block[start * plane : (start + kept) * plane])
                self._first = held.lo
            offset = held.lo - self._first
        else:
            offset = 0
            if kept:
                backend.move(self.block[: kept * plane], self.beside[: kept * plane])
        self.held = held
        part = self.block[offset * plane : (offset + held.size) * plane]
        self.planes = part.reshape(held.size, *self._size, self.maps)

    def keep(self, first: int, backend: GraphBackend) -> None:
        """Save the planes from `first` on for the next step, if they would be lost."""
        if self.storage == "carried" and first < self.held.hi:
            kept = self.planes[max(0, first - self.held.lo) :]
            backend.move(self.beside[: kept.size], kept.reshape(-1))
