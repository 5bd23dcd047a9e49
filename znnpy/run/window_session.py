"""A session of a network that is computed in windows: each window is one image, and their results are blended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from znnpy.kernels.contract import ConvWeights, Primitive
from znnpy.kernels.table import TABLE
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.network import Network
from znnpy.planner.memory import BUFFERS
from znnpy.planner.plan import Plan
from znnpy.run.backend import Voxels
from znnpy.run.graph_session import Array, GraphSession
from znnpy.run.voxels import load_voxels
from znnpy.run.window_result import store_result
from znnpy.run.window_sums import WindowSums
from znnpy.shapes import turn, turned
from znnpy.window_cover import WindowStep
from znnpy.windows.weights import total_weights, window_weights

if TYPE_CHECKING:
    from znnpy.run.trace import Spans


class WindowSession:
    """Runs the windows of one plan on a processor, in the order of `WindowCover`; see `Session`."""

    max_in_flight = 0

    def __init__(
        self,
        plan: Plan,
        network: Network,
        weights: Sequence[ConvWeights],
        pool: ThreadPool,
        table: tuple[Primitive, ...] = TABLE,
        *,
        trace: Spans | None = None,
        lane: str | None = None,
        prepared: Callable[[int], None] | None = None,
    ) -> None:
        self.plan, self.network, self.pool = plan, network, pool
        self.idle_seconds: dict[str, float] = {}
        self._images = GraphSession(plan, network, weights, pool, table, trace=trace, lane=lane, prepared=prepared)
        self._cover, self._prepared = plan.window_cover(network), prepared
        self._windows = self._cover.grid.windows
        self._sums: WindowSums | None = None
        self._weights: npt.NDArray[np.float32] = np.empty((0, 0, 0), np.float32)

    @property
    def written(self) -> list[int]:
        """Voxels of one map that each choice has written, of all windows."""
        return self._images.written

    def __enter__(self) -> Self:
        self._images.__enter__()
        plan = self.plan
        assert plan.sums is not None, "plans of windows have sums"
        self._sums = WindowSums(self._cover, plan.sums, self.network.blended_maps, self.pool, self._prepared)
        assert self.network.windows is not None, "networks that are computed in windows have it"
        self._weights = window_weights(self.network.windows).transpose(turn(plan.axis))
        return self

    def __exit__(self, *cause: Any) -> None:
        self._sums = None
        self._images.__exit__(*cause)

    def buffers(
        self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int
    ) -> tuple[Iterable[Voxels], Iterable[Voxels]]:
        """Return arrays for `submit` of these dtypes; windows use their first voxels."""
        del reads, writes  # pages that are never written to cost nothing
        network = self.network
        values = network.output_channels * prod(self._cover.most_done)
        raws = [np.empty((network.input_channels, *self.plan.patch_in), raw) for _ in range(BUFFERS)]
        return raws, [np.empty(values, out) for _ in range(BUFFERS)]

    def submit(self, raw: Voxels, out: Voxels | None, *, begins: bool = True, step: object | None = None) -> None:
        """Compute one window, and write what is finished after it.

        raw     (c, z, y, x) of any real dtype, the voxels of the volume that the window covers; read only
        out     float32, float16 or uint8, C order; its first values are overwritten with the finished voxels
                (maps, z, y, x) of the network's result. None where there are none
        begins  of no interest: the place of a window says whether it continues what was summed up
        step    `Patch.step` of the plan's cover, a WindowStep

        ValuesOverflowError names the node whose result is not finite.
        """
        del begins
        assert isinstance(step, WindowStep), "windows say what they are"
        assert self._sums is not None, "they are there within the session"
        windows, sums, axes = self._windows, self._sums, (0, *(1 + axis for axis in turn(self.plan.axis)))
        sums.begin(step.part, step.place)
        members = self.network.members
        share = 1 / (len(windows.mirrors) * (1 if self.network.result.apart else members))
        for member, mirror in product(range(members), windows.mirrors):
            flipped = tuple(slice(None, None, -1 if axis in mirror else 1) for axis in range(3))

            def load(image: Array, flipped: tuple[slice, ...] = flipped) -> None:
                self._load(raw.transpose(axes), image[flipped], step)

            result = self._images.image(load, member)
            with self._images.span("blend"):
                sums.add(result[flipped], self._weights, share, member if self.network.result.apart else 0)
        if out is not None:
            with self._images.span("store"):
                self._store(step, out)

    def _load(self, raw: Voxels, image: Array, step: WindowStep) -> None:
        """Normalise voxels into the image of a window, with zeros where it exceeds the volume."""
        if raw.shape[1:] == image.shape[:3]:
            load_voxels(raw, image, self.network.normalise, self.pool)
            return
        before = [
            before if size < window else 0
            for before, size, window in zip(self._cover.grid.before, raw.shape[1:], image.shape[:3], strict=True)
        ]
        there = tuple(slice(lo, lo + size) for lo, size in zip(before, raw.shape[1:], strict=True))
        image[...] = 0
        load_voxels(raw, image[there], self.network.normalise, self.pool)

    def _store(self, step: WindowStep, out: Voxels) -> None:
        """Divide what is finished by the sums of the weights, and write the network's result of it."""
        assert self._sums is not None, "it is there within the session"
        box = self._cover.done(step)
        size = turned(box.size, self.plan.axis)
        maps = self.network.output_channels
        target = out.reshape(-1)[: maps * prod(size)].reshape(maps, *box.size)
        target = target.transpose((0, *(1 + axis for axis in turn(self.plan.axis))))
        totals = total_weights(self._cover.grid_as_is, self._cover.done_padded(step)).transpose(turn(self.plan.axis))
        first = None
        for lines, values in self._sums.finished():
            first = lines.lo if first is None else first
            part = slice(lines.lo - first, lines.hi - first)
            store_result(values, totals[:, part], target[:, :, part], self.network, self.pool)

    def run(self, raw: Voxels, out: Voxels | None, *, begins: bool = True, step: object | None = None) -> None:
        """Compute one window: `submit` it and `wait`."""
        self.submit(raw, out, begins=begins, step=step)

    def abandon(self) -> None:
        """Do nothing: a processor does not fail alone."""

    def done(self, ticket: Any) -> bool:
        """Return True: a window is done when it was submitted."""
        del ticket
        return True

    def wait(self, ticket: Any) -> None:
        """Do nothing: a window is done when it was submitted."""
        del ticket
