"""Read parts of a volume as arrays of a type that Neuroglancer and pictures take, straight from its file."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.view.scene import Layer
from znnpy.volume.base import Volume

_log = logging.getLogger(__name__)


def dtype_shown(layer: Layer) -> np.dtype[Any]:
    """Return the type in which voxels are handed on: what browsers lack becomes float32, or uint64 for labels."""
    dtype = layer.volume.dtype
    if layer.kind == "labels":
        if dtype.kind == "u":
            return dtype
        return np.dtype(np.uint64 if dtype.kind == "f" else f"u{dtype.itemsize}")
    return dtype if dtype.itemsize <= 4 and dtype != np.float16 else np.dtype(np.float32)


class ShownVoxels:
    """The voxels of a layer, (z, y, x), or (c, z, y, x) for several channels, as an array that is read when sliced.

    One thread reads at a time. A part that cannot be read is logged once, and VolumeError is raised.
    """

    def __init__(self, layer: Layer, level: Volume | None = None) -> None:
        """Take the voxels of a layer at its own resolution, or at a lower one."""
        self._volume = layer.volume if level is None else level
        shape = self._volume.shape
        self.shape = shape if shape[0] > 1 else shape[1:]
        self.dtype = dtype_shown(layer)
        self._lock = threading.Lock()
        self._told = False

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __getitem__(self, slices: tuple[slice, ...]) -> npt.NDArray[Any]:
        """Read a box. All slices have begin and end within the array."""
        z, y, x = slices[-3:]
        box = Box((int(z.start), int(y.start), int(x.start)), (int(z.stop), int(y.stop), int(x.stop)))
        voxels = np.empty((self._volume.channels, *box.size), self._volume.dtype)
        with self._lock:
            try:
                self._volume.read(box, voxels)
            except VolumeError as error:
                if not self._told:
                    _log.warning("%s", f"a part is not shown: {error}")
                self._told = True
                raise
        voxels = voxels[slices[0]] if self.ndim == 4 else voxels[0]
        with np.errstate(over="ignore", invalid="ignore"):
            return voxels.astype(self.dtype, copy=False)
