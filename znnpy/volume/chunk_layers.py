"""Keep the chunks that the next step of a column needs too, so that no chunk is read and unpacked for every step.

A step of a column reads a few planes, and chunks are often thicker. So the layer of whole chunks that a thin box lies
in is read at once and kept, and the boxes behind it are copied from it. Each reading thread keeps one layer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.messages import option
from znnpy.patches import Box, with_size
from znnpy.shapes import subtract
from znnpy.units import human_bytes
from znnpy.volume.base import Volume

MOST_BYTES = 128 * 2**20  # of all layers that are kept
SHARE = 32  # of the memory limit that layers may take, as 1/SHARE
NOWHERE = Box((-1, -1, -1), (-1, -1, -1))  # place of a layer that is being read


def layer_bytes(volume: Volume, ram_bytes: int) -> int:
    """Return the bytes that the layers of a volume may take within a memory limit; 0 where chunks are single planes."""
    return min(MOST_BYTES, ram_bytes // SHARE) if max(volume.chunk_size) > 1 else 0


def check_unpacking(volume: Volume, ram_bytes: int) -> None:
    """Raise VolumeError for a volume whose chunks take more memory than the limit: it is read before it is planned."""
    if volume.extra_bytes > ram_bytes:
        raise VolumeError(
            f"{volume} takes {human_bytes(volume.extra_bytes)} of memory to unpack its large chunks, and the limit is "
            f"{human_bytes(ram_bytes)}; give a larger {option('ram')}, or store it in chunks of about 1 MiB"
        )


class ChunkLayers:
    """Reads boxes of a volume, and keeps the layers of chunks that thin ones lie in. Several threads may read."""

    def __init__(self, volume: Volume, most_bytes: int = 0) -> None:
        """Keep layers of at most `most_bytes` in all; 0: none."""
        self.volume, self.most_bytes = volume, most_bytes
        self._kept: dict[int, tuple[Box, npt.NDArray[Any]]] = {}  # of each thread
        self._lock = threading.Lock()

    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        """Copy the voxels of `box` into `out` as `Volume.read` does."""
        axis = self._thin_axis(box)
        if axis is None:
            self.volume.read(box, out)
            return
        for layer, part in self._layers(box, axis):
            kept = self._layer(layer)
            there = out[(slice(None), *part.shifted(subtract((0, 0, 0), box.lo)).slices)]
            if kept is None:
                self.volume.read(part, there)
            else:
                np.copyto(there, kept[(slice(None), *part.shifted(subtract((0, 0, 0), layer.lo)).slices)])

    def _thin_axis(self, box: Box) -> int | None:
        """Return the axis along which a box takes the smallest share of a chunk; None if it takes whole ones."""
        shares = [size / chunk for size, chunk in zip(box.size, self.volume.chunk_size, strict=True)]
        axis = min(range(3), key=lambda one: shares[one])
        return axis if self.most_bytes and 0 < shares[axis] < 1 else None

    def _layers(self, box: Box, axis: int) -> Iterator[tuple[Box, Box]]:
        """Yield the layers of whole chunks along an axis that a box lies in, and the part of the box in each."""
        thick = self.volume.chunk_size[axis]
        for lo in range(box.lo[axis] // thick * thick, box.hi[axis], thick):
            hi = min(lo + thick, self.volume.size[axis])
            layer = Box(with_size(box.lo, axis, lo), with_size(box.hi, axis, hi))
            yield layer, box.clipped(layer)

    def _layer(self, layer: Box) -> npt.NDArray[Any] | None:
        """Return the voxels of a layer, read now unless this thread keeps it; None if there is no room for it."""
        me, shape = threading.get_ident(), (self.volume.channels, *layer.size)
        with self._lock:
            where, voxels = self._kept.pop(me, (NOWHERE, None))
            if voxels is not None and where == layer:
                self._kept[me] = layer, voxels
                return voxels
            needed = prod(shape) * self.volume.dtype.itemsize
            if needed + sum(other.nbytes for _, other in self._kept.values()) > self.most_bytes:
                return None
            if voxels is None or voxels.shape != shape:
                voxels = np.empty(shape, self.volume.dtype)
            self._kept[me] = NOWHERE, voxels
        self.volume.read(layer, voxels)
        with self._lock:
            self._kept[me] = layer, voxels
        return voxels
