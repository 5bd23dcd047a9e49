"""Compute the range and mean of the values that a run writes."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.patches import Box
from znnpy.run.pipeline import Writes

PIECE = 2**17  # values counted at a time


@dataclass(frozen=True, slots=True)
class Values:
    """The finite values that one run wrote, of all maps, as they are stored."""

    lowest: float
    highest: float
    mean: float

    def __str__(self) -> str:
        return f"{self.lowest:.3g} to {self.highest:.3g}, mean {self.mean:.3g}"


@dataclass
class Tally:
    """Counts the values that are written, in the memory of PIECE values. Voxels written twice count twice."""

    _count: int = 0
    _sum: float = 0.0
    _lowest: float = np.inf
    _highest: float = -np.inf

    @property
    def values(self) -> Values | None:
        """Range and mean of all values so far; None if none of them is finite."""
        return Values(self._lowest, self._highest, self._sum / self._count) if self._count else None

    def add(self, voxels: npt.NDArray[Any]) -> None:
        """Count voxels (maps, z, y, x), except those that are not finite."""
        for piece in _pieces(voxels):
            with np.errstate(invalid="ignore"):
                total = float(piece.sum(dtype=np.float64))
            finite = piece if np.isfinite(total) else piece[np.isfinite(piece)]
            if finite.size:
                self._count += finite.size
                self._sum += total if finite is piece else float(finite.sum(dtype=np.float64))
                self._lowest = min(self._lowest, float(finite.min()))
                self._highest = max(self._highest, float(finite.max()))


def _pieces(voxels: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yield parts of up to PIECE values; a longer line is one part."""
    if voxels.size <= PIECE or voxels.ndim == 1:
        yield voxels
        return
    together = PIECE // voxels[0].size
    if together:
        yield from (voxels[first : first + together] for first in range(0, len(voxels), together))
        return
    for part in voxels:
        yield from _pieces(part)


@dataclass(frozen=True)
class Tallied:
    """An output (see `pipeline.Writes`) whose values are counted as they are written."""

    output: Writes
    tally: Tally

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.output.dtype

    @property
    def done(self) -> Set[int]:
        return self.output.done

    def write(self, box: Box, voxels: npt.NDArray[Any], number: int) -> None:
        self.output.write(box, voxels, number)
        self.tally.add(voxels)

    def finish_column(self, index: int) -> None:
        self.output.finish_column(index)
