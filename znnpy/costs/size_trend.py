"""Factors on the seconds of layers by size; the size is the seconds of one run as a machine's rates give them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import exp, log

# Sizes exclude what stages take to begin. Log factors are interpolated between them and constant beyond.
SIZES = (2e-5, 1e-4, 5e-4, 2.5e-3, 1.25e-2, 6.25e-2, 0.3125)
# Standard deviations of log factors: of a measurement, of a variant from others of its layer, of a layer from one of
# SIZES to the next, and of a layer from 1.
NOISE, OF_VARIANT, STEP, FLAT = 0.1, 0.2, 0.4, 1e4

Sizes = tuple[tuple[float, float], ...]  # measured sizes, ascending, and their factors


def interpolation_weights(size: float) -> tuple[int, float]:
    """Return the index of the last of SIZES below `size` that has a successor, and the successor's weight."""
    index = min(max(bisect_left(SIZES, size) - 1, 0), len(SIZES) - 2)
    share = log(size / SIZES[index]) / log(SIZES[index + 1] / SIZES[index])
    return index, min(max(share, 0.0), 1.0)


def interpolated(factors: tuple[float, ...], size: float) -> float:
    """Interpolate factors at SIZES to `size`."""
    return exp(_between([log(factor) for factor in factors], size))


class Trend:
    """How the factor of one layer changes with its size, fitted to all measurements of all its variants.

    A variant measured on a small volume alone says little about a large one; the trend helps. The fit is by least
    squares: log(factor) = variant effect + size effect, both shrunk to zero (NOISE, OF_VARIANT, STEP), so that a
    difference between two variants at one size is not read as a trend.
    """

    def __init__(self, measured: Sequence[Sizes]) -> None:
        import numpy as np  # here: plans are read without it

        rows, values = [], []
        for variant, sizes in enumerate(measured):
            for size, factor in sizes:
                row = np.zeros(len(SIZES) + len(measured))
                index, share = interpolation_weights(size)
                row[index], row[index + 1], row[len(SIZES) + variant] = 1 - share, share, 1.0
                rows.append(row / NOISE)
                values.append(log(factor) / NOISE)
        each = np.eye(len(SIZES) + len(measured))
        prior = [*(each[len(SIZES) :] / OF_VARIANT), *(np.diff(each[: len(SIZES)], axis=0) / STEP), each[0] / FLAT]
        values += [0.0] * len(prior)
        found = np.linalg.lstsq(np.array([*rows, *prior]), np.array(values), rcond=None)[0]
        self._logs: list[float] = found[: len(SIZES)].tolist()

    def at(self, known: Sizes, size: float) -> float:
        """Return a variant's factor: interpolated between its measured sizes, extrapolated beyond them by the trend."""
        index = bisect_left(known, (size,))
        if index in (0, len(known)):
            nearest, factor = known[max(0, index - 1)]
            return factor * exp(_between(self._logs, size) - _between(self._logs, nearest))
        (below, small), (above, large) = known[index - 1], known[index]
        share = log(size / below) / log(above / below)
        return exp((1 - share) * log(small) + share * log(large))


def _between(logs: Sequence[float], size: float) -> float:
    index, share = interpolation_weights(size)
    return (1 - share) * logs[index] + share * logs[index + 1]
