"""The least seconds per voxel that operations of a graph took in sizes that were worked out, to bound other sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from znnpy.many_intervals import Numbers
from znnpy.planner.graph_tilings import GraphTiling

FASTER = 0.9  # assumed: no operation takes less time per voxel than this share of the least seen so far
AS_FAST = 0.97  # the same for steps with as many planes as one that was seen

Rates = npt.NDArray[np.float64]


@dataclass
class _Known:
    """The knowledge of steps with the same planes: the least seen there, and how many sizes that takes into account."""

    planes: Numbers  # of each operation in a step
    least: Rates
    counted: int = 0


@dataclass
class LeastSeen:
    """The least seconds per voxel of every operation, over all sizes that were seen."""

    least: Rates | None = None
    _seen: list[tuple[int, Numbers, Rates]] = field(default_factory=list)  # axis, planes of steps, and seconds
    # The keys are the identities of AxisPlanes, which their graph keeps alive.
    _known: dict[int, _Known] = field(default_factory=dict)

    def note(self, tiling: GraphTiling, seconds: Rates) -> None:
        """Remember the seconds per voxel of every operation in a size."""
        self.least = seconds if self.least is None else np.minimum(self.least, seconds)
        self._seen.append((tiling.graph.axis, _planes(tiling), seconds))

    def seconds(self, tiling: GraphTiling) -> float:
        """Return a lower bound on the seconds of all operations of a size, if FASTER and AS_FAST hold."""
        if self.least is None:
            return 0.0
        known = self._known.get(id(tiling.axis_planes))
        if known is None:
            planes = _planes(tiling)
            known = self._known[id(tiling.axis_planes)] = _Known(planes, np.full(len(planes), np.inf))
        for axis, planes, seconds in self._seen[known.counted :]:
            if axis == tiling.graph.axis:
                alike = known.planes == planes
                known.least[alike] = np.minimum(known.least[alike], seconds[alike])
        known.counted = len(self._seen)
        rates = np.where(known.least < np.inf, AS_FAST * known.least, FASTER * self.least)
        return float(tiling.totals[tiling.figures.computed] @ rates)


def _planes(tiling: GraphTiling) -> Numbers:
    """Return the most planes that a step computes, of each operation."""
    return tiling.axis_planes.new.size[tiling.figures.computed]
