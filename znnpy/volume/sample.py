"""Sample a few small boxes of a volume: a digest that identifies the volume, and the range of its grey values.

The boxes are 8^3 voxels at the corners, in the middles of edges and faces, and in the centre: up to 27 of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import sqrt
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from znnpy.patches import Box
from znnpy.shapes import Vec3

if TYPE_CHECKING:
    from znnpy.network import Network

SIDE = 8  # voxels along each axis of a box
PLACES = (0.0, 0.5, 1.0)  # positions of the boxes along each axis, as a share of its length

# Grey values are doubted if their mean is more than this number of expected standard deviations from the expected mean.
# Bytes are never doubted for a network trained on ordinary bytes: 0 and 255 are 3.9 deviations away from a mean of 130
# with a deviation of 33.5.
FAR = 5.0
# Grey values are also doubted if their mean is more than one deviation away and their own deviation is less than this
# share of the expected one: floats from 0 to 1 given to a network for bytes. Values that are all equal may be padding.
FLAT = 0.05


class Sampled(Protocol):
    """The part of a volume that `sample_of` uses."""

    channels: int
    size: Vec3
    dtype: np.dtype[Any]

    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        """Copy the voxels of `box` into `out`: (c, *box.size)."""


@dataclass(frozen=True, slots=True)
class Greys:
    """The finite grey values of the sampled voxels of one channel."""

    mean: float
    std: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The digest and the range of the sampled voxels of a volume."""

    sha256: str
    channels: tuple[Greys | None, ...]  # None for a channel without a finite sampled voxel

    def doubts(self, network: Network) -> tuple[str, ...]:
        """Return a sentence for each channel whose grey values do not have the scale that `normalise` expects."""
        if network.normalise is None or network.statistics is not None:  # statistics are on no other scale
            return ()
        expected = zip(self.channels, network.normalise.mean, network.normalise.std, strict=True)
        return tuple(
            _doubt(channel, greys, mean, std)
            for channel, (greys, mean, std) in enumerate(expected)
            if greys is not None and _is_doubtful(greys, mean, std)
        )


def sample_of(volume: Sampled) -> Sample:
    """Read the boxes of a volume; VolumeError if the storage cannot deliver them."""
    digest = hashlib.sha256()
    boxes: list[npt.NDArray[np.float64]] = []
    with np.errstate(over="ignore", invalid="ignore"):  # values near the largest have infinite moments
        for voxels in _boxes(volume):
            digest.update(voxels.tobytes())
            boxes.append(_moments(voxels))
        return Sample(digest.hexdigest(), tuple(_greys(channel) for channel in np.stack(boxes, axis=1)))


def _boxes(volume: Sampled) -> Iterator[npt.NDArray[Any]]:
    spare = [max(0, n - SIDE) for n in volume.size]
    for at in sorted(set(product(*([round(share * part) for part in PLACES] for share in spare)))):
        lo = (at[0], at[1], at[2])
        box = Box(lo, (lo[0] + SIDE, lo[1] + SIDE, lo[2] + SIDE)).clipped(Box((0, 0, 0), volume.size))
        voxels = np.empty((volume.channels, *box.size), volume.dtype)
        volume.read(box, voxels)
        yield voxels


def _moments(voxels: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return (c, 5) of a box: number of finite voxels, mean, sum of squared deviations, lowest, highest."""
    found = np.zeros((len(voxels), 5))
    for channel, values in enumerate(voxels):
        finite = values[np.isfinite(values)].astype(np.float64)
        if finite.size:
            mean = finite.mean()
            found[channel] = finite.size, mean, ((finite - mean) ** 2).sum(), finite.min(), finite.max()
    return found


def _greys(boxes: npt.NDArray[np.float64]) -> Greys | None:
    """Combine all boxes of a channel, (boxes, 5) as `_moments` gives them."""
    counts, means, squares, lowest, highest = boxes[boxes[:, 0] > 0].T
    count = counts.sum()
    if not count:
        return None
    mean = float((counts * means).sum() / count)
    spread = float((squares.sum() + (counts * (means - mean) ** 2).sum()) / count)
    return Greys(mean, sqrt(spread), float(lowest.min()), float(highest.max()))


def _is_doubtful(greys: Greys, mean: float, std: float) -> bool:
    away = abs(greys.mean - mean) / std
    return away > FAR or (away > 1 and 0 < greys.std < FLAT * std)


def _doubt(channel: int, greys: Greys, mean: float, std: float) -> str:
    expected = f"the network expects about {mean:.4g} +- {std:.4g}"
    if greys.lowest >= 0 and greys.highest <= 1 < mean:
        ask = "is the volume scaled to 0..1, or does it hold labels?"
    elif greys.highest > 255 >= mean:
        ask = "does the volume hold 16 bits, and was the network trained on 8?"
    else:
        ask = "is the volume scaled as the network's training data was?"
    return (
        f"the sampled mean of channel {channel} is {greys.mean:.4g} +- {greys.std:.4g} "
        f"(from {greys.lowest:.4g} to {greys.highest:.4g}), and {expected}: {ask}"
    )
