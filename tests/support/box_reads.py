"""Read random boxes of a volume into memory full of garbage, and compare them with the array that it should hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.patches import Box
from znnpy.volume import open_volume
from znnpy.volume.base import Volume


def random_boxes(size: tuple[int, int, int], count: int = 12, seed: int = 33) -> list[Box]:
    """Return the whole volume, one voxel, and random boxes."""
    rng = np.random.default_rng(seed)
    boxes = [Box((0, 0, 0), size), Box((size[0] - 1, size[1] - 1, size[2] - 1), size)]
    for _ in range(count):
        ends = [sorted(rng.choice(n + 1, 2, replace=False)) for n in size]
        lo, hi = (tuple(int(end[side]) for end in ends) for side in (0, 1))
        boxes.append(Box((lo[0], lo[1], lo[2]), (hi[0], hi[1], hi[2])))
    return boxes


def assert_reads(volume: Volume, expected: npt.NDArray[Any]) -> None:
    """Fail unless every box of the volume is that of `expected`, (c, z, y, x)."""
    assert volume.shape == expected.shape
    assert volume.dtype == expected.dtype.newbyteorder("=")
    for box in random_boxes(volume.size):
        poison = np.nan if volume.dtype.kind == "f" else np.iinfo(volume.dtype).max - 7
        larger = np.full((volume.channels, *(n + 2 for n in box.size)), poison, volume.dtype)
        out = larger[:, 1:-1, 1:-1, 1:-1]  # strides of its own
        volume.read(box, out)
        np.testing.assert_array_equal(out, expected[(slice(None), *box.slices)])
        larger[:, 1:-1, 1:-1, 1:-1] = poison
        assert np.array_equal(larger, np.full_like(larger, poison), equal_nan=volume.dtype.kind == "f")


def assert_file_reads(path: Path, expected: npt.NDArray[Any], **how: Any) -> None:
    """Open a file and compare all of it as `assert_reads` does."""
    with open_volume(path, **how) as volume:
        assert_reads(volume, expected)
