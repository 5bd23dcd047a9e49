"""Sums of the results of windows on a GPU: `SumArrays` in device memory.

The sums of the weights are one more map of the sums, so that nothing is uploaded for a window but its voxels.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.kernels.gpu import blend
from znnpy.network import Network
from znnpy.run.graph_gpu import GraphOnGpu
from znnpy.run.sum_arrays import Array, Finished

if TYPE_CHECKING:
    import numpy.typing as npt


class SumsOnGpu:
    """Sums in the memory of a GPU, see `SumArrays`."""

    extra_maps = 1

    def __init__(self, network: Network, backend: GraphOnGpu) -> None:
        self._network, self._backend = network, backend
        result = network.result
        self._maps = network.blended_maps // (network.members if result.apart else 1)
        self._above: Array | None = None
        if result.kind == "above":
            thresholds = np.broadcast_to(np.array(result.above, np.float32), (self._maps,))
            self._above = backend.executor.put(np.ascontiguousarray(thresholds), "thresholds")

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        device = self._backend.executor
        return device.view(device.allocate(prod(shape) * dtype.itemsize, "sums of windows"), shape, dtype)

    def weights(self, weights: npt.NDArray[np.float32]) -> Array:
        return self._backend.executor.put(np.ascontiguousarray(weights), "weights of a window")

    def take(self, row: Array, kept: Array) -> None:
        blend.take(self._backend.executor, row, kept, self._backend.sums_peak)

    def clear(self, sums: Array) -> None:
        blend.clear(self._backend.executor, sums)

    def add(self, sums: Array, result: Array, weights: Array, share: float, member: int, *, counts: bool) -> None:
        first = member * self._maps
        blend.add(self._backend.executor, sums, result, weights, share, first=first, counts=counts)

    def store(self, finished: Finished, totals: Callable[[], npt.NDArray[np.float32]], out: Array) -> None:
        del totals  # they are the last map of the sums
        result, first = self._network.result, None
        members = self._network.members if result.apart else 1
        for lines, sums in finished:
            first = lines.lo if first is None else first
            part = out[:, :, lines.lo - first : lines.hi - first]
            blend.finish(
                self._backend.executor,
                sums,
                part,
                members=members,
                function=result.function,
                kind=result.kind,
                above=self._above,
                peak=self._backend.output_peak,
            )
