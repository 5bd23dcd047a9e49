"""The weights by which results of windows are averaged, equal to those of MONAI and nnU-Net.

MONAI's Gaussian (`monai.data.utils.compute_importance_map`) is computed in float32 around the centre (size - 1) / 2.
Weights below 0.001 become 0.001.

nnU-Net's (`compute_gaussian`) has its centre at the voxel size // 2, where it is 10. It is rounded to half precision,
on a CPU as on a GPU, and weights that become zero there take the least other weight: 6e-8 for windows of usual size.

The bump of DeepEM (`deepem/test/mask.py`, "zung") is exp(-sum over axes of (u (1 - u))^-1.5), u = (i + 1) / (size + 1).
DeepEM subtracts from the exponent the greatest one of all windows over a voxel, as float32 would not hold it; averages
stay the same. Here the exponent along each axis is held within 32 of its greatest, so that windows of any size have
weights in float32. Along an axis where windows overlap by 0.19 or more, the greater weights over each voxel are as
DeepEM has them.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from znnpy.patches import Box
from znnpy.shapes import Vec3, add
from znnpy.windows.grid import WindowGrid
from znnpy.windows.settings import Windows

Profiles = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]

MONAI_LEAST = 1e-3
NNUNET_GREATEST = 10.0  # the predictor's `value_scaling_factor`
NNUNET_REACH = 4.0  # standard deviations, where scipy's gaussian_filter ends
BUMP_POWER = -1.5
BUMP_RANGE = 32.0  # of the exponent along an axis: products of three lie between exp(-48) and exp(48)


@lru_cache(maxsize=1)
def window_weights(windows: Windows) -> NDArray[np.float32]:
    """Return the weights (z, y, x) of a window, all greater than 0. The array cannot be written to."""
    profiles = separable_weights(windows)
    if profiles is not None:
        weights = _outer(profiles)
    elif windows.rule == "monai":
        weights = _outer(_monai_profiles(windows))
        np.maximum(weights, np.float32(MONAI_LEAST), out=weights)
    else:
        weights = _nnunet_gaussian(windows.size, windows.sigma)
    weights.flags.writeable = False
    return weights


def separable_weights(windows: Windows) -> Profiles | None:
    """Return three profiles (z, y, x) whose outer product is `window_weights`, or None if there are none.

    MONAI's Gaussian has them if no weight is below 0.001: a sigma of about a quarter of the window or more. nnU-Net's
    has none, as it is rounded to half precision.
    """
    if windows.blend == "constant":
        z, y, x = (np.ones(size, np.float32) for size in windows.size)
        return z, y, x
    if windows.blend == "bump":
        z, y, x = map(_bump, windows.size)
        return z, y, x
    if windows.rule == "nnunet":
        return None
    profiles = _monai_profiles(windows)
    least = _outer((profiles[0][:1], profiles[1][:1], profiles[2][:1]))
    return profiles if least >= np.float32(MONAI_LEAST) else None


def total_weights(grid: WindowGrid, box: Box) -> NDArray[np.float32]:
    """Return the sum of the weights of all windows over each voxel of a box of the padded volume.

    Windows are added in float32 in the order of both packages, z slowest. Sums of separable weights are products of
    sums along the axes, and equal those but for rounding.
    """
    touching = grid.touching(box)
    profiles = separable_weights(grid.windows)
    if profiles is not None:
        z, y, x = map(_sum_along, touching, profiles, box.lo, box.hi)
        return _outer((z, y, x))
    weights = window_weights(grid.windows)
    total = np.zeros(box.size, np.float32)
    for start in product(*touching):
        window = Box(start, add(start, grid.windows.size))
        shared = window.clipped(box)
        total[shared.shifted(_negative(box.lo)).slices] += weights[shared.shifted(_negative(start)).slices]
    return total


def _sum_along(starts: tuple[int, ...], profile: NDArray[np.float32], lo: int, hi: int) -> NDArray[np.float32]:
    total = np.zeros(hi - lo, np.float32)
    for start in starts:
        first, end = max(lo, start), min(hi, start + len(profile))
        total[first - lo : end - lo] += profile[first - start : end - start]
    return total


def _outer(profiles: Profiles) -> NDArray[np.float32]:
    z, y, x = profiles
    weights: NDArray[np.float32] = (z[:, None] * y)[:, :, None] * x
    return weights


def _negative(v: Vec3) -> Vec3:
    return -v[0], -v[1], -v[2]


def _monai_profiles(windows: Windows) -> Profiles:
    z, y, x = (_monai_gaussian(size, size * windows.sigma) for size in windows.size)
    return z, y, x


def _monai_gaussian(size: int, sigma: float) -> NDArray[np.float32]:
    from_centre = np.arange(size, dtype=np.float32) - np.float32((size - 1) / 2)
    gaussian: NDArray[np.float32] = np.exp(from_centre**2 / np.float32(-2 * sigma**2))
    return gaussian


def _nnunet_gaussian(size: Vec3, share: float) -> NDArray[np.float32]:
    z, y, x = (_truncated_gaussian(n, n * share) for n in size)
    weights, least = np.empty(size, np.float32), np.float32(np.inf)
    for plane, at in zip(weights, z, strict=True):
        exact = (at * y)[:, None] * x * NNUNET_GREATEST
        plane[...] = exact.astype(np.float32).astype(np.float16)  # as PyTorch rounds: to single precision first
        least = min(least, plane.min(where=plane > 0, initial=np.float32(np.inf)))
    for plane in weights:
        plane[plane == 0] = least
    return weights


def _truncated_gaussian(size: int, sigma: float) -> NDArray[np.float64]:
    """Return what scipy's gaussian_filter makes of a point at the voxel size // 2 of a line, 1 at its greatest."""
    from_centre = np.arange(size) - size // 2
    line: NDArray[np.float64] = np.exp(-0.5 / sigma**2 * from_centre**2)
    line[np.abs(from_centre) > int(NNUNET_REACH * sigma + 0.5)] = 0
    return line


def _bump(size: int) -> NDArray[np.float32]:
    u = np.arange(1, size + 1) / (size + 1)
    exponent = -((u * (1 - u)) ** BUMP_POWER)
    below = np.minimum(exponent.max() - exponent, BUMP_RANGE)
    bump: NDArray[np.float32] = np.exp(BUMP_RANGE / 2 - below).astype(np.float32)
    return bump
