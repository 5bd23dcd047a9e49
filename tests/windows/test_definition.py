"""The definition of blended windows equals a loop over voxels, and leaves volumes alone where the network does."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from znnpy.option_values import BLENDS, WINDOW_RULES, Blend, WindowRule
from znnpy.shapes import Vec3
from znnpy.windows.definition import Values, blended
from znnpy.windows.grid import WindowGrid
from znnpy.windows.settings import Windows
from znnpy.windows.weights import window_weights

VOLUMES: tuple[Vec3, ...] = ((11, 13, 9), (2, 13, 3), (5, 6, 4))
OVERLAPS = ((0.5, 0.5, 0.5), (0.25, 0.0, 0.75))


def grey(size: Vec3, channels: int = 2) -> Values:
    return np.random.default_rng(7).standard_normal((channels, *size))


def uneven(window: Values) -> Values:
    """Return three maps whose values depend on the place in the window and on its other voxels."""
    z, y, x = np.meshgrid(*(np.arange(n, dtype=float) for n in window.shape[1:]), indexing="ij")
    first, second = window
    return np.stack([first * (1 + z) + y**2, np.tanh(second) * x + second.sum(), np.cumsum(first, axis=2)])


@pytest.mark.parametrize("size", VOLUMES)
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize("rule", WINDOW_RULES)
def test_network_that_changes_nothing_gives_the_volume(
    size: Vec3, overlap: tuple[float, float, float], blend: Blend, rule: WindowRule
) -> None:
    volume = grey(size)
    windows = Windows((5, 6, 4), overlap, blend, mirror=(0, 2), rule=rule)
    np.testing.assert_allclose(blended(volume, lambda window: window, windows), volume, rtol=1e-12)


def voxel_by_voxel(volume: Values, windows: Windows) -> Values:
    """Return the average at each voxel of the windows over it, with zeros looked up outside the volume."""
    grid = WindowGrid((volume.shape[1], volume.shape[2], volume.shape[3]), windows)
    weights = window_weights(windows).astype(float)
    results: dict[Vec3, Values] = {}
    for start in product(*grid.starts):
        window = np.zeros((len(volume), *windows.size))
        for at in np.ndindex(windows.size):
            source = tuple(s + i - b for s, i, b in zip(start, at, grid.before, strict=True))
            if all(0 <= p < n for p, n in zip(source, volume.shape[1:], strict=True)):
                window[:, *at] = volume[:, *source]
        flips = [subset for n in range(4) for subset in combinations(windows.mirror, n)]
        turned = [tuple(slice(None, None, -1 if axis in flip else 1) for axis in range(3)) for flip in flips]
        results[start] = np.mean([uneven(window[:, *turn])[:, *turn] for turn in turned], axis=0)
    found = np.full((3, *volume.shape[1:]), np.nan)
    for place in np.ndindex(volume.shape[1:]):
        padded = tuple(p + b for p, b in zip(place, grid.before, strict=True))
        values: Any = 0
        total = 0.0
        for start, result in results.items():
            inside = tuple(p - s for p, s in zip(padded, start, strict=True))
            if all(0 <= i < n for i, n in zip(inside, windows.size, strict=True)):
                values = values + weights[inside] * result[:, *inside]
                total += weights[inside]
        found[:, *place] = values / total
    return found


@pytest.mark.parametrize("size", VOLUMES)
@pytest.mark.parametrize(
    ("overlap", "blend", "mirror", "rule"),
    [
        ((0.5, 0.5, 0.5), "gaussian", (), "monai"),
        ((0.25, 0.0, 0.75), "bump", (1,), "monai"),
        ((0.5, 0.5, 0.5), "gaussian", (0, 1, 2), "nnunet"),
        ((0.25, 0.0, 0.75), "constant", (0, 2), "nnunet"),
    ],
)
def test_average_equals_a_loop_over_voxels(
    size: Vec3, overlap: tuple[float, float, float], blend: Blend, mirror: tuple[int, ...], rule: WindowRule
) -> None:
    volume = grey(size)
    windows = Windows((5, 6, 4), overlap, blend, mirror=mirror, rule=rule)
    np.testing.assert_allclose(blended(volume, uneven, windows), voxel_by_voxel(volume, windows), rtol=1e-10)
