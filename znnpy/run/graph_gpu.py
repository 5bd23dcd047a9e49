"""The backend of a GPU for graphs: the steps of `GpuSteps`, with tensors as `GraphSession` lays them out.

Peaks  The input, each operation with arithmetic, sums of windows, and the output have a float32 each, in which the
       largest |value| of the step is gathered. They show overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from znnpy.kernels.dtypes import kept_dtype
from znnpy.kernels.gpu import ops
from znnpy.network import Network
from znnpy.planner.memory import PINNED, STAGED
from znnpy.planner.plan import Plan, Tensor
from znnpy.run.arena import Arena
from znnpy.run.backend import Voxels, input_overflow, output_overflow
from znnpy.run.gpu_steps import FLOAT16_END, Checks, GpuSteps, Ticket, layer_overflow
from znnpy.run.graph_backend import Arrays, without_overlap
from znnpy.run.sum_arrays import sums_overflow
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.contract import Footprint
    from znnpy.kernels.gpu.device import Device, Recording
    from znnpy.run.trace import Spans


class GraphOnGpu(GpuSteps):
    """Runs the operations of a graph on a GPU, see `GraphBackend`.

    subjects  of errors, one for each operation, such as "node up1"
    values    that a step gives at most
    """

    def __init__(
        self,
        plan: Plan,
        network: Network,
        subjects: Sequence[str],
        values: int,
        pool: Checks,
        device: Device | None = None,
        trace: Spans | None = None,
        lane: str | None = None,
    ) -> None:
        self._plan, self._network, self._subjects, self._values = plan, network, subjects, values
        self._dtype = kept_dtype(plan.precision)
        super().__init__(pool, device, trace, lane or "GPU", values=self._dtype, normalise=network.normalise)

    def _release(self) -> None:
        super()._release()
        self._raises: tuple[bool, ...] = ()  # whether an operation raises its peak
        self._recordings: dict[tuple[int, int], Recording] = {}  # by key and address of the peaks
        self._records = False  # what is queued is recorded

    def allocate_arena(self, nbytes: int, tensors: Sequence[Tensor], footprints: Sequence[Footprint]) -> Arena:
        device = self.executor
        block = device.allocate(nbytes, "the arena")
        self._raises = tuple(footprint.raises_peak for footprint in footprints)
        plan = self._plan
        raw_bytes = self._network.input_channels * prod(plan.patch_in) * plan.itemsize_in
        out_bytes = self._values * plan.itemsize_out
        self._allocate_slots(raw_bytes, out_bytes, reads=STAGED, writes=STAGED, peaks=len(footprints) + 3)

        def view(shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int) -> Any:
            return device.view(block, shape, dtype, offset=offset)

        return Arena(tensors, view)

    def block(self, count: int, dtype: npt.DTypeLike) -> Any:
        nbytes = count * np.dtype(dtype).itemsize
        return self.executor.view(self.executor.allocate(nbytes, "planes that are kept"), (count,), dtype)

    def move(self, target: Any, source: Any) -> None:
        device = self.executor
        distance = (device.address(source) - device.address(target)) // source.dtype.itemsize
        parts = without_overlap(source.size, distance) if 0 < distance < source.size else [(0, source.size)]
        for first, end in parts:
            device.copy_async(target[first:end], source[first:end], device.stream)

    def clear(self, x: Any) -> None:
        self.executor.clear(x)

    def copied(self, x: Any, store: Any) -> Any:
        copy = self.executor.view(store, x.shape, x.dtype)
        ops.copy(self.executor, x, copy)
        return copy

    def load(self, raw: Any, x: Any) -> None:
        self._moving.load(raw, x, self._lent[-1].address)

    def store(self, x: Any, out: Any) -> None:
        self._moving.store(0, x[None], out, self.output_peak)

    @property
    def sums_peak(self) -> int:
        """The address of the peak of sums of windows that earlier rows kept."""
        return int(self._lent[-1].address + FLOAT32 * (len(self._raises) + 1))

    @property
    def output_peak(self) -> int:
        """The address of the peak of the output."""
        return int(self._lent[-1].address + FLOAT32 * (len(self._raises) + 2))

    def run(
        self, index: int, step: Any, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], more: Sequence[Any]
    ) -> None:
        assert not more, "no primitive of a GPU gives two outputs"
        if not self._records:
            self._wait_for_room()
        peak = {"out_peak": self._lent[-1].address + FLOAT32 * (index + 1)} if self._raises[index] else {}
        step.run(inputs, out, scratch, **peak)
        if not self._records:
            self._note_queued(self._plan.choices[index].seconds)

    def repeated(self, key: int, work: Callable[[], None]) -> bool:
        """Queue operations at once, as they were recorded; with a trace, one after the other, so that each is timed."""
        if self._traced is not None:
            work()
            return True
        self._wait_for_room()
        place = key, self._lent[-1].address
        recording, called = self._recordings.get(place), False
        if recording is None:
            self._records, called = True, True
            try:
                recording = self._recordings[place] = self.executor.recorded(work)
            finally:
                self._records = False
        recording.play()
        self._note_queued(sum(choice.seconds for choice in self._plan.choices))
        return called

    def buffers(
        self, raw: Arrays, out: Arrays, *, reads: int, writes: int
    ) -> tuple[Iterable[Voxels], Iterable[Voxels]]:
        pinned, native = self.executor.pinned, raw.dtype.newbyteorder("=")
        self._compile(native, out.dtype)
        raws = (pinned(raw.shape, native) for _ in range(min(PINNED, reads)))
        return raws, (pinned(out.shape, out.dtype) for _ in range(min(PINNED, writes)))

    def _check(self, ticket: Ticket, peaks: Sequence[float]) -> None:
        end = FLOAT16_END if self._dtype == np.float16 else np.inf
        entering, *operations, sums, leaving = peaks
        if not entering < end and ticket.raw is not None:
            raise input_overflow(ticket.raw, self._dtype)
        for subject, peak in zip(self._subjects, operations, strict=True):
            if not peak < end:
                raise layer_overflow(peak, self._dtype).with_context(subject)
        if self._plan.sums is not None and self._plan.sums.dtype == "float16" and not sums < np.inf:
            raise sums_overflow("vram")
        if ticket.out is not None and ticket.out.dtype == np.float16 and not leaving < FLOAT16_END:
            raise output_overflow(leaving, ticket.out.dtype)
