"""Say what is written of the maps that a network gives at a voxel: these maps, a function of them, or labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from znnpy.errors import ShapeError
from znnpy.messages import option
from znnpy.option_values import Result

INTEGER_DTYPE = "uint8"  # of labels, and of what is above a threshold
MOST_LABELS = 2**8  # this dtype numbers as many


@dataclass(frozen=True, slots=True)
class NetworkResult:
    """The result that is written of the maps of an output.

    kind   maps: the maps; softmax, sigmoid: the function of them; labels: the number of the largest map; above: for
           each map 1 where it is above its threshold, else 0
    above  the thresholds, one or one per map
    apart  members of an ensemble are blended apart, and the mean of their probabilities is taken: of sigmoid for
           sigmoid and above, else of softmax; without it the mean of their maps
    """

    kind: Result = "maps"
    above: tuple[float, ...] = ()
    apart: bool = False

    @property
    def described(self) -> dict[str, Any]:
        """The result as JSON holds it."""
        return {"kind": self.kind, "above": self.above, "apart": self.apart}

    @property
    def function(self) -> Literal["none", "softmax", "sigmoid"]:
        """The function of blended maps: for labels and thresholds only where members are blended apart."""
        if self.kind in ("sigmoid", "above"):
            return "sigmoid" if self.apart or self.kind == "sigmoid" else "none"
        return "softmax" if self.apart or self.kind == "softmax" else "none"

    @property
    def is_integer(self) -> bool:
        """Return whether whole numbers are written."""
        return self.kind in ("labels", "above")

    def maps_of(self, maps: int) -> int:
        """Return the number of maps that are written of so many."""
        return 1 if self.kind == "labels" else maps

    def check(self, maps: Sequence[int]) -> None:
        """Raise ShapeError unless it can be made of outputs with so many maps."""
        if self.apart and self.kind == "maps":
            raise ShapeError(
                f"the mean of probabilities is written as such or as labels, and not as {option('output', 'maps')}; "
                f"choose {option('output', 'softmax')}, sigmoid, labels or above"
            )
        for many in maps:
            if self.kind == "labels" and not 2 <= many <= MOST_LABELS:
                raise ShapeError(
                    f"labels are the numbers of the largest of 2 to {MOST_LABELS:,} maps, and the network gives "
                    f"{many}; write its maps, or what is above a threshold"
                )
            if self.kind == "above" and len(self.above) not in (1, many):
                raise ShapeError(
                    f"there are {len(self.above)} thresholds for {many} maps; give one, or one for each map"
                )

    def check_threshold(self) -> None:
        """Raise ShapeError unless a threshold has an effect on it."""
        if self.kind != "above":
            raise ShapeError(
                f"{option('threshold')} has no effect on {option('output', self.kind)}: leave it out, or give "
                f"{option('output', 'above')}"
            )

    def check_dtype(self, dtype: str) -> None:
        """Raise ShapeError unless it can be written with this dtype."""
        if self.is_integer and dtype != INTEGER_DTYPE:
            raise ShapeError(
                f"{option('output', self.kind)} is written as {INTEGER_DTYPE}, and not as {dtype}: leave out "
                f"{option('output_dtype', dtype)}, or write another {option('output')}"
            )


MAPS = NetworkResult()
