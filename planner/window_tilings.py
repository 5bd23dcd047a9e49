"""The windows of a volume in one order, and the memory that their sums take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt

from znnpy.errors import NoPlanError
from znnpy.graph_columns import Area, GraphCover, TurnedGraph, cover_of_window
from znnpy.graph_operations import Operation
from znnpy.kernels.contract import Footprint
from znnpy.messages import option
from znnpy.network import Network
from znnpy.option_values import DeviceKind
from znnpy.planner.graph_tilings import GraphTiling
from znnpy.planner.memory import StageMemory
from znnpy.planner.plan import Sums
from znnpy.shapes import FLOAT32, Precision, Vec3, turned
from znnpy.window_cover import WindowCover

PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of the output, that are tried


@dataclass(frozen=True)
class WindowTiling(GraphTiling):
    """The one patch of a window, computed for all windows of a volume, and the sums of their results."""

    windows: WindowCover
    sums: Sums
    device: DeviceKind = "cpu"

    @property
    def output(self) -> Vec3:
        return self.windows.region.size

    @property
    def values(self) -> int:
        graph = self.cover.graph
        return graph.network.output_channels * prod(self.windows.most_done)

    @property
    def maps(self) -> int:
        """Maps that are blended."""
        return self.graph.network.blended_maps

    @property
    def times(self) -> int:
        """How often a window is computed, mirrored ones and members of an ensemble counted."""
        return self.windows.computed * len(self.windows.windows.mirrors) * self.graph.network.members

    @property
    def steps(self) -> int:
        return self.windows.computed

    @property
    def totals(self) -> npt.NDArray[np.float64]:
        return super().totals * self.times

    @property
    def carries(self) -> int:
        return sums_bytes(self.windows, self.sums, self.maps + (self.device == "gpu"))  # there weights are a map

    def memory(
        self, operations: Sequence[Operation], footprints: Sequence[Footprint], arena: int, device: DeviceKind
    ) -> StageMemory:
        """Return what operations take; each member of an ensemble has weights of its own."""
        stage = super().memory(operations, footprints, arena, device)
        members = self.graph.network.members
        return stage if members == 1 else replace(stage, weights=members * stage.weights)

    @property
    def work_ratio(self) -> float:
        """Voxels of all windows for a voxel of the output."""
        return self.times * prod(self.windows.windows.size) / prod(self.output)


def sums_bytes(cover: WindowCover, sums: Sums, maps: int) -> int:
    """Return the bytes of the sums, of the weights of a window, and of the sums of weights of what it finishes."""
    weights = prod(cover.windows.size) + prod(cover.most_done)
    return cover.sums_bytes(maps, 4 if sums.dtype == "float32" else 2) + FLOAT32 * weights


def window_tilings(
    network: Network,
    area: Area,
    precision: Precision,
    sums: str,
    graph: Callable[[int], TurnedGraph],
    device: DeviceKind = "cpu",
) -> Iterator[WindowTiling]:
    """Yield the orders of windows to try, with sums of one dtype."""
    assert network.windows is not None, "networks that are computed in windows have it"
    windows, seen = network.windows, set()
    for axis in range(3):
        one = WindowCover(windows, area.volume, area.region, axis)
        if why := one.why_too_many:
            raise NoPlanError(f"{why}; give larger ones as {option('window')}, or less {option('overlap')}")
        alike = graph(axis).lowered.original.layers, turned(windows.size, axis), one.lines
        if alike in seen:  # the same windows again, with voxels in another order
            continue
        seen.add(alike)
        inner: GraphCover = cover_of_window(network, axis, precision)
        for parts in PARTS:
            if parts <= one.most_parts:
                cut = WindowCover(windows, area.volume, area.region, axis, parts)
                yield WindowTiling(inner, cut, Sums("float16" if sums == "float16" else "float32", parts), device)
