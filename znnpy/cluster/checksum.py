"""A checksum of the voxels of a work item, which does not depend on the boxes in which they come.

It is the sum of the bits of each voxel as a number, times an odd number for its plane, its row, its column, its map and
its array, modulo 2^64. So the sums of any division of the item into boxes add up to the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.patches import Box

BLOCK = 2**16  # voxels that are summed at a time
MODULUS = 2**64

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class VoxelSum:
    """The checksum of the voxels that were added."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, box: Box, voxels: npt.NDArray[Any], number: int = 0) -> None:
        """Add voxels (maps, *box.size), of 1, 2, 4 or 8 bytes, at coordinates `box` of an array."""
        if not voxels.size:
            return
        kind = _UNSIGNED[voxels.dtype.itemsize]
        z, y, x = (_factors(lo, hi, axis, number) for axis, (lo, hi) in enumerate(zip(box.lo, box.hi, strict=True)))
        maps = _factors(0, len(voxels), 3, number)
        rows = max(1, BLOCK // len(x))
        total = 0
        for planes, of_map in zip(voxels, maps.tolist(), strict=True):
            for plane, of_plane in zip(planes, z.tolist(), strict=True):
                for first in range(0, len(y), rows):
                    bits = np.ascontiguousarray(plane[first : first + rows]).view(kind).astype(np.uint64)
                    bits *= x
                    of_rows = bits.sum(axis=1, dtype=np.uint64) * y[first : first + rows]
                    total += int(of_rows.sum(dtype=np.uint64)) * of_plane * of_map
        self.value = (self.value + total) % MODULUS


def _factors(lo: int, hi: int, axis: int, number: int) -> npt.NDArray[np.uint64]:
    """Return an odd number for each place from `lo` to `hi` along an axis of an array; the last axis is that of maps.

    They are the numbers of the generator SplitMix64 (Steele, Lea and Flood 2014), which can begin anywhere.
    """
    at = np.arange(lo, hi, dtype=np.uint64) + np.uint64((4 * number + axis + 1) << 40)
    at *= np.uint64(0x9E3779B97F4A7C15)
    at = (at ^ (at >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    at = (at ^ (at >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: npt.NDArray[np.uint64] = (at ^ (at >> np.uint64(31))) | np.uint64(1)
    return found
