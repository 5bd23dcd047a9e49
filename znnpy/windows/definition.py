"""The definition of blended windows in float64, one window after the other: for tests and for verification."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
from numpy.typing import NDArray

from znnpy.patches import Box
from znnpy.shapes import add
from znnpy.windows.grid import WindowGrid
from znnpy.windows.settings import Windows
from znnpy.windows.weights import window_weights

Values = NDArray[np.float64]


def blended(volume: Values, network: Callable[[Values], Values], windows: Windows) -> Values:
    """Return the weighted average of a network's results for all windows of a volume.

    volume   normalised values (channels, z, y, x)
    network  function from a window (channels, *size) to its result (maps, *size)
    windows  where windows lie, their weights, and how they are mirrored

    Returns values (maps, z, y, x) for the voxels of the volume.
    """
    _, *size = volume.shape
    grid = WindowGrid((size[0], size[1], size[2]), windows)
    padding = [(0, 0), *zip(grid.before, grid.behind, strict=True)]
    padded = np.pad(np.asarray(volume, np.float64), padding)
    weights = window_weights(windows).astype(np.float64)
    total = np.zeros(grid.padded)
    summed: Values | None = None
    for start in product(*grid.starts):
        at = Box(start, add(start, windows.size)).slices
        result = _mirrored_mean(padded[:, *at], network, windows.mirrors)
        if summed is None:
            summed = np.zeros((len(result), *grid.padded))
        summed[:, *at] += result * weights
        total[at] += weights
    assert summed is not None  # there is always a window
    mean: Values = (summed / total)[:, *grid.inside.slices]
    return mean


def _mirrored_mean(window: Values, network: Callable[[Values], Values], mirrors: tuple[tuple[int, ...], ...]) -> Values:
    """Return the mean of a network's results for a window that is mirrored along each subset of axes, mirrored back."""
    results = []
    for axes in mirrors:
        behind_channels = tuple(axis + 1 for axis in axes)
        result = network(np.ascontiguousarray(np.flip(window, behind_channels)))
        results.append(np.flip(result, behind_channels))
    mean: Values = np.sum(results, axis=0) / len(mirrors)
    return mean
