"""Describe how grey values are normalised before a network: by numbers, or by statistics of the whole volume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

StatisticsOf = Literal["mean_and_std", "percentiles"]
STATISTICS: tuple[StatisticsOf, ...] = ("mean_and_std", "percentiles")
EPSILON = 1e-6  # what bioimage.io adds to a standard deviation or a range, unless a description says otherwise


@dataclass(frozen=True, slots=True)
class Normalise:
    """Normalisation of the input, x = (grey - mean) / std, with one value per input channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class VolumeStatistics:
    """Statistics of a whole volume, and how the normalisation follows from them.

    of           mean_and_std: x = (grey - mean) / (std + epsilon); percentiles, a low and a high one:
                 x = (grey - low) / (high - low + epsilon)
    jointly      of all channels together, or of each by itself
    percentiles  from 0 to 100, for that kind alone
    """

    of: StatisticsOf
    jointly: bool = False
    percentiles: tuple[float, float] = (0.0, 100.0)
    epsilon: float = EPSILON

    def __str__(self) -> str:
        of = "mean and standard deviation"
        if self.of == "percentiles":
            of = f"percentiles {self.percentiles[0]:g} and {self.percentiles[1]:g}"
        return f"{of} of {'all channels together' if self.jointly else 'each channel'}"

    @property
    def described(self) -> dict[str, Any]:
        """Return the fields that decide the result, as JSON has them."""
        percentiles = {"percentiles": list(self.percentiles)} if self.of == "percentiles" else {}
        return {"of": self.of, "jointly": self.jointly, **percentiles, "epsilon": self.epsilon}

    def normalise(self, found: Sequence[tuple[float, float]]) -> Normalise:
        """Return the normalisation by the mean and the deviation, or the low and the high value, of each channel."""
        if self.of == "mean_and_std":
            return Normalise(tuple(mean for mean, _ in found), tuple(std + self.epsilon for _, std in found))
        return Normalise(tuple(low for low, _ in found), tuple(high - low + self.epsilon for low, high in found))
