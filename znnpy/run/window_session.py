"""A session of a network that is computed in windows: each window is one image, and their results are blended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import product
from math import prod
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from znnpy.errors import VramError
from znnpy.kernels.contract import ConvWeights, Primitive
from znnpy.kernels.table import TABLE
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.network import Network
from znnpy.planner.plan import Plan
from znnpy.run.backend import Voxels
from znnpy.run.graph_backend import GraphOnCpu
from znnpy.run.graph_session import GraphSession
from znnpy.run.kept_tensor import Array
from znnpy.run.sum_arrays import SumArrays, SumsOnCpu
from znnpy.run.window_sums import WindowSums
from znnpy.shapes import turn
from znnpy.window_cover import WindowStep
from znnpy.windows.weights import total_weights, window_weights

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.run.trace import Spans


class WindowSession:
    """Runs the windows of one plan on a processor or a GPU, in the order of `WindowCover`; see `Session`."""

    def __init__(
        self,
        plan: Plan,
        network: Network,
        weights: Sequence[ConvWeights],
        pool: ThreadPool,
        table: tuple[Primitive, ...] = TABLE,
        *,
        device: Device | None = None,
        trace: Spans | None = None,
        lane: str | None = None,
        prepared: Callable[[int], None] | None = None,
    ) -> None:
        self.plan, self.network, self.pool = plan, network, pool
        self.idle_seconds: dict[str, float] = {}
        self._cover, self._prepared = plan.window_cover(network), prepared
        self._windows = self._cover.grid.windows
        values = network.output_channels * prod(self._cover.most_done)
        self._images = GraphSession(
            plan, network, weights, pool, table,
            device=device, trace=trace, lane=lane, prepared=prepared, values=values,
        )  # fmt: skip
        self._arrays: SumArrays | None = None
        self._sums: WindowSums | None = None
        self._weights: Array = None

    @property
    def written(self) -> list[int]:
        """Voxels of one map that each choice has written, of all windows."""
        return self._images.written

    @property
    def max_in_flight(self) -> int:
        """Windows that may be submitted and not waited for when the next is; 0: `submit` computes."""
        return self._images.max_in_flight

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._forget)
            stack.enter_context(self._images)
            plan = self.plan
            assert plan.sums is not None, "plans of windows have sums"
            assert self.network.windows is not None, "networks that are computed in windows have it"
            try:
                self._arrays = self._sum_arrays()
                self._sums = WindowSums(self._cover, plan.sums, self.network.blended_maps, self._arrays)
                weights = window_weights(self.network.windows).transpose(turn(plan.axis))
                self._weights = self._arrays.weights(weights)
            except VramError as error:
                clear_frames(error.__traceback__)  # who plans again with less needs what they refer to
                raise
            self._open = stack.pop_all()
        return self

    def __exit__(self, *cause: Any) -> None:
        self._open.__exit__(*cause)

    def _forget(self) -> None:
        """Let go of all arrays."""
        self._sums, self._arrays, self._weights = None, None, None

    def _sum_arrays(self) -> SumArrays:
        backend = self._images.backend
        if isinstance(backend, GraphOnCpu):
            return SumsOnCpu(self.network, self.pool, self._prepared)
        from znnpy.run.gpu_sums import SumsOnGpu  # here, since runs on the CPU need none of them
        from znnpy.run.graph_gpu import GraphOnGpu

        assert isinstance(backend, GraphOnGpu), "there is no other device"
        return SumsOnGpu(self.network, backend)

    def buffers(
        self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int
    ) -> tuple[Iterable[Voxels], Iterable[Voxels]]:
        """Return arrays for `submit` of these dtypes; windows use their first voxels."""
        return self._images.buffers(raw, out, reads=reads, writes=writes)

    def submit(self, raw: Voxels, out: Voxels | None, *, begins: bool = True, step: object | None = None) -> Any:
        """Begin to compute one window, and to write what is finished after it; return a ticket for `wait`.

        raw     (c, z, y, x) of any real dtype, the voxels of the volume that the window covers; read only
        out     float32, float16 or uint8, C order; its first values are overwritten with the finished voxels
                (maps, z, y, x) of the network's result. None where there are none
        begins  of no interest: the place of a window says whether it continues what was summed up
        step    `Patch.step` of the plan's cover, a WindowStep

        ValuesOverflowError, here or in `wait`, names the node whose result is not finite.
        """
        del begins
        assert isinstance(step, WindowStep), "windows say what they are"
        assert self._sums is not None, "they are there within the session"
        windows, sums, backend = self._windows, self._sums, self._images.backend
        maps, box = self.network.output_channels, self._cover.done(step)
        target = None if out is None else out.reshape(-1)[: maps * box.voxels]
        source, there = backend.begin_step(raw, target, begins=True)
        sums.begin(step.part, step.place)
        members, apart = self.network.members, self.network.result.apart
        share = 1 / (len(windows.mirrors) * (1 if apart else members))
        for number, (member, mirror) in enumerate(product(range(members), windows.mirrors)):
            flipped = tuple(slice(None, None, -1 if axis in mirror else 1) for axis in range(3))

            def load(image: Array, flipped: tuple[slice, ...] = flipped) -> None:
                self._load(source.transpose(self._axes), image, flipped)

            result = self._images.image(load, member)
            with self._images.span("blend"):
                sums.add(result[flipped], self._weights, share, member if apart else 0, counts=number == 0)
        if there is not None:
            with self._images.span("store"):
                self._store(step, there.reshape(maps, *box.size).transpose(self._axes))
        return backend.end_step()

    @property
    def _axes(self) -> tuple[int, ...]:
        """The order of the axes of an array (maps, z, y, x) that puts the axis of rows first."""
        return (0, *(1 + axis for axis in turn(self.plan.axis)))

    def _load(self, raw: Array, image: Array, flipped: tuple[slice, ...]) -> None:
        """Normalise voxels into the image of a window, mirrored, with zeros where it exceeds the volume."""
        backend, mirrored = self._images.backend, raw[(slice(None), *flipped)]
        if raw.shape[1:] == image.shape[:3]:
            backend.load(mirrored, image)
            return
        there = []
        sides = zip(self._cover.grid.before, raw.shape[1:], image.shape[:3], flipped, strict=True)
        for before, size, window, along in sides:
            first = before if size < window else 0
            first = window - first - size if along.step == -1 else first
            there.append(slice(first, first + size))
        backend.clear(image)
        backend.load(mirrored, image[tuple(there)])

    def _store(self, step: WindowStep, out: Array) -> None:
        """Write the network's result of what is finished, (maps, z, y, x), turned."""
        assert self._sums is not None, "it is there within the session"
        assert self._arrays is not None, "it is there within the session"

        def totals() -> npt.NDArray[np.float32]:
            box = self._cover.done_padded(step)
            return total_weights(self._cover.grid_as_is, box).transpose(turn(self.plan.axis))

        self._arrays.store(self._sums.finished(), totals, out)

    def run(self, raw: Voxels, out: Voxels | None, *, begins: bool = True, step: object | None = None) -> None:
        """Compute one window: `submit` it and `wait`."""
        self.wait(self.submit(raw, out, begins=begins, step=step))

    def abandon(self) -> None:
        """Ask nothing of a device that failed any more; leaving then waits for nothing."""
        self._images.abandon()

    def done(self, ticket: Any) -> bool:
        """Return whether `wait` would return at once."""
        return self._images.done(ticket)

    def wait(self, ticket: Any) -> None:
        """Wait until what a window finishes is there."""
        self._images.wait(ticket)
